"""Run by the tests in processes of their own: trains the tiny cases on one backend after another and writes what happened as JSON.

    python rig.py SPEC.json      # {"jobs": {label: {"backend": {...}, "case": "vlm", "steps": [0, 20], ...}}, "out": "result.json"}

A job may save at a step, load a saved state, change the precision, shorten one window, or put an inf into one gradient.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parent))
import cases  # noqa: E402

from mmkit.config import BackendConfig  # noqa: E402
from mmkit.sharding.backend import create, named  # noqa: E402


def run_job(job: dict) -> dict:
    """One training run: losses, gradient norms and what else the job asks for."""
    backend = create(BackendConfig(**job["backend"]), job.get("precision", "fp32"))
    if job["case"] == "talk":
        return talk(backend)
    case, model = prepared(backend, job)
    if "load" in job:
        saved = torch.load(job["load"])
        backend.import_state(saved["entries"].__getitem__, saved["extra"]["optimizer_step"])
        backend.load_extra_state(saved["extra"])
    rows, begun, seconds = [], backend.compiles(), []
    for step in range(*job["steps"]):
        if step == job.get("save_at"):
            save(backend, job["save"])
        before = weights(backend) if step in job.get("poison", ()) else None
        start = time.perf_counter()
        rows.append(one_step(backend, model, case, step, job))
        seconds.append(time.perf_counter() - start)
        if before:
            rows[-1].append(same(before, weights(backend)))
    result = {"rows": rows, "compiles": backend.compiles() - begun, "reached": backend.reached, "extra": backend.extra_state()}
    result |= {"seconds": seconds, "bytes": held_bytes(backend)}
    if job.get("validate"):
        result["validation"] = [validation(backend, model, case) for _ in range(2)]
    if job.get("full"):
        result["full"] = {name: [float(t.double().sum()), list(t.shape), str(t.dtype)] for name, t in backend.full_parameters()}
    backend.clear(keep_programs=True)  # the cases that follow share programs, and count them
    return result


def prepared(backend, job: dict):
    """The case and its wrapped model."""
    from mmkit.training.optim import optimizer_factory

    make, weights = cases.CASES[job["case"]], None
    case = make(backend, precision=job.get("precision", "fp32"), **job.get("train", {}))
    if job.get("meta"):  # the same model without memory, filled by name
        full = named([*case.objective.named_parameters(), *case.objective.named_buffers()], "model.")
        case = make(backend, device="meta")
        weights = lambda name: full[name].detach()  # noqa: E731
    factory = optimizer_factory(case.objective.model, case.components, case.train.optimizer)
    model = backend.prepare(
        case.objective, factory, train=case.train, rules=case.rules, blocks=case.blocks, accumulation=case.window,
        weights=weights,
    )  # fmt: skip
    model.train()  # DeepSpeed's returns nothing
    return case, model


def one_step(backend, model, case, step: int, job: dict) -> list:
    """[step, loss, gradient norm, skipped]; the loss is the mean over the targets of all devices and micro-batches."""
    window = case.window - (step == job.get("short_window"))
    whole = [case.micro_batch(step * case.window + i) for i in range(window)]
    mine = [{name: t.chunk(backend.world)[backend.rank] for name, t in batch.items()} for batch in whole]
    if job["case"] == "clip":
        from mmkit.training.accumulate import contrastive_step

        count = backend.sum_over_devices(sum(len(batch["text"]) for batch in mine))
        total = contrastive_step(model, case.objective.loss, [backend.shard(batch) for batch in mine], backend, count)["loss_sum"]
    else:
        count = backend.sum_over_devices(float(sum((batch["targets"] != -100).sum() for batch in mine)))
        losses = []
        for i, batch in enumerate(mine):
            loss = model(backend.shard(batch), mode="loss")["loss_sum"]
            losses.append(loss.detach())
            poisoned = step in job.get("poison", ()) and backend.rank == backend.world - 1 and i == 1  # there it has targets
            factor = backend.shard({"factor": torch.tensor(float("inf") if poisoned else 1.0)})["factor"]
            backend.backward(loss * factor / count, last=i == window - 1)
        total = sum(losses)
    backend.set_learning_rates([case.train.optimizer.lr * (1 + step % 3) / 3] * len(backend.optimizer.param_groups))
    norm = backend.update(cases.MAX_NORM)
    return [step, float(backend.sum_over_devices(total) / count), float(norm), bool(backend.skipped)]


def validation(backend, model, case) -> list:
    """[loss, accuracy, programs compiled] of four micro-batches as held-out data, one of them without any target in its second half."""
    from mmkit.training.validation import of_tokens

    begun, whole = backend.compiles(), [case.micro_batch(i) for i in range(4)]
    batches = [{name: t.chunk(backend.world)[backend.rank] for name, t in batch.items()} for batch in whole]
    model.eval()
    with torch.no_grad():
        held_out = [SimpleNamespace(tensors=batch) for batch in batches]
        found = of_tokens(SimpleNamespace(backend=backend, objective=model, held_out=held_out))
    model.train()
    return [*found.values(), backend.compiles() - begun]


def weights(backend) -> dict:
    """A copy of the whole trained state, with Adam's step."""
    return {name: entry for name, entry in backend.export_state()} | {"step": backend.extra_state()["optimizer_step"]}


