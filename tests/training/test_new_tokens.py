"""Runs that add tokens to the vocabulary: what trains, what stays to the bit, and where the rows are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmkit.config import ConfigError
from mmkit.models import packs
from mmkit.models.build import build
from mmkit.models.pretrained import from_pretrained, read_config
from mmkit.training.loop import train
from tests.training.tiny_run import llava_file, sourced, tiny_run

peft = pytest.importorskip("peft")
OLD, NEW = 317, [317, 318, 319]
LORA = {"rank": 2, "alpha": 4, "dropout": 0.0, "targets": ["q_proj"]}
OPTIMIZER = {"lr": 1e-2, "weight_decay": 0.5, "warmup": 0, "schedule": "constant"}
TABLES = ("model.embed_tokens", "lm_head")


def words_with(folder: Path, *tokens: str) -> str:
    """A byte tokenizer of 317 entries and ``tokens`` behind them; and answers in the data of ``folder`` end
    with the first of them."""
    words = packs.byte_tokenizer()
    words.add_tokens([f"<spare {i}>" for i in range(OLD - len(words))], special_tokens=True)
    words.add_tokens(list(tokens), special_tokens=True)
    words.save_pretrained(folder / "words")
    path = folder / "data.json"
    if not path.exists():
        path = llava_file(folder)
        records = json.loads(path.read_text())
        for record in records:
            record["conversations"][1]["value"] += f" {tokens[0]}"
        path.write_text(json.dumps(records))
    return str(folder / "words")


def adding(folder: Path, tied: bool = False, **train_settings):
    """A run that adds three tokens, whose rows train alone."""
    folder.mkdir(exist_ok=True)
    model = sourced(folder, vocabulary=OLD, tie_word_embeddings=tied)
    model["language"]["tokenizer"] = words_with(folder, "<a>", "<b>", "<c>")
    return tiny_run(folder, **{"model": model, "steps": 2, "optimizer": OPTIMIZER, "new_tokens": "rows", "precision": "bf16"} | train_settings)


def old_rows(folder: Path) -> dict[str, torch.Tensor]:
    """The tables' rows in the source's files."""
    held = load_file(folder / "language" / "model.safetensors")
    return {name: held.get(f"{name}.weight", held["model.embed_tokens.weight"]).float() for name in TABLES}


@pytest.mark.parametrize(("tied", "lora"), [(True, None), (False, LORA)], ids=["tied whole", "untied lora"])
def test_old_rows_keep_their_bits_through_resume_and_export_and_new_ones_train(tmp_path, tied, lora):
    settings = {"tied": tied, "lora": lora, "trainable": ["connector"] if lora else ["connector", "language"]}
    train(adding(tmp_path, **settings, steps=1))
    run = adding(tmp_path, **settings)
    assert train(run).reason == "done"
    model, _ = from_pretrained(f"{run.folder}/export", merge=bool(lora))
    for name, old in old_rows(tmp_path).items():
        table = model.get_submodule(f"language.{name}").weight
        assert torch.equal(table[:OLD], old), name
        assert (table[OLD] - old.mean(0)).abs().mean() > 5e-3, "the token that the data have moves by about the rate each step"
    unbroken = adding(tmp_path, **settings, name="unbroken")
    train(unbroken)
    held = [load_file(Path(each.folder, "export/model.safetensors")) for each in (run, unbroken)]
    assert held[0].keys() == held[1].keys() and all(torch.equal(tensor, held[1][name]) for name, tensor in held[0].items())
    metrics = [json.loads(line) for line in Path(unbroken.folder, "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["reached_language"] == 1
    rows = json.loads(Path(run.folder, "environment.json").read_text())["tables"]["added_tokens"]
    assert rows[0]["ids"] == "317-319" and rows[0]["trains"] == "these rows alone" and ("export/adapter" in rows[0]["kept in"]) == bool(lora)


WAYS = [(False, {}), (True, {}), (False, {"new_tokens": "all"}), (True, {"new_tokens": "all", "whole": True})]


@pytest.mark.parametrize(("tied", "settings"), WAYS, ids=str)
def test_an_adapters_folder_carries_the_rows_for_plain_peft_and_does_not_load_on_the_old_vocabulary(tmp_path, tied, settings):
    whole = settings.get("whole")
    lora = LORA | ({"modules_to_save": ["embed_tokens", r"model\.norm"]} if whole else {})
    run = adding(tmp_path, tied, lora=lora, trainable=["connector"], new_tokens=settings.get("new_tokens", "rows"))
    train(run)
    folder = Path(run.folder, "export")
    config, _ = read_config(folder)
    ours, _ = from_pretrained(folder)
    theirs = peft.PeftModel.from_pretrained(build(config), folder / "adapter").base_model.model
    ids = torch.tensor([[1, 2, *NEW, 5]])
    torch.testing.assert_close(theirs.language(input_ids=ids).logits, ours.language(input_ids=ids).logits, atol=1e-5, rtol=1e-5)
    language = config.language.model_copy(update={"architecture": config.language.architecture | {"vocab_size": OLD}})
    with pytest.raises((IndexError, RuntimeError), match="out of bounds|size mismatch"):
        peft.PeftModel.from_pretrained(build(config.model_copy(update={"language": language})), folder / "adapter")
    merged, _ = from_pretrained(folder, merge=True)
    torch.testing.assert_close(merged.language(input_ids=ids).logits, ours.language(input_ids=ids).logits, atol=1e-5, rtol=1e-5)


REFUSED = [
    ({"vocabulary": 320}, "'rows', but no token is added to the 320 of .*language': raise model.language.architecture.vocab_size"),
    ({"source": "nowhere/at-all"}, "'rows': which rows are new is not known: .*nowhere/at-all"),
    ({"lora": LORA | {"modules_to_save": ["embed_tokens"]}}, "modules_to_save trains language.model.embed_tokens whole, .*'rows' only its"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_rows_that_cannot_train_alone_are_refused_before_work(tmp_path, settings, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = sourced(tmp_path, vocabulary=settings.pop("vocabulary", OLD))
    model["language"] |= settings if "source" in settings else {}
    lora = settings.get("lora")
    run = tiny_run(tmp_path, model=model, new_tokens="rows", lora=lora)
    if "source" in settings:
        from mmkit.training.weights import added_rows

        with pytest.raises(ConfigError, match=message):
            added_rows(torch.nn.Module(), run)
        return
    with pytest.raises(ConfigError, match=message):
        train(run)
    assert not Path(run.folder, "checkpoints").exists()


def test_rows_of_other_tokens_are_not_resumed(tmp_path):
    """Two tokens in spare rows: the tensors have the same shapes whichever rows they are."""
    model = sourced(tmp_path)
    packs.byte_tokenizer().save_pretrained(tmp_path / "language")
    for count, tokens in ((1, ("<a>",)), (2, ("<a>", "<b>"))):
        words = packs.byte_tokenizer()
        words.add_tokens(["<x>"] * (count - 1) + ["<a>"], special_tokens=True)
        if count == 2:  # the first of them belongs to the source now, so only the second is new
            known = packs.byte_tokenizer()
            known.add_tokens(["<x>"], special_tokens=True)
            known.save_pretrained(tmp_path / "language")
        words.save_pretrained(tmp_path / "words")
        model["language"]["tokenizer"] = str(tmp_path / "words")
        run = tiny_run(tmp_path, model=model, new_tokens="rows", steps=count, optimizer=OPTIMIZER)
        if count == 1:
            assert train(run).reason == "done"
        else:
            with pytest.raises(ConfigError, match="trained the rows of other added tokens than this run adds"):
                train(run)
