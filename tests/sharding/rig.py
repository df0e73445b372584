"""Run by the tests in processes of their own: trains the tiny cases on one backend and writes what happened as JSON.

    python rig.py '{"backend": {...}, "jobs": [{"case": "vlm", "steps": [0, 20], "save": "a.pt", ...}], "out": "result.json"}'

A job may load a saved state, change the precision, shorten one window, or put an inf into one gradient.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import cases  # noqa: E402

from mmkit.config import BackendConfig  # noqa: E402
from mmkit.sharding.backend import create  # noqa: E402


def run_job(spec: dict, job: dict) -> dict:
    """One training run: losses, gradient norms and what else the job asks for."""
    from mmkit.training.optim import optimizer_factory

    precision = job.get("precision", "fp32")
    backend = create(BackendConfig(**spec["backend"]), precision)
    case = cases.CASES[job["case"]](backend, precision=precision, **job.get("train", {}))
    factory = optimizer_factory(case.objective.model, case.components, case.train.optimizer)
    model = backend.prepare(
        case.objective, factory, train=case.train, rules=case.rules, blocks=case.blocks, accumulation=case.window
    )
    model.train()  # DeepSpeed's returns nothing
    first, last = job["steps"]
    if "load" in job:
        saved = torch.load(job["load"])
        backend.import_state(saved["entries"].__getitem__, saved["extra"]["optimizer_step"])
        backend.load_extra_state(saved["extra"])
    compiled = backend.compiles()
    rows = []
    for step in range(first, last):
        if step == job.get("save_at"):
            save(backend, job["save"])
        rows.append(one_step(backend, model, case, step, job))
    result = {"rows": rows, "compiles": backend.compiles() - compiled, "reached": backend.reached, "extra": backend.extra_state()}
    result["memory"] = count_memory(backend)
    if job.get("save_at") == last:
        save(backend, job["save"])
    if job.get("full"):
        result["full"] = {name: [float(t.float().sum()), list(t.shape), str(t.dtype)] for name, t in backend.full_parameters()}
    backend.clear()
    return result


def one_step(backend, model, case, step: int, job: dict) -> list[float]:
    """[step, loss, gradient norm, skipped]; the loss is the mean over the targets of all devices and micro-batches."""
    window = case.window - (step == job.get("short_window"))
    whole = [case.micro_batch(step * case.window + i) for i in range(window)]
    mine = [{name: t.chunk(backend.world)[backend.rank] for name, t in batch.items()} for batch in whole]
    if job["case"] == "clip":
        from mmkit.training.accumulate import contrastive_step

        count = backend.sum_over_devices(sum(len(batch["text"]) for batch in mine))
        out = contrastive_step(model, case.objective.loss, [backend.shard(batch) for batch in mine], backend, count)
        total = out["loss_sum"]
    else:
        count = backend.sum_over_devices(float(sum((batch["targets"] != -100).sum() for batch in mine)))
        losses = []
        for i, batch in enumerate(mine):
            loss = model(backend.shard(batch), mode="loss")["loss_sum"]
            losses.append(loss.detach())
            poison = float("inf") if step in job.get("poison", ()) and backend.is_main and i == 0 else 1.0
            backend.backward(loss * poison / count, last=i == window - 1)
        total = sum(losses)
    backend.set_learning_rates([case.train.optimizer.lr * (1 + step % 3) / 3] * len(backend.optimizer.param_groups))
    norm = backend.update(cases.MAX_NORM)
    return [step, float(backend.sum_over_devices(total) / count), float(norm), bool(backend.skipped)]


def save(backend, path: str) -> None:
    """All entries and the extra numbers; the entry of parameter i is kept by rank i modulo world, then sent to the first."""
    mine = {name: entry for name, entry in backend.export_state(lambda i: i % backend.world) if entry is not None}
    entries = {name: entry for part in backend.all_objects(mine) for name, entry in part.items()}
    if backend.is_main:
        torch.save({"entries": entries, "extra": backend.extra_state()}, path)
    backend.barrier(60)


def count_memory(backend) -> dict[str, int]:
    """Bytes this process holds of trained and frozen parameters, and of optimizer moments."""
    local = getattr(backend, "local_bytes", None)
    return local() if local else {}


def main() -> None:
    spec = json.loads(sys.argv[1])
    results = [run_job(spec, job) for job in spec["jobs"]]
    if int(os.environ.get("RANK", "0")) == 0:
        Path(spec["out"]).write_text(json.dumps(results, default=dataclasses.asdict))


if __name__ == "__main__":
    main()
