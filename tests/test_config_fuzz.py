"""Presets, saved configs and overrides, mutated: each is one clear message, or a run that says what was written and is read back."""

import copy
import functools
import random

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmkit.config import RunConfig, load, load_file, to_yaml
from mmkit.errors import UserError
from mmkit.notebook.parameters import assemble
from mmkit.presets import PARAMS
from mmkit.values import Yaml, names_of

FUZZED = settings(
    derandomize=True, database=None, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
LONGEST = 3000  # characters of a message
SEEDS = st.integers(0, 2**40)
JUNK = [
    None, True, False, 0, 1, -1, 3, 10**30, 0.5, float("inf"), float("nan"), "", "x", "7", "auto", "é", "a\nb", "x" * 5000, [], {}, [1], ["x"],
    [[]], [True], {"x": 1}, {1: 2}, {"kind": "vlm"}, [{"name": "x"}], {"replace": True}, {None: None},
]  # fmt: skip
NAMES = [*names_of(RunConfig), *{path.rpartition(".")[2] for path in names_of(RunConfig)}]
LINES = (
    "x: !!int y", "x: &a [*a]", "name: 2024-02-30", "seed: 0b_", "\tx: 1", "? [1]\n: 2", "<<: 3", "<<: [1]", "x: " + "[" * 800, "x: !!binary /+8=",
    "x: !!python/object:os.system {}", "x: *y", "x: !!set {1}", "seed: 1\nseed: 2", "%", "---", "--- {}", "stages: {finetune: {train: 3}}",
    "stages: [1]", "stages: {finetune: 1}", "stages: {1: {}, x: {}}", "base: [tiny]", "base: no", "base: nothing", "x: \0", "name: 12:30:45",
    "seed: 1_0", "seed: 9" + "9" * 5000, "train: {steps: 1e400}", "train: {steps: .nan}", "train: null", "model: null", "é", "", "pinned: 3", "chosen: [x]",
    "pinned: [[1]]", "chosen: [{setting: x, asked: 1, value: 2, why: y}]\nbackend: {kind: auto}", "model: {connector: {heads: 0}}",
)  # fmt: skip


@functools.cache
def trees():
    """Runs as YAML holds them: a vision-language model with regions and adapters, one with samplers, a contrastive one."""
    runs = [load("ferret-7b-lora-debug", "finetune"), load("8b-debug", "pretrain"), load("clip-tiny", "pretrain"), load("8b", "eval")]
    return [yaml.safe_load(to_yaml(run)) for run in runs]


def places(tree, before=()):
    """Paths of everything in a tree."""
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inside:
        yield (*before, key)
        yield from places(value, (*before, key))


class Fault:
    """A mutated tree, and {path: value} of what was put in the place of another, which alone is shown where a test fails."""

    def __init__(self, tree, put):
        self.tree, self.put = tree, put

    def __repr__(self):
        return f"Fault({self.put})"


@functools.cache
def files():
    """The kit's own presets, as their files hold them."""
    return [yaml.load(path.read_text(encoding="utf8"), Yaml) for path in sorted(PARAMS.glob("*.yaml"))]  # noqa: S506


def mutated(kept, seed):
    """One of the trees that ``kept`` gives, with one to three faults. Choices are a seed's: hypothesis prefers its simplest."""
    rng = random.Random(seed)
    tree, put = copy.deepcopy(rng.choice(kept())), {}
    for _ in range(rng.randint(1, 3)):
        path = rng.choice(sorted(places(tree), key=str) or [()])
        if not path:
            break
        *above, last = path
        inside = functools.reduce(lambda part, key: part[key], above, tree)
        put = {place: value for place, value in put.items() if place[: len(above)] != tuple(above)}  # of what is changed again
        how = rng.choice(["value", "value", "value", "rename", "remove", "wrap"])
        if how == "value":
            inside[last] = put[path] = copy.deepcopy(rng.choice(JUNK))
        elif how == "wrap":
            inside[last] = rng.choice([[inside[last]], {"x": inside[last]}, {last: inside[last]}])
        elif how == "remove" or isinstance(inside, list):
            inside.pop(last)
        else:
            name = rng.choice([f"{last}x", str(last)[1:], str(last).upper(), 3, None, "lr", "steps"])
            inside[name] = inside.pop(last)
    return Fault(tree, put)


def one_message(error: UserError) -> None:
    assert str(error).strip() and len(str(error)) < LONGEST, f"{len(str(error))} characters: {str(error)[:200]}"


def holds(run: RunConfig, put: dict) -> None:
    """What the run has where a value was put is that value, not another that it was taken for."""
    found = run.model_dump(mode="json")
    for path, value in put.items():
        got = found
        for key in path:
            got = got[key] if isinstance(got, dict) and key in got or isinstance(got, list) and key < len(got) else None
        if isinstance(value, bool) and got is not None:
            assert got is value, (path, value, got)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and got is not None:
            assert float(got) == float(value) and not isinstance(got, bool) or isinstance(got, bool) and value in (0, 1), (path, value, got)


def checked(make, tmp_path, put=None):
    try:
        run = make()
    except UserError as error:
        return one_message(error)
    holds(run, put or {})
    (tmp_path / "again.yaml").write_text(to_yaml(run), encoding="utf8")
    assert to_yaml(load_file(tmp_path / "again.yaml")) == to_yaml(run)  # not ==: nan is no nan
    return run


@FUZZED
@given(SEEDS.map(lambda seed: mutated(trees, seed)))
def test_a_saved_config_is_read_as_it_is_written_or_refused(tmp_path, fault):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(fault.tree, allow_unicode=True), encoding="utf8")
    checked(lambda: load_file(tmp_path / "config.yaml"), tmp_path, fault.put)


