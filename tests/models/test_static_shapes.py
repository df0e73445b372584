"""On XLA the whole model is one program whatever the images, slots and regions are, and gives what the CPU gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch_xla")

SCRIPT = """
import json, sys
sys.path[:0] = [{root!r}, {here!r}]
import torch, torch_xla
import torch_xla.debug.metrics as metrics
from test_vlm import EXTREME, GEO, SQUARE, TALL, WIDE, batch_of, model_of, region_batch

torch.zeros(1, device="xla")  # before the first backward, which counts devices
model = model_of(regions=GEO).train()
step = lambda b: model.logits(model(b)).float().mul(b["segments"].gt(0)[..., None]).square().mean()
rows = [
    [([5, 6, -300], WIDE, [7] * 9, SQUARE), ([8] * 23,)],
    [([5], EXTREME, TALL, [-300, -300, 4, 2, 3, 3, 3]), (SQUARE, [-300, 9])],
    [([3] * 9,), (WIDE, WIDE, [9] * 12)],
]
batches = []
for row in rows:
    batch = batch_of(model.config, *row, images=2)
    for name in ("input_ids", "segments", "positions"):
        batch[name] = torch.nn.functional.pad(batch[name], (0, 64 - batch[name].shape[1]))
    batches.append(region_batch(model, batch))
want = []
for batch in batches:
    model.zero_grad()
    loss = step(batch)
    loss.backward()
    want.append((loss.item(), float(sum(p.grad.norm() for p in model.parameters() if p.grad is not None))))
model.zero_grad()
model._vision = None
model.to("xla")
got, compiles = [], []
for batch in batches:
    batch = {{name: t.to("xla") for name, t in batch.items()}}
    model.zero_grad()
    loss = step(batch)
    loss.backward()
    norm = sum(p.grad.norm() for p in model.parameters() if p.grad is not None)
    torch_xla.sync()
    got.append((loss.item(), norm.item()))
    compiles.append(metrics.metric_data("CompileTime")[0])
print(json.dumps([want, got, compiles, [name for name in metrics.counter_names() if name.startswith("aten::")]]))
"""


@pytest.mark.slow
def test_one_program_serves_batches_of_any_content_and_equals_the_cpu():
    here = Path(__file__).resolve().parent
    script = SCRIPT.format(root=str(here.parents[1]), here=str(here))
    env = os.environ | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", "USE_TORCH_XLA": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    want, got, compiles, fallbacks = json.loads(done.stdout.splitlines()[-1])
    for (loss, norm), (loss_there, norm_there) in zip(got, want, strict=True):
        assert loss == pytest.approx(loss_there, rel=1e-4) and norm == pytest.approx(norm_there, rel=1e-3)
    assert compiles[0] == compiles[1] == compiles[2], f"compiled again: {compiles}"
    assert not [name for name in fallbacks if name != "aten::_local_scalar_dense"], f"left the device: {fallbacks}"
