"""All backends' training runs, made once for all tests: four launches share the start-up of Python and the libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SAVE_AT, STEPS, RESUMED = 3, 12, 6
TWO = {  # kinds of two processes
    "ddp": {"kind": "torch", "strategy": "ddp"},
    "fsdp": {"kind": "torch", "strategy": "fsdp"},
    "zero0": {"kind": "deepspeed", "zero_stage": 0},
    "zero1": {"kind": "deepspeed", "zero_stage": 1},
    "zero2": {"kind": "deepspeed", "zero_stage": 2},
    "zero3": {"kind": "deepspeed", "zero_stage": 3},
    "zero2 offload": {"kind": "deepspeed", "zero_stage": 2, "offload": True},
    "zero3 offload": {"kind": "deepspeed", "zero_stage": 3, "offload": True},
}
FOUR = {"ddp x4": TWO["ddp"], "fsdp x4": TWO["fsdp"], "zero3 x4": TWO["zero3"]}
SINGLE = {"kind": "single"}
XLA = {"kind": "xla", "xla_devices": 4, "fsdp_axis": 2}
HALF = ("single", "ddp", "fsdp", "zero0", "zero1", "zero3")  # where half precision skips are tried
QUANTISED = ("single", "ddp", "zero2")
FROM_META = ("ddp", "fsdp", "zero2", "zero3")
RECOMPUTED = ("single", "fsdp", "zero3")
QUICK_COMPILES = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
SAVERS = ("single", *TWO, "xla")


def training_jobs(mode: str, backend: dict, folder: Path) -> dict:
    """What every mode runs from scratch."""
    recomputed = {"checkpoint_blocks": mode == "xla"}
    jobs = {f"{case}/{mode}": {"case": case, "steps": [0, STEPS], "save_at": SAVE_AT} for case in ("vlm", "clip")}
    jobs[f"lora/{mode}"] = {"case": "lora", "precision": "bf16", "steps": [0, 4], "save_at": SAVE_AT, "full": True, "train": recomputed}
    jobs[f"vlm/{mode}"]["validate"] = True
    for label, job in jobs.items():
        job |= {"save": str(folder / f"{label.replace('/', ' ')}.pt")}
    jobs[f"skip/{mode}"] = {"case": "vlm", "steps": [0, 4], "poison": [1, 2]}
    jobs[f"short/{mode}"] = {"case": "vlm", "steps": [0, 3], "short_window": 1}
    if mode in HALF:
        jobs[f"skip bf16/{mode}"] = {"case": "vlm", "precision": "bf16", "steps": [0, 3], "poison": [1]}
        jobs[f"skip fp16/{mode}"] = {"case": "vlm", "precision": "fp16", "steps": [0, 4], "poison": [1, 2]}
    if mode in RECOMPUTED:
        jobs[f"blocks/{mode}"] = {"case": "lora", "steps": [0, 2], "train": {"checkpoint_blocks": True}}
    if mode in QUANTISED:
        jobs[f"qlora/{mode}"] = {"case": "qlora", "steps": [0, 2]}
    if mode in FROM_META:
        jobs[f"meta/{mode}"] = {"case": "vlm", "steps": [0, 2], "meta": True}
    return {label: job | {"backend": backend} for label, job in jobs.items()}


def static_jobs() -> dict:
    """DDP with a static graph: windows of two micro-batches, contrastive ones, recomputed blocks, a short window, left-out updates."""
    kinds = {
        "vlm": {"case": "vlm", "steps": [0, 4]},
        "clip": {"case": "clip", "steps": [0, 4]},
        "blocks": {"case": "lora", "steps": [0, 3], "train": {"checkpoint_blocks": True}},
        "short": {"case": "vlm", "steps": [0, 3], "short_window": 1},
        "skip": {"case": "vlm", "steps": [0, 4], "poison": [1, 2]},
    }
    return {f"{kind}/ddp static": job | {"backend": TWO["ddp"] | {"static_graph": True}} for kind, job in kinds.items()}


def resume_jobs(mode: str, backend: dict, savers, folder: Path, cases=("vlm",)) -> dict:
    """``mode`` goes on from what each of ``savers`` saved."""
    jobs = {}
    for case in cases:
        for saver in savers:
            load = str(folder / f"{case} {saver}.pt")
            jobs[f"{case}/{saver} -> {mode}"] = {"case": case, "steps": [SAVE_AT, RESUMED], "load": load, "backend": backend}
    return jobs


def launch(jobs: dict, folder: Path, name: str, processes: int = 0, variables: dict | None = None) -> dict:
    """Runs the rig and returns its results; AssertionError with the output's end where it fails."""
    spec, out = folder / f"{name}.json", folder / f"{name} out.json"
    spec.write_text(json.dumps({"jobs": jobs, "out": str(out)}))
    command = [sys.executable]
    if processes:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("rig.py")), str(spec)],
        env=os.environ | ours | (variables or {"USE_TORCH_XLA": "0"}), capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(out.read_text())


def all_results(folder: Path) -> dict:
    """Label -> what that run did, for all backends."""
    whole = folder / "every parameter cut.json"  # DeepSpeed leaves small parameters whole, and all of ours are small
    whole.write_text('{"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}')
    cut = {"deepspeed_config": str(whole)}
    two = {mode: backend | (cut if mode == "zero3" else {}) for mode, backend in TWO.items()}
    found = launch(training_jobs("single", SINGLE, folder), folder, "single")
    jobs = {"talk": {"case": "talk", "backend": TWO["ddp"]}} | static_jobs()
    for mode, backend in two.items():
        jobs |= training_jobs(mode, backend, folder)
    for i, (mode, backend) in enumerate(two.items()):  # all 64 pairs agree to 2e-7; the test keeps its own, the next two and single's
        others = [list(TWO)[(i + k) % len(TWO)] for k in (1, 2)]
        jobs |= resume_jobs(mode, backend, ("single", mode, *others), folder)
    found |= launch(jobs, folder, "two", 2)
    jobs = training_jobs("xla", XLA, folder) | resume_jobs("xla", XLA, ("single", "fsdp", "zero3", "xla"), folder)
    found |= launch(jobs, folder, "xla", variables={"XLA_FLAGS": QUICK_COMPILES})
    jobs = {}
    for mode, backend in FOUR.items():
        jobs |= resume_jobs(mode, backend, ("single", "zero2", "xla"), folder)
    found |= launch(jobs, folder, "four", 4)
    return found | launch(resume_jobs("single", SINGLE, SAVERS, folder, ("vlm", "clip")), folder, "single again")