def same(a: dict, b: dict) -> bool:
    """True where two copies are equal to the last bit."""
    return a["step"] == b["step"] and all(torch.equal(a[n][k], b[n][k]) for n in a if n != "step" for k in a[n])


def save(backend, path: str) -> None:
    """All entries and the extra numbers; the entry of parameter i is kept by rank i modulo world, then sent to the first."""
    mine = {name: entry for name, entry in backend.export_state(lambda i: i % backend.world) if entry is not None}
    parts = backend.all_objects(mine)
    entries = {name: entry for part in parts for name, entry in part.items()}
    if backend.is_main:
        torch.save({"entries": entries, "names": [name for part in parts for name in part], "extra": backend.extra_state()}, path)
    backend.barrier(120)


def held_bytes(backend) -> dict[str, int]:
    """Bytes of trained parameters' and moments' parts that live in this process."""
    optimizer = getattr(backend.optimizer, "optimizer", backend.optimizer)
    moments = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.dim()]
    local = [getattr(t, "_local_tensor", t) for t in moments]
    frozen_gradients = [p for p in backend.parameters().values() if not p.requires_grad and p.grad is not None]
    return {"moments": sum(t.numel() * t.element_size() for t in local), "frozen_gradients": len(frozen_gradients)}


def talk(backend) -> dict:
    """What processes say to each other."""
    rank, world = backend.rank, backend.world
    x = (torch.arange(3.0) + 10 * rank).requires_grad_()
    everything = backend.gather(x, with_grad=True)
    (everything * torch.arange(1.0, 3 * world + 1) * (rank + 1)).sum().backward()
    y = torch.full((2,), float(rank)).requires_grad_()
    turned = backend.rotate(y)
    (turned * (rank + 1)).sum().backward()
    backend.barrier(60)
    return {
        "gathered": everything.tolist(), "gradient": x.grad.tolist(), "turned": turned.tolist(), "turned_gradient": y.grad.tolist(),
        "sum": float(backend.sum_over_devices(rank + 1)), "any": [backend.any_device(rank == 1), backend.any_device(False)],
        "broadcast": backend.broadcast({"from": rank}), "all": backend.all_objects(f"rank {rank}"),
        "without_gradient": backend.gather(x).requires_grad,
    }  # fmt: skip


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    results = {}
    for label, job in spec["jobs"].items():
        start = time.perf_counter()
        results[label] = run_job(job)
        print(f"{label}: {time.perf_counter() - start:.1f} s", flush=True)
    if int(os.environ.get("RANK", "0")) == 0:
        Path(spec["out"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
