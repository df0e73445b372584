"""One run handed from one process to two with DDP, FSDP and ZeRO-3: the same lines and the same export as in one go."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from mmkit.training.checkpoint import Checkpoint
from mmkit.training.loop import train
from tests.training.processes import run_processes
from tests.training.tiny_run import sourced, tiny_run

HERE = Path(__file__).parent
SETTINGS = {
    "trainable": ["connector", "samplers"], "lora": {"rank": 2, "alpha": 4, "dropout": 0.0, "targets": ["q_proj", "v_proj"]}, "device_batch": 1,
    "loss_chunk": 16, "checkpoint_blocks": True, "optimizer": {"lr": 1e-2, "warmup": 0, "schedule": "constant"},
    "held_out": 5, "eval_every": 1,  # five samples for two processes: at the end one of them has none
}  # fmt: skip


def by_two(folder: Path, script: str = "child_run.py", **settings) -> None:
    """Goes on with the run in ``folder`` in two processes."""
    environment = os.environ | {"PYTHONPATH": f"{HERE.parents[1]}:{HERE}", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment["MALLOC_MMAP_THRESHOLD_"] = "65536"  # freed tensors go back to the system, so that a peak is what was in use
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(HERE / script)]
    done = subprocess.run([*command, str(folder), json.dumps(settings)], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def lines(run):
    return [json.loads(line) for line in Path(run.folder, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_that_changes_machinery_twice_is_the_run_in_one_go(tmp_path):
    settings = SETTINGS | {"model": sourced(tmp_path, vocabulary=300, tie_word_embeddings=True)}
    whole = tiny_run(tmp_path / "whole", **settings, steps=6)
    train(whole)
    parts = tmp_path / "parts"
    run = tiny_run(parts, **settings, steps=2)
    train(run)
    by_two(parts, **settings, steps=3, backend={"kind": "torch", "strategy": "ddp", "processes": 2})
    by_two(parts, **settings, steps=4, backend={"kind": "torch", "strategy": "fsdp", "processes": 2})
    written = Checkpoint(f"{run.folder}/checkpoints/step-00000004")
    assert {entry["file"][:10] for entry in written.manifest["tensors"].values()} == {"rank-00000", "rank-00001"}
    by_two(parts, **settings, steps=5, backend={"kind": "deepspeed", "zero_stage": 2, "offload": True, "processes": 2})
    by_two(parts, **settings, steps=6, backend={"kind": "deepspeed", "zero_stage": 3, "processes": 2})
    assert_same_lines(whole, run)
    assert_same_export(whole, run)


@pytest.mark.parametrize(("resume", "sees"), [("step-4", "old"), ("epoch-1", "old"), ("auto", "nothing")])
def test_processes_resume_the_step_that_the_main_one_sees_or_none(tmp_path, resume, sees):
    train(tiny_run(tmp_path, steps=4, checkpoint={"save_every": 1, "keep_last": 9}))
    outputs = run_processes("resume_case.py", [tmp_path, resume, sees], world=2)
    main, other = (json.loads(output.strip().splitlines()[-1]) for output in outputs)
    if sees == "nothing":
        assert main == other and "rank 1 of 2 cannot read" in main["error"] and "step-00000004" in main["error"]
        return
    assert (main["steps"], other["steps"]) == (5, 5)
    assert main["first"] == ([5] if resume == "step-4" else [4])  # an epoch is three steps


@pytest.mark.parametrize("sees", ["no-list", "no-export"])
def test_the_main_process_finds_the_stage_before_for_all(tmp_path, sees):
    train(tiny_run(tmp_path, steps=1))
    outputs = run_processes("resume_case.py", [tmp_path, "auto", sees, "finetune"], world=2)
    main, other = (json.loads(output.strip().splitlines()[-1]) for output in outputs)
    if sees == "no-list":
        assert (main["steps"], other["steps"]) == (5, 5) and main["first"] == [1]
    else:
        assert main == other and "rank 1 of 2 cannot read" in main["error"] and "pretrain/default/export" in main["error"]


@pytest.mark.slow
def test_adapters_on_four_xla_devices_train_and_resume_as_one_process_does(tmp_path):
    settings = SETTINGS | {"model": sourced(tmp_path), "global_batch": 4}
    whole = tiny_run(tmp_path / "whole", **settings, steps=8)
    train(whole)
    parts, xla = tmp_path / "parts", {"kind": "xla", "xla_devices": 4}
    run = tiny_run(parts, **settings, steps=4)
    for steps in (4, 8):
        run_processes("child_run.py", [parts, json.dumps(settings | {"steps": steps, "backend": xla})], xla_devices=4)
    assert_same_lines(whole, run)
    assert_same_export(whole, run)
    for part in (lines(run)[:4], lines(run)[4:]):  # by the third step every shape of batch has come by
        assert part[-1]["compiles"] == part[2]["compiles"] <= part[0]["compiles"] + 2


@pytest.mark.slow
def test_half_precision_on_two_processes_is_that_of_one(tmp_path):
    settings = SETTINGS | {"precision": "bf16", "model": sourced(tmp_path)}
    whole, run = (tiny_run(tmp_path / name, **settings, steps=4) for name in ("whole", "parts"))
    train(whole)
    by_two(tmp_path / "parts", **settings, steps=4, backend={"kind": "torch", "strategy": "ddp", "processes": 2})
    assert_same_lines(whole, run, 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [{"kind": "torch", "strategy": "fsdp"}, {"kind": "deepspeed", "zero_stage": 3}], ids=str)
def test_rslora_dora_and_modules_to_save_on_two_processes_are_those_of_one(tmp_path, backend):
    lora = SETTINGS["lora"] | {"use_rslora": True, "use_dora": True, "modules_to_save": ["embed_tokens", r"layers\.1\.mlp"]}
    settings = SETTINGS | {"lora": lora, "model": sourced(tmp_path), "steps": 3}
    whole, run = (tiny_run(tmp_path / name, **settings) for name in ("whole", "parts"))
    train(whole)
    by_two(tmp_path / "parts", **settings, backend=backend | {"processes": 2})
    assert_same_lines(whole, run)
    assert_same_export(whole, run)
    held = safetensors.torch.load_file(Path(run.folder, "export", "model.safetensors"))
    assert {"language.model.embed_tokens.weight", "language.model.layers.1.mlp.up_proj.weight"} <= held.keys()


def assert_same_lines(whole, run, tolerance=1e-5):
    for one, other in zip(lines(whole), lines(run), strict=True):
        for name in ("loss", "eval_loss", "eval_accuracy"):
            assert one[name] == pytest.approx(other[name], rel=tolerance), (name, one, other)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=max(tolerance, 1e-4))
        assert (one["step"], one["targets"], one["samples"]) == (other["step"], other["targets"], other["samples"])


def assert_same_export(whole, run):
    files = [Path(r.folder, "export", name) for name in ("model.safetensors", "adapter/adapter_model.safetensors") for r in (whole, run)]
    for a, b in (files[:2], files[2:]):
        a, b = safetensors.torch.load_file(a), safetensors.torch.load_file(b)
        assert a.keys() == b.keys() and all(torch.allclose(a[name], b[name], atol=1e-5) for name in a)
