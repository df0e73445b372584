"""Evaluation on an accelerator: same answers and scores, one program a shape, half-precision weights that change nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmkit.config import load
from mmkit.data.conversation import Formatter
from mmkit.data.prompting import prompt_batch
from mmkit.launch import machine
from mmkit.launch.choose import choose
from mmkit.launch.scoring_memory import key_value_bytes
from mmkit.models import generation, pretrained
from mmkit.models.build import build, image_transforms, tokenizer
from mmkit.models.generation import Here
from tests.evaluation import device_case
from tests.sharding.launches import QUICK_COMPILES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_an_xla_device_gives_the_answers_and_scores_of_the_cpu_from_one_program_a_shape(tmp_path):
    pytest.importorskip("torch_xla")
    for preset in device_case.PRESETS:
        device_case.write(str(tmp_path), preset)
    want = device_case.scored("single", str(tmp_path))
    env = {name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "CPU_NUM_DEVICES")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "XLA_FLAGS": QUICK_COMPILES}
    command = [sys.executable, str(ROOT / "tests/evaluation/device_case.py"), "xla", str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    got = json.loads(done.stdout.splitlines()[-1])
    assert (want["device"], got["device"]) == ("cpu", "xla")
    for preset in device_case.PRESETS[:2]:
        assert got[preset]["answers"] == want[preset]["answers"] and len(set(got[preset]["answers"])) > 3
        # encoders, prompt, and one program for each of the three further tokens of each of the three batches, of which the last is smaller
        assert got[preset]["programs"] == [3, 3, 3]
        # 7 further tokens where there were 3: a prompt and a token of another cache, and no more
        assert got[preset]["long answer"] == want[preset]["long answer"] and got[preset]["programs of longer answers"] == 2
    assert got["chat"] == want["chat"] and len(got["chat"]) == 2
    first, second = got["programs of turns"]
    assert first == second == 2
    for task, metrics in want["clip"].items():
        assert got["clip"][task] == pytest.approx(metrics, rel=1e-6)


class Compiled(Here):
    """A device without memory that wants fixed shapes."""

    compiled = True


@pytest.mark.parametrize("kind", [Here, Compiled])
@pytest.mark.parametrize("preset", ["8b", "ferret-7b"])
def test_a_prompt_and_the_next_token_of_a_published_model_run_without_memory_and_without_a_host_tensor(preset, kind, monkeypatch):
    config = load(preset, "eval").model
    model = build(config, "meta").eval()
    assert all(p.is_meta for p in model.parameters()) and sum(p.numel() for p in model.parameters()) > 7e9
    caches = []

    class Kept(generation.KeyValues):
        def __init__(self, **options):
            super().__init__(**options)
            caches.append(self)

    monkeypatch.setattr(generation, "KeyValues", Kept)
    words = tokenizer(load(f"{preset}-debug", "eval").model)
    examples = [device_case.request(number, region=config.regions is not None) for number in (0, 1)]
    batch = prompt_batch(examples, Formatter.of(words, config), config, image_transforms(config)).tensors
    tokens = list(generation.decode(model, batch, 2, backend=kind(model)))
    assert [(found.device.type, found.shape, found.dtype) for found in tokens] == [("meta", (2,), torch.int64)] * 2
    architecture, length = config.language.architecture, batch["input_ids"].shape[1] + 1
    heads = architecture.get("num_key_value_heads", architecture["num_attention_heads"])
    [cache] = caches
    assert len(cache.layers) == architecture["num_hidden_layers"] and length > 576
    kept = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    assert {(tensor.device.type, tuple(tensor.shape)) for tensor in kept} == {("meta", (2, heads, length, 128))}
    assert sum(tensor.nbytes for tensor in kept) == key_value_bytes(architecture, 2, length, 4)


@pytest.mark.parametrize("preset", ["8b-debug", "ferret-7b-debug"])
def test_weights_in_half_precision_give_the_very_logits_of_autocast_over_fp32_ones(preset, tmp_path):
    folder = device_case.write(str(tmp_path), preset)
    (whole, config), (halved, _) = (pretrained.from_pretrained(folder, half=half) for half in (None, torch.bfloat16))
    kinds = {name: p.dtype for name, p in halved.named_parameters()}
    for name, kind in kinds.items():
        matrix = name.startswith("language.") and name.endswith("proj.weight")
        stays = name.startswith(("connector.", "samplers.", "regions.")) or "norm" in name or "embed_tokens" in name
        assert kind == torch.bfloat16 if matrix else kind == torch.float32 if stays else True, name
    words = tokenizer(config)
    example = device_case.request(0, config.regions is not None)
    batch = prompt_batch([example], Formatter.of(words, config), config, image_transforms(config)).tensors
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want, got = (model.eval().logits(model(batch)) for model in (whole, halved))
    assert torch.equal(want, got)


def test_one_process_takes_one_device_of_the_machine():
    for preset, here, settings, want in (
        ("8b", "v4-8", {}, ("xla", None, "bf16")),
        ("8b", "8xa100-80gb", {}, ("single", None, "bf16")),  # whose paper trains on a TPU
        ("ferret-7b", "t4-16gb", {}, ("single", None, "fp16")),
        ("8b-debug", "v4-8", {}, ("xla", None, "bf16")),  # whose preset trains by single
        ("tiny", "cpu", {"backend.kind": "xla", "backend.xla_devices": 1}, ("xla", 1, "bf16")),
    ):
        run = choose(load(preset, "eval", settings), machine.named(here), must_fit=False).run
        assert (run.backend.kind, run.backend.xla_devices, run.train.precision) == want, preset
        assert (run.backend.processes or 1, run.devices) == (1, 1)