@FUZZED
@given(SEEDS.map(lambda seed: mutated(files, seed)), st.sampled_from(["pretrain", "finetune", "eval"]))
def test_a_mutated_preset_file_gives_a_run_or_one_message(tmp_path, monkeypatch, fault, stage):
    monkeypatch.setenv("MMKIT_PARAMS", str(tmp_path))
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(fault.tree, allow_unicode=True), encoding="utf8")
    checked(lambda: load("mine", stage), tmp_path)


@FUZZED
@given(st.sampled_from(LINES), st.integers(0, 2**31), st.sampled_from(["in", "cut", "latin-1", "utf-16", "alone"]), st.booleans())
def test_text_that_is_half_yaml_gives_a_run_or_one_message(tmp_path, monkeypatch, line, at, how, saved):
    monkeypatch.setenv("MMKIT_PARAMS", str(tmp_path))
    lines = to_yaml(load("clip-tiny")).splitlines() if saved else ["base: tiny", "# for a test", "train: {steps: 3}"]
    lines.insert(at % (len(lines) + 1), line)
    text = "\n".join(lines) if how != "alone" else line
    data = text.encode(how if how in ("latin-1", "utf-16") else "utf8")
    (tmp_path / "mine.yaml").write_bytes(data[: at % (len(data) + 1)] if how == "cut" else data)
    checked(lambda: load_file(tmp_path / "mine.yaml") if saved else load("mine", "finetune"), tmp_path)


@FUZZED
@given(
    st.dictionaries(
        st.sampled_from([*NAMES, "model", "stage", "backend", "settings", "x", "", 3, None])
        | st.sampled_from(NAMES).map(lambda name: f"{name}.x") | st.just("model.language.architecture.hidden_size"),
        st.sampled_from(JUNK) | st.sampled_from(["[1", "{a: 1}", "{[1]: 2}", "none", "!!int x", "&a [*a]", "1e400", "[[[", "(1, 2)", b"\xff", {1}, 1j, (1, "a")]),
        min_size=1, max_size=3,
    ),
    st.sampled_from(["8b-debug", "clip-tiny"]),
)  # fmt: skip
def test_any_override_gives_a_run_or_one_message(tmp_path, values, model):
    put = {} if "settings" in values else {name: value for name, value in values.items() if name not in ("stage", "backend", "model")}
    checked(lambda: assemble({"model": model, **copy.deepcopy(values)}, "finetune", "a test"), tmp_path)
    with pytest.raises(UserError):
        assemble({"model": model, **put, "no.such": 1}, "finetune", "a test")
