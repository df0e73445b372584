"""What a checkpoint costs the step it is written after: waited for, or copied to the host and written in the background.

    python benchmarks/saving.py [--width 2048] [--layers 6] [--out benchmarks/results/saving.csv]

One model, one process, the same steps without saving, with saving, and with saving in the background; ratios of wall time in one run.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import tempfile
import time
from pathlib import Path

STEPS, ROWS = 6, 256


def seconds_a_step(width: int, layers: int, save: bool, background: bool) -> float:
    """Median wall time of a step, its checkpoint included as far as the step waits for it."""
    import torch
    from torch import nn

    from mmkit.config import BackendConfig, CheckpointConfig, TrainConfig
    from mmkit.sharding.backend import create
    from mmkit.training.checkpoint import Checkpoints

    class Objective(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

        def forward(self, x):
            return self.model(x).square().sum()

    backend = create(BackendConfig(), "fp32")
    train = TrainConfig(device_batch=ROWS, global_batch=ROWS)
    model = backend.prepare(Objective(), lambda named: torch.optim.AdamW(named.values(), lr=1e-4), train=train)
    batch, taken = torch.randn(ROWS, width), []
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(folder, CheckpointConfig(background=background, keep_last=1), backend)
        for step in range(1, STEPS + 1):
            begun = time.perf_counter()
            backend.backward(model(batch) / ROWS, last=True)
            backend.update(1.0)
            if save and step % 3 == 0:
                checkpoints.save(step, {})
            taken.append(time.perf_counter() - begun)
        checkpoints.wait()
    saving = taken[2::3] if save else taken[1:]
    return statistics.median(saving)


def main() -> None:
    """Measure, print, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "saving.csv")
    options = parser.parse_args()
    plain = seconds_a_step(options.width, options.layers, False, False)
    rows = [{"saving": "none", "seconds_a_step": round(plain, 3), "ratio": 1.0}]
    for name, background in (("waited for", False), ("in the background", True)):
        taken = seconds_a_step(options.width, options.layers, True, background)
        rows.append({"saving": name, "seconds_a_step": round(taken, 3), "ratio": round(taken / plain, 2)})
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="", encoding="utf8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
