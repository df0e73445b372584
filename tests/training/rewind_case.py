"""``rewind_case.py FOLDER SHARDS KIND STRATEGY STAGE``: a clip run of 6 steps on two devices, with a sample that is NaN on the last one.

Saved every 4 steps; the guard goes back. Prints what this process read and ended with.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tiny_clip import ARCHITECTURE, clip_run  # a script's own folder comes first on its path

from mmkit.training.loop import train

SPOILT = 6  # the window that holds the sample


def main():
    folder, data, kind, strategy, stage = sys.argv[1:]
    devices = {"xla_devices": 2} if kind == "xla" else {"processes": 2}
    backend = {"kind": kind, "strategy": strategy, "zero_stage": int(stage), **devices}
    stability = {"action": "rewind", "rewind_precision": "fp32", "window": 8}
    small = ARCHITECTURE | {"vision_cfg": ARCHITECTURE["vision_cfg"] | {"layers": 1}}
    settings = {
        "model": {"architecture": small}, "trainable": ["image", "scale"], "precision": "bf16", "steps": 6, "device_batch": 6,
        "checkpoint": {"save_every": 4}, "stability": stability,
    }  # fmt: skip
    run = clip_run(Path(folder), data, backend=backend, **settings)
    windows, precisions, last = [], [], {}

    def watch(state):
        precisions.append(state.run.train.precision)
        last["state"], accumulate = state, state.accumulate

        def watched(window, count, limit):
            windows.append([key for batch in window for key in batch.keys])
            if len(windows) == SPOILT and state.backend.rank == state.backend.world - 1:
                window[0].tensors["image"][-1] = float("nan")
            return accumulate(window, count, limit)

        state.accumulate = watched

    result = train(run, on_assemble=watch)
    weights = sum(float(entry["param"].double().abs().sum()) for _, entry in last["state"].backend.export_state())
    report = {"reason": result.reason, "steps": result.steps, "windows": windows, "precisions": precisions, "folder": result.folder}
    everyone = last["state"].backend.all_objects(weights)
    print(json.dumps(report | {"sum": sum(everyone)}))


if __name__ == "__main__":
    main()
