"""What a run misses is told in rows, `mmkit get` fetches it from a hub on loopback, and the disk is planned
as it will be filled."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from mmkit import cli
from mmkit.config import ConfigError, load
from mmkit.errors import InputError
from mmkit.launch import requirements
from mmkit.launch.preflight import preflight
from mmkit.launch.requirements import DATA, WEIGHTS, Published, get, missing, told
from mmkit.launch.machine import GIB, Machine
from tests.launch.stub_hub import SHA, TOKEN, StubHub
from tests.launch.test_preflight import llava_run

PUBLISHED = [
    "8b",
    "13b",
    "34b",
    "phi3-3b",
    "ferret-7b",
    "ferret-13b",
    "llava-7b",
    "llava-13b",
    "clip-vit-l-14",
]
BIG = Machine("big", "cuda", "big", 1, 10_000 * GIB, peak=dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), 1e15))
TINY = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 32,
}
TINY |= {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stub hub that the client of this process talks to, with an empty cache and no token."""
    stub = StubHub()
    template = stub.url + "/{repo_id}/resolve/{revision}/{filename}"
    settings = {
        "ENDPOINT": stub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "HF_HUB_CACHE": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": False,
        "DOWNLOAD_CHUNK_SIZE": 512,
    }
    for name, value in (settings | {"HF_TOKEN_PATH": str(tmp_path / "token")}).items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield stub
    stub.close()


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """File name -> content of a language model's repository: two shards with an index, a pickled copy, code,
    and a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from mmkit.models.packs import byte_tokenizer

    folder = tmp_path_factory.mktemp("language")
    config = AutoConfig.for_model(**TINY)
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="100kB")
    byte_tokenizer().save_pretrained(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "model.safetensors.index.json" in files
    return files | {
        "pytorch_model.bin": b"pickled",
        "modeling_own.py": b"raise SystemExit",
        "original/consolidated.00.pth": b"more",
    }


def debug_run(tmp_path, source="lab/tiny", **overrides):
    """8b's debug twin with its language model from the stub hub, and a file of its own as data."""
    data = overrides.pop("sources", [llava_run(tmp_path, "mine", ["a.png"] * 8)])
    settings = {
        "model.language.source": source,
        "model.language.tokenizer": None,
        "model.language.architecture": TINY,
    }
    return load(
        "8b-debug", "pretrain", settings | {"data.sources": data, "root": str(tmp_path / "runs")} | overrides
    )


