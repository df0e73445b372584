"""What scoring is planned to take is what it loads and keeps; what cannot score is refused before work."""

from __future__ import annotations

import pytest
import torch

from mmkit.cli import main
from mmkit.config import ConfigError, load
from mmkit.launch.machine import named
from mmkit.launch.preflight import plan_of
from mmkit.launch.scoring_memory import answer_length, key_value_bytes, prompt_length
from mmkit.models.build import build
from mmkit.models.pretrained import from_pretrained, save_pretrained


def planned(preset: str, machine: str = "a100-80gb", **settings):
    return plan_of(load(preset, "eval", settings), machine=named(machine))


@pytest.mark.parametrize("preset", ["8b-debug", "ferret-7b-debug", "clip-vit-l-14-debug"])
def test_planned_weights_are_those_that_scoring_loads(preset, tmp_path):
    config = load(preset, "eval").model
    save_pretrained(build(config), tmp_path / "export", config)
    for precision, half in (("fp32", None), ("bf16", torch.bfloat16)):
        model, _ = from_pretrained(tmp_path / "export", half=half)
        assert planned(preset, precision=precision).need.weights == sum(p.nbytes for p in model.parameters())


def test_half_precision_halves_most_of_a_published_model_and_keys_and_values_grow_with_the_batch():
    full, half = (planned("ferret-7b", precision=precision).need for precision in ("fp32", "bf16"))
    assert 0.5 < half.weights / full.weights < 0.55 and half.cache == full.cache / 2
    run = load("ferret-7b", "eval")
    assert (prompt_length(run), answer_length(run)) == (1088, 128)  # 24 x 24 slots and 512 of text
    assert half.cache == key_value_bytes(run.model.language.architecture, 16, 1088 + 128, 2) == 16 * 1216 * 2 * 32 * 4096 * 2
    assert planned("ferret-7b", **{"evaluation.batch": 4}).need.cache == half.cache / 4
    assert planned("ferret-7b", **{"evaluation.max_new_tokens": 1344}).need.cache == 2 * half.cache


def test_plan_says_where_scores_are_made_and_what_that_takes(capsys):
    assert main(["plan", "--model", "13b", "--stage", "eval", "--machine", "a100-80gb"]) == 0
    told = capsys.readouterr().out
    assert "13b/eval fits" in told and "(weights 30.8 GiB, keys and values 20.3 GiB, activations " in told
    assert "one process on one device (A100 80GB), in bf16, batches of 16 prompts of 1152 positions and answers of up to 512" in told
    assert "gradients" not in told and "a step" not in told
    assert main(["plan", "--model", "clip-vit-l-14", "--stage", "eval", "--machine", "l4-24gb"]) == 0
    assert "one device (L4 24GB), in fp32, batches of 256\n" in capsys.readouterr().out


def test_however_many_devices_a_machine_has_the_model_is_whole_on_one():
    one, eight = (planned("8b", machine) for machine in ("a100-80gb", "8xa100-80gb"))
    assert one.need == eight.need and one.fits and not planned("8b", "l4-24gb").fits


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"backend.kind": "torch"}, "backend.kind = 'torch'"),
        ({"backend.kind": "deepspeed", "backend.zero_stage": 3}, "backend.kind = 'deepspeed'"),
        ({"backend.processes": 4}, "backend.processes = 4"),
        ({"backend.nodes": 2}, "backend.nodes = 2"),
        ({"backend.offload": True}, "backend.offload = True"),
        ({"backend.kind": "xla", "backend.xla_devices": 4}, "backend.xla_devices = 4"),
        ({"backend": {"kind": "torch", "strategy": "fsdp"}}, "backend.kind = 'torch'"),
    ],
)
def test_a_backend_of_many_processes_given_by_hand_cannot_score(settings, named):
    with pytest.raises(ConfigError, match=f"{named} .*: scoring runs in one process on one device, by backend single or xla; leave it out"):
        load("tiny", "eval", settings)
    for fine in ({"backend.kind": "single"}, {"backend.kind": "xla", "backend.xla_devices": 1}, {"backend.processes": 1}):
        load("ferret-7b", "eval", fine)  # whose preset trains by another
