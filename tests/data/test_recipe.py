"""The published mixture and what a run makes of it."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mmkit import cli, config
from mmkit.config import ConfigError, DataConfig, SourceConfig
from mmkit.data.mixture import Mixture, iterate
from mmkit.data.readers import open_mixture
from mmkit.data.recipe import realised, recipe, sources_of, with_category_shares
from mmkit.launch.preflight import check_examples
from mmkit.launch.requirements import missing
from mmkit.presets import PARAMS
from mmkit.training.validation import check as validation_check


class Sized:
    def __init__(self, name, n):
        self.name, self.n = name, n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        raise AssertionError("the order of an epoch needs no example")


def by_category(rows, field) -> Counter:
    found: Counter = Counter()
    for row in rows:
        found[row["category"]] += row[field]
    return found


def test_published_sizes_add_up():
    facts = recipe("cambrian_7m")
    assert sum(row["samples"] for row in facts["sources"]) == 7_055_500 and len(facts["sources"]) == 65
    sizes = by_category(facts["sources"], "samples")
    printed = {"OCR": 27.6, "General": 33.3, "Language": 23.8, "Counting": 8.5, "Code": 0.8, "Math": 3.2, "Science": 2.9}
    assert all(abs(sizes[name] / 70_555 - share) < 0.06 for name, share in printed.items())


def test_categories_get_their_published_ratio_within_one_percent():
    facts = recipe("cambrian_7m")
    configs = sources_of(DataConfig(mixture="cambrian_7m"))
    sized = [Sized(row["name"], row["samples"]) for row in facts["sources"]]
    mix = Mixture(configs, sized, 50_000)
    seen = np.array(list(iterate(mix, mix.order(0, 0)))[:10_000])
    counts = {name: int(n) for name, n in zip((c.name for c in mix.configs), np.histogram(seen, mix.offsets)[0], strict=True)}
    rows = realised(mix, counts)
    assert max(abs(row["difference"]) for row in rows) < 0.01
    found, total = by_category(rows, "realised"), sum(facts["ratios"].values())
    assert all(abs(found[name] - share / total) < 0.01 for name, share in facts["ratios"].items())


def test_cap_is_the_threshold_of_one_source():
    configs = sources_of(DataConfig(mixture="cambrian_7m"))
    assert {source.cap for source in configs} == {350_000} and sum(
        source.weight for source in configs
    ) == pytest.approx(1)
    weight = {source.name: source.weight for source in configs}
    assert weight["OpenOrca"] / weight["MathInstruct"] == pytest.approx(
        350 / 262
    )  # 994k samples count as 350k


def test_a_category_without_a_share_is_named():
    source = SourceConfig(name="a", format="llava", path="a", category="OCRR")
    with pytest.raises(ConfigError, match="category 'OCRR' has no share; did you mean 'OCR'"):
        with_category_shares([source], {"OCR": 1.0}, {"a": 5})


def test_unknown_mixture_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'cambrian_7m'"):
        recipe("cambrian_10m")
    with pytest.raises(ConfigError, match="did you mean 'cambrian_7m'"):
        open_mixture(config.load("8b", "finetune", {"data.mixture": "cambrian7m", "data.sources": "[]"}).data)


# ---------------------------------------------------------------- a run that names it


@pytest.fixture
def small_mixture(tmp_path, monkeypatch):
    """A user's mixture of three sources, laid beside the kit's, and the files of two of them."""
    params = tmp_path / "params"
    (params / "mixtures").mkdir(parents=True)
    rows = [("Low-Level Vision", "OCR", 4), ("B", "OCR", 4), ("C", "Math", 8)]
    listed = "".join(
        f"  - {{name: {name}, category: {category}, samples: {n}}}\n" for name, category, n in rows
    )
    text = f"name: small\ncap: 6\nratios: {{OCR: 30.0, Math: 10.0}}\nsources:\n{listed}"
    (params / "mixtures" / "small.yaml").write_text(text)
    for name, _, samples in rows[:2]:
        lines = [
            {
                "id": f"{name}{k}",
                "conversations": [{"from": "human", "value": f"what {k}"}, {"from": "gpt", "value": "this"}],
            }
            for k in range(samples)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setenv("MMKIT_PARAMS", str(params))
    return tmp_path


SMALL = {"data.mixture": "small", "data.sources": "[]"}


def test_a_run_that_names_a_mixture_trains_on_its_sources(small_mixture):
    (small_mixture / "C.jsonl").write_text((small_mixture / "B.jsonl").read_text() * 2)
    run = config.load("8b-debug", "finetune", SMALL | {"data.mixture_root": str(small_mixture)})
    mixture = open_mixture(run.data)
    assert [(row["source"], row["category"]) for row in mixture.lines()] == [
        ("Low-Level Vision", "OCR"),
        ("B", "OCR"),
        ("C", "Math"),
    ]
    assert [round(row["share"], 2) for row in mixture.lines()] == [
        0.36,
        0.36,
        0.29,
    ]  # of 14: 3/8, 3/8 and 2/8 in whole samples


def test_the_check_lists_every_source_and_says_which_is_missing(small_mixture, capsys):
    run = config.load("8b-debug", "finetune", SMALL | {"data.mixture_root": str(small_mixture)})
    rows = check_examples(run)
    assert [row["source"] for row in rows] == ["Low-Level Vision", "B", "C"] and [
        row["examples"] for row in rows
    ] == [4, 4, 0]
    assert "C.jsonl" in rows[2]["first fault"] and [row["bad"] for row in rows] == [0, 0, 1]
    words = [
        "data",
        "check",
        "--model",
        "8b-debug",
        "--stage",
        "finetune",
        "--set",
        "data.mixture=small",
        "data.sources=[]",
    ]
    assert cli.main([*words, f"data.mixture_root={small_mixture}"]) == 2
    assert "C.jsonl" in capsys.readouterr().out


def test_files_of_a_mixture_are_among_what_a_run_misses(small_mixture):
    run = config.load("8b-debug", "finetune", SMALL | {"data.mixture_root": str(small_mixture)})
    missed = [need.what for need in missing(run) if need.kind == "data"]
    assert "data C" in missed and "data B" not in missed


def test_a_root_without_a_mixture_is_refused():
    with pytest.raises(ConfigError, match="data.mixture_root .* is read with data.mixture, which is not set"):
        config.load("8b", "finetune", {"data.mixture_root": "/disk"})


def test_sources_beside_a_mixture_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"data.sources \(cambrian_7m\) and data.mixture 'cambrian_7m' both say what to train on",
    ):
        open_mixture(config.load("8b", "finetune", {"data.mixture": "cambrian_7m"}).data)


def test_held_out_sources_of_a_mixture_are_refused(small_mixture):
    held = json.dumps([{"name": "held", "format": "llava", "path": str(small_mixture / "B.jsonl")}])
    settings = SMALL | {
        "data.mixture_root": str(small_mixture),
        "data.validation": held,
        "train.eval_every": 1,
    }
    run = config.load("8b-debug", "finetune", settings)
    with pytest.raises(ConfigError, match="is trained on too"):
        validation_check(run, tasks=False)


def test_the_mixture_of_8b_names_its_files_below_the_root():
    run = config.load(
        "8b",
        "finetune",
        {"data.mixture": "cambrian_7m", "data.sources": "[]", "data.mixture_root": "/disk/cambrian/"},
    )
    sources = sources_of(run.data)
    assert len(sources) == 65 and (sources[0].path, sources[0].images) == (
        "/disk/cambrian/DVQA.jsonl",
        "/disk/cambrian/images",
    )
    assert Path(PARAMS, "mixtures", "cambrian_7m.yaml").is_file()