# ---------------------------------------------------------------- what is told


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_missing_thing_of_a_published_preset_is_a_row(name, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    for stage in ("pretrain", "finetune"):
        run = load(name, stage)
        found = {need.what: need for need in missing(run)}
        for source in run.data.sources:
            need = found[f"data {source.name}"]
            assert need.known.licence != requirements.UNKNOWN and (need.command or need.known.how)
        if run.model.kind == "vlm":
            weights = [
                need
                for need in found.values()
                if need.kind == "weights" and need.source != requirements.STAGE_BEFORE
            ]
            assert {need.source for need in weights} >= {run.model.language.source}
            assert all(
                need.known == WEIGHTS[need.source] and need.fetch and f"mmkit get {name}" in need.command
                for need in weights
            )
            assert ("weights to start from" in found) == (stage == "finetune")
    if name == "8b":
        assert "gated" in found["language model"].row()["licence or gate"]
        assert found["weights to start from"].command == "mmkit train --model 8b --stage pretrain"
        assert found["language model"].row()["size"] == "16.1 GB" and found["language model"].to == str(
            tmp_path / "hf"
        )


def test_the_sizes_in_the_table_are_those_of_the_published_architectures():
    import open_clip
    from transformers import CLIPConfig, CLIPModel, Dinov2Model

    from mmkit.models.encoders import build_encoder
    from mmkit.models.language import load_language

    for name in PUBLISHED[:-1]:
        model = load(name).model
        published = {
            **model.language.architecture,
            "vocab_size": min(model.language.architecture["vocab_size"], 32000),
        }
        vicuna = "vicuna" in model.language.source  # Ferret adds a token to it
        settings = model.language.model_copy(update={"architecture": published} if vicuna else {})
        count = sum(p.numel() for p in load_language(settings, "meta").parameters())
        assert WEIGHTS[model.language.source].size == 2 * count, name
    counts = {}
    for repository, name, kind in (
        ("timm/ViT-SO400M-14-SigLIP-384", "ViT-SO400M-14-SigLIP-384", open_clip.model.CustomTextCLIP),
        (
            "laion/CLIP-convnext_xxlarge-laion2B-s34B-b82K-augreg-soup",
            "convnext_xxlarge",
            open_clip.model.CLIP,
        ),
    ):
        settings = {
            key: value for key, value in open_clip.get_model_config(name).items() if key != "custom_text"
        }
        with torch.device("meta"):
            counts[repository] = sum(p.numel() for p in kind(**settings).parameters())
    vision = dict(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        patch_size=14,
        image_size=336,
    )
    text = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
    with torch.device("meta"):
        clip = CLIPModel(CLIPConfig(projection_dim=768, vision_config=vision, text_config=text))
        trunk = build_encoder(
            next(e for e in load("8b").model.encoders if e.name == "dinov2-g-378"), "meta"
        ).trunk
        dino = Dinov2Model(trunk.config)
    counts["openai/clip-vit-large-patch14-336"] = sum(p.numel() for p in clip.parameters())
    counts["facebook/dinov2-giant"] = sum(p.numel() for p in dino.parameters())
    for repository, count in counts.items():
        assert WEIGHTS[repository].size == pytest.approx(4 * count, rel=2e-4), repository


def test_what_the_tables_do_not_know_is_asked_of_the_hub_or_said_to_be_unknown(
    hub, language, tmp_path, monkeypatch
):
    hub.add("lab/tiny", language)
    [need] = missing(debug_run(tmp_path))
    read = {
        name: data
        for name, data in language.items()
        if name.endswith((".safetensors", ".json", ".jinja")) and "/" not in name
    }
    assert (
        need.known.size == sum(map(len, read.values()))
        and need.known.licence == "apache-2.0"
        and not hub.fetched()
    )
    assert need.command == "mmkit get 8b-debug with the settings of this run"
    hub.gate.add("lab/tiny")
    assert "gated" in missing(debug_run(tmp_path))[0].row()["licence or gate"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    [need] = missing(debug_run(tmp_path))
    assert need.row()["size"] == "unknown" and need.row()["licence or gate"] == requirements.UNKNOWN


def test_a_hub_that_does_not_answer_is_asked_once(tmp_path, monkeypatch):
    asked = []

    def ask(self, *args, **options):
        asked.append(options["timeout"])
        raise TimeoutError

    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", ask)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    run = debug_run(tmp_path, **{"model.language.tokenizer": "lab/words"})
    assert [need.source for need in missing(run)] == ["lab/tiny", "lab/words"] and asked == [
        requirements.HUB_TIMEOUT
    ]


def test_what_only_the_user_can_get_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    encoders = [
        {
            "name": "clip-l-336",
            "side": 4,
            "resolution": 56,
            "weights": str(tmp_path / "clip"),
            "architecture": {"hidden_size": 24},
        }
    ]
    sources = [{"name": "own", "format": "llava", "path": "own.jsonl", "images": "shots"}]
    run = debug_run(
        tmp_path,
        "random",
        sources=sources,
        **{"model.encoders": encoders, "model.language.tokenizer": "bytes"},
    )
    found = {need.what: need for need in missing(run)}
    assert set(found) == {"encoder clip-l-336", "data own", "pictures of own"} and not any(
        need.fetch for need in found.values()
    )
    text = told(list(found.values()))
    assert (
        "is a path, and nothing is there" in text
        and "own.jsonl is your own file" in text
        and "below shots" in text
    )
    (tmp_path / "own.jsonl").write_text("{}")
    (tmp_path / "shots").mkdir()
    (tmp_path / "shots/images.zip").write_bytes(b"")
    assert "pictures of own" in {need.what for need in missing(run)}  # an archive is no picture
    (tmp_path / "shots/a.png").write_bytes(b"")
    assert [need.what for need in missing(run)] == ["encoder clip-l-336"]


def test_a_real_run_names_everything_that_is_missing_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        preflight(load("llava-7b", "pretrain"), BIG)
    for part in (
        "blip_laion_cc_sbu_558k.json does not exist",
        "lmsys/vicuna-7b-v1.5",
        "openai/clip",
        "mmkit get llava-7b",
        "images.zip",
    ):
        assert part in str(error.value)
    report = preflight(load("llava-7b", "pretrain", {"dry_run": True}), BIG)
    assert (
        "lmsys/vicuna-7b-v1.5" in str(report)
        and "mmkit get llava-7b" in report._repr_html_()
        and "checkpoints: 1 x" in str(report)
    )


def test_plan_prints_disk_and_missing_things(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert cli.main(["plan", "--model", "llava-7b", "--machine", "8xa100-80gb", "--run-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert (
        "a step on 8 x" in shown
        and "weights to fetch" in shown
        and "Llama 2 Community License" in shown
        and "together: " in shown
    )


def test_a_stage_that_starts_from_an_export_needs_what_the_export_refers_to(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    run = load("8b", "finetune", {"root": str(tmp_path / "runs")})
    export = tmp_path / "runs/8b/pretrain/default/export"
    export.mkdir(parents=True)
    refers = {"encoders.1": {"source": "openai/clip-vit-large-patch14-336", "tensors": {}}}
    (export / "config.json").write_text(json.dumps({"mmkit_version": "1", "model": {}, "references": refers}))
    weights = {need.what: need.source for need in missing(run) if need.kind == "weights"}
    language = run.model.language.source  # for its tokenizer
    assert weights == {"encoders.1": "openai/clip-vit-large-patch14-336", "tokenizer": language}
    scored = load("8b", "eval", {"root": str(tmp_path / "runs"), "evaluation.tasks": ["pope"]})
    monkeypatch.setenv("MMKIT_EVAL_DATA", str(tmp_path / "eval"))
    found = {need.what: need for need in missing(scored)}
    assert set(found) == {"encoders.1", "task pope"} and "pope.jsonl" in told([found["task pope"]])


# ---------------------------------------------------------------- fetching


def test_get_fetches_what_is_read_and_the_run_then_starts_offline(hub, language, tmp_path, monkeypatch):
    from safetensors.torch import load as tensors

    from mmkit.models.build import build, tokenizer

    hub.add("lab/tiny", language)
    run, lines = debug_run(tmp_path), []
    get([run], dry_run=True, say=lines.append)
    assert "lab/tiny" in lines[0] and not hub.requests
    get([run], say=lines.append)
    assert not {"pytorch_model.bin", "modeling_own.py", "original/consolidated.00.pth"} & set(hub.fetched())
    assert missing(run) == () and lines[-1].startswith("fetched 1")
    before = hub.fetched()
    get([run], say=lines.append)
    assert hub.fetched() == before and lines[-1] == "nothing is missing"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = build(run.model).language.state_dict()
    wanted = {
        key: value
        for name, data in language.items()
        if name.endswith(".safetensors")
        for key, value in tensors(data).items()
    }
    assert wanted and all(torch.equal(found[key], value) for key, value in wanted.items())
    assert tokenizer(run.model)("ab", add_special_tokens=False)["input_ids"] == [ord("a") + 3, ord("b") + 3]


def test_pickled_weights_are_fetched_where_there_are_no_others(hub, language, tmp_path):
    small = {name: data for name, data in language.items() if name.endswith(".json") and "index" not in name}
    hub.add("lab/tiny", small | {"pytorch_model.bin": b"pickled", "tf_model.h5": b"no"})
    get([debug_run(tmp_path)], say=str)
    assert (
        "pytorch_model.bin" in hub.fetched()
        and "tf_model.h5" not in hub.fetched()
        and missing(debug_run(tmp_path)) == ()
    )


def test_a_repository_of_a_tokenizer_gives_no_weights(hub, language, tmp_path):
    hub.add("lab/words", language)
    run = debug_run(tmp_path, "random", **{"model.language.tokenizer": "lab/words"})
    get([run], say=str)
    assert missing(run) == () and not any(name.endswith((".safetensors", ".bin")) for name in hub.fetched())


def test_a_broken_connection_is_resumed_at_its_byte(hub, language, tmp_path):
    hub.add("lab/tiny", language)
    shard = max(
        (name for name in language if name.endswith(".safetensors")), key=lambda name: len(language[name])
    )
    hub.cut[shard] = 8192
    run = debug_run(tmp_path)
    get([run], say=str)
    again = [asked for method, name, asked in hub.requests if method == "GET" and name == shard]
    assert (
        again[0] is None
        and int(again[1].removeprefix("bytes=").removesuffix("-")) >= 4096
        and missing(run) == ()
    )
    [got] = Path(constants.HF_HUB_CACHE).rglob(f"snapshots/*/{shard}")
    assert got.read_bytes() == language[shard]


def test_a_download_that_was_cut_short_is_still_missing_and_only_the_rest_is_fetched(hub, language, tmp_path):
    hub.add("lab/tiny", language)
    place = Path(constants.HF_HUB_CACHE) / "models--lab--tiny"
    snapshot = place / "snapshots" / SHA  # as clients before 2.0 leave it: no list of the repository's files
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs/main").write_text(SHA)
    shards = sorted(name for name in language if name.endswith(".safetensors"))
    absent = {shards[-1], "model.safetensors.index.json"}
    for name in set(language) - absent:
        if "/" not in name:
            (snapshot / name).write_bytes(language[name])
    run = debug_run(tmp_path)
    assert [need.source for need in missing(run)] == ["lab/tiny"]
    get([run], say=str)
    assert set(hub.fetched()) == absent and missing(run) == ()


def test_a_file_of_another_size_is_refused_and_nothing_of_it_stays(hub, language, tmp_path):
    hub.add("lab/tiny", language)
    shard = next(name for name in language if name.endswith(".safetensors"))
    hub.short.add(shard)
    run = debug_run(tmp_path)
    with pytest.raises(InputError, match="another size than the hub names.*run the same command again"):
        get([run], say=str)
    assert [need.source for need in missing(run)] == ["lab/tiny"] and not list(
        Path(constants.HF_HUB_CACHE).rglob("*.incomplete")
    )
    hub.short.clear()
    get([run], say=str)
    assert missing(run) == ()


@pytest.mark.parametrize(
    ("token", "said"), [("", "no token was sent"), ("hf_other", "the token that was sent may not read it")]
)
def test_a_gate_is_explained_and_the_others_are_fetched_all_the_same(
    hub, language, tmp_path, monkeypatch, token, said
):
    hub.add("lab/tiny", language)
    hub.add("lab/words", language)
    hub.gate.add("lab/tiny")
    monkeypatch.setenv("HF_TOKEN", token)
    run = debug_run(tmp_path, **{"model.language.tokenizer": "lab/words"})
    lines = []
    with pytest.raises(InputError) as error:
        get([run], say=lines.append)
    message = str(error.value)
    assert (
        message.startswith("1 of 2")
        and f"accept its licence on {hub.url}/lab/tiny" in message
        and said in message
    )
    assert "hf_" not in message.replace("hf auth login", "") and "hf_" not in "".join(lines).replace(
        str(tmp_path), ""
    )
    assert [need.source for need in missing(run)] == ["lab/tiny"]
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    get([run], say=str)
    assert missing(run) == ()


@pytest.mark.parametrize("token", ["", TOKEN])
def test_a_repository_that_is_not_there_is_named(hub, tmp_path, monkeypatch, token):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(
        InputError, match=f"'lab/tiny' is not at {hub.url}/lab/tiny .HTTP 40[14].*private: check the name"
    ):
        get([debug_run(tmp_path)], say=str)


def test_without_a_network_the_message_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="neither in the hub cache nor reachable"):
        get([debug_run(tmp_path)], say=str)


def test_a_tag_of_open_clip_is_one_file_of_its_repository(hub, tmp_path, monkeypatch):
    name = "open_clip_model.safetensors"
    hub.add(
        "lab/clip",
        {
            name: b"weights",
            "model.safetensors": b"the same again",
            "open_clip_pytorch_model.bin": b"and again",
        },
    )
    monkeypatch.setattr(
        "open_clip.get_pretrained_cfg", lambda model, tag: {"hf_hub": "lab/clip/"} if tag == "own" else {}
    )
    run = load("clip-vit-l-14-debug", "pretrain", {"model.weights": "own", "root": str(tmp_path)})
    [need] = [need for need in missing(run) if need.kind == "weights"]
    assert (need.source, need.what) == ("lab/clip", f"weights of {run.model.name}")
    get([run], only="weights", say=str)
    assert set(hub.fetched()) == {name} and not [need for need in missing(run) if need.kind == "weights"]


def pairs(tmp_path, hub, monkeypatch):
    """A run whose data file and pictures are a data set of the stub hub, and that data set's files."""
    from PIL import Image

    picture, packed = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "png")
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a.png", picture.getvalue())
    turns = [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a kite"}]
    lines = "".join(json.dumps({"id": k, "image": "a.png", "conversations": turns}) + "\n" for k in range(8))
    files = {
        "jsons/pairs.jsonl": lines.encode(),
        "images.zip": packed.getvalue(),
        "extract.py": b"raise SystemExit",
    }
    hub.add("lab/pairs", files, "datasets")
    known = Published(
        None, "CC0", False, "lab/pairs", "jsons/pairs.jsonl", ("images.zip",), "unpack images.zip there"
    )
    monkeypatch.setitem(DATA, "pairs.jsonl", known)
    path = str(tmp_path / "set/pairs.jsonl")
    sources = [{"name": "pairs", "format": "llava", "path": path, "images": str(tmp_path / "set/pictures")}]
    return debug_run(tmp_path, "random", sources=sources, **{"model.language.tokenizer": "bytes"}), files


def test_data_files_come_to_where_the_run_reads_them(hub, tmp_path, monkeypatch):
    run, files = pairs(tmp_path, hub, monkeypatch)
    with pytest.raises(ConfigError, match="pairs.jsonl does not exist"):
        preflight(run, BIG)
    lines = []
    get([run], only="weights", say=lines.append)
    assert lines == ["nothing is missing"] and not hub.requests
    get([run], only="data", say=lines.append)
    folder = tmp_path / "set"
    assert (folder / "pairs.jsonl").read_bytes() == files["jsons/pairs.jsonl"] and not (
        folder / "jsons"
    ).exists()
    assert set(hub.fetched()) == {"jsons/pairs.jsonl", "images.zip"}
    [left] = missing(run)
    assert left.what == "pictures of pairs" and "unpack images.zip there" in told([left])
    with zipfile.ZipFile(folder / "pictures/images.zip") as archive:
        archive.extractall(folder / "pictures")
    assert missing(run) == () and preflight(run, BIG).sources[0]["state"] == "ok"


def test_nothing_is_fetched_where_the_disk_cannot_hold_it(hub, language, tmp_path, monkeypatch):
    hub.add("lab/tiny", language)
    usage = shutil.disk_usage("/")._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(InputError, match="language model take .* 10 kB free; set HF_HOME"):
        get([debug_run(tmp_path)], say=str)
    assert not hub.requests


def test_the_command_takes_the_clients_own_variables_and_shows_no_token(hub, language, tmp_path):
    hub.add("lab/tiny", language)
    hub.gate.add("lab/tiny")
    home = tmp_path / "home"
    mine = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
    }
    settings = [
        "model.language.source=lab/tiny",
        "model.language.tokenizer=none",
        f"model.language.architecture={json.dumps(TINY)}",
    ]
    command = [
        sys.executable,
        "-m",
        "mmkit",
        "get",
        "8b-debug",
        "--stage",
        "pretrain",
        "--only",
        "weights",
        "--set",
        *settings,
    ]
    done = subprocess.run(command, env=own | mine, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "fetched 1" in done.stdout, done.stderr
    assert TOKEN not in done.stdout + done.stderr and list(home.rglob("snapshots/*/*.safetensors"))
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()
    ]
