"""Techniques that promise memory or speed, each measured as a ratio on one small language model, beside what is claimed for it.

    python benchmarks/techniques.py [--out mmkit/figures/data/measured_techniques.csv] [--processes 2]

Bytes are counted, not sampled: every live tensor's storage once (model, gradients, moments, buffers of the machinery), or every tensor that
autograd keeps for backward. Times are processor seconds of the fastest of a few steps on this machine's CPU; on an accelerator they will
differ, the byte ratios of ZeRO, LoRA, 4-bit weights and checkpointing will not.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIELDS = ("technique", "quantity", "unit", "baseline", "without", "with", "saved_percent", "claimed_percent")
CLAIMS = {  # percent saved as published, by technique and the unit of what is meant; that of data is of lazy, cached and parallel loading
    ("ZeRO", "bytes"): "50",
    ("LoRA", "parameters"): "90",
    ("4-bit weights", "bytes"): "75",
    ("gradient checkpointing", "bytes"): "40-50",
    ("lazy data", "s"): "20-30 of training time",
}
SIZES = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "pad_token_id": 0,
}  # fmt: skip
SMALL_BUCKETS = {"reduce_bucket_size": 200_000, "allgather_bucket_size": 200_000, "stage3_param_persistence_threshold": 0}
ROWS, LENGTH, STEPS = 4, 128, 4


def row(technique: str, quantity: str, unit: str, baseline: str, without: float, with_it: float) -> dict:
    """One line of the table; negative savings are costs."""
    saved = round(100 * (1 - with_it / without), 1)
    claim = CLAIMS.get((technique.split(" stage")[0], unit), "")
    return dict(zip(FIELDS, (technique, quantity, unit, baseline, without, with_it, saved, claim), strict=True))


# ---------------------------------------------------------------- the model and what is counted


def objective():
    """A language model whose forward returns the loss sum."""
    import torch
    from torch import nn
    from transformers import LlamaConfig, LlamaForCausalLM

    class Objective(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model = LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False))

        def forward(self, ids):
            hidden = self.model.model(input_ids=ids).last_hidden_state[:, :-1]
            logits = self.model.lm_head(hidden).float().flatten(0, 1)
            return nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum")

    return Objective()


def live_bytes() -> int:
    """Bytes of all tensors that this process holds, each storage once."""
    import torch

    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and not x.is_meta]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x.layout is torch.strided}
    return sum(storages.values())


def trained(kind: dict, precision: str = "fp32", **train) -> dict:
    """Live bytes between backward and update, bytes kept for backward, and the time of a step."""
    import torch

    from mmkit.config import BackendConfig, TrainConfig
    from mmkit.sharding.backend import create

    backend = create(BackendConfig(**kind), precision)
    model = backend.prepare(
        objective(),
        lambda named: torch.optim.AdamW(named.values(), lr=1e-4),
        train=TrainConfig(precision=precision, device_batch=ROWS, global_batch=ROWS * backend.world, **train),
        blocks=("LlamaDecoderLayer",),
    )
    kept: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(x):
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    generator = torch.Generator().manual_seed(backend.rank)
    ids = backend.shard({"ids": torch.randint(1, SIZES["vocab_size"], (ROWS, LENGTH), generator=generator)})
    count = backend.sum_over_devices(float(ROWS * (LENGTH - 1)))
    seconds = []
    for _ in range(STEPS):
        start = time.process_time()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = model(ids["ids"])
        kept_bytes = sum(kept.values())
        kept.clear()
        backend.backward(loss / count, last=True)
        del loss
        counting = time.process_time()
        live = live_bytes()
        start += time.process_time() - counting
        backend.update(1.0)
        seconds.append(time.process_time() - start)
    return {"live": live, "kept": kept_bytes, "seconds": min(seconds[1:])}


def in_child(call: str, processes: int = 0, **arguments) -> dict:
    """``call`` of this file in a fresh process (or several under torchrun); what it returns on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes else []
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "USE_TORCH_XLA": "0"}
        spec = json.dumps({"call": call, "arguments": arguments, "out": str(out)})
        done = subprocess.run([sys.executable, *launcher, __file__, "--child", spec], env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{call} {arguments} failed:\n{done.stderr[-3000:]}")
        return json.loads(out.read_text())


# ---------------------------------------------------------------- the techniques


def zero(processes: int) -> list[dict]:
    """Model, gradient and optimizer bytes a process holds under ZeRO 0 to 3, against whole copies (DDP)."""
    whole = in_child("trained", processes, kind={"kind": "torch"})
    rows, baseline = [], f"DDP, {processes} processes"
    for stage in range(4):
        with tempfile.TemporaryDirectory() as folder:  # DeepSpeed's buckets are made for models a thousand times larger
            file = Path(folder, "small.json")
            file.write_text(json.dumps({"zero_optimization": SMALL_BUCKETS | {"stage": stage}}))
            cut = in_child("trained", processes, kind={"kind": "deepspeed", "zero_stage": stage, "deepspeed_config": str(file)})
        rows.append(row(f"ZeRO stage {stage}", "weights, gradients and moments a process", "bytes", baseline, whole["live"], cut["live"]))
        rows.append(row(f"ZeRO stage {stage}", "time of a step", "s", baseline, whole["seconds"], cut["seconds"]))
    return rows


def lora_parameters() -> dict:
    """Trained parameters with and without rank-16 adapters."""
    from mmkit.config import LoraConfig
    from mmkit.training.adapters import inject

    model = objective().model
    every = sum(p.numel() for p in model.parameters())
    inject(model, LoraConfig(rank=16), ((r".*", "language"),), model.lm_head)
    return {"every": every, "trained": sum(p.numel() for p in model.parameters() if p.requires_grad)}


def quantised_bytes() -> dict:
    """Bytes of the linear layers in bf16 and in nf4 with double quantisation."""
    import torch

    from mmkit.training.adapters import quantise

    model = objective().model.to(torch.bfloat16).requires_grad_(False)
    layers = [p for name, p in model.named_parameters() if "proj" in name]
    half = sum(p.numel() * p.element_size() for p in layers)
    del layers
    before = live_bytes()
    quantise(model, 4, torch.bfloat16, skip=model.lm_head)
    return {"half": half, "nf4": half - (before - live_bytes())}


def resident() -> int:
    """Bytes of memory this process occupies."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def dataset_bytes(eager: bool, n: int = 400) -> dict:
    """Memory and time to be ready for the first sample: pictures opened when asked for, or all decoded before."""
    import numpy as np

    from mmkit.data.demo import open_pack
    from mmkit.data.images import open_image

    source = open_pack("easy_vqa")
    np.asarray(open_image(source[0].images[0]))  # the libraries' own memory is not what is measured
    before, start = resident(), time.process_time()
    examples = [source[i] for i in range(min(n, len(source)))]
    held = [np.asarray(open_image(image)) for example in (examples if eager else examples[:1]) for image in example.images]
    return {"bytes": max(resident() - before, 4096), "seconds": time.process_time() - start, "pictures": len(held)}


def init_seconds(fast: bool) -> dict:
    """Time to have the modules of a model: on the meta device, or with weights drawn at random that a checkpoint then replaces."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES | {"hidden_size": 512, "intermediate_size": 2048})
    LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 1}))  # imports and caches are not what is measured
    start = time.process_time()
    with torch.device("meta" if fast else "cpu"):
        LlamaForCausalLM(config)
    return {"seconds": time.process_time() - start}


def loss_peak(chunk: int, vocabulary: int = 131072, positions: int = 1024, width: int = 64) -> dict:
    """Most bytes of tensors alive at once in loss and backward beyond weights and gradients, with all logits at once or ``chunk`` positions
    at a time; from torch's record of every allocation, so whatever the system's allocator keeps."""
    import itertools

    import torch
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.checkpoint import checkpoint

    from mmkit.training.loss import LanguageObjective

    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.logits = torch.nn.Linear(width, vocabulary, bias=False)

        def forward(self, batch):
            return batch["hidden"]

    def step(size: int, n: int) -> None:
        again = lambda *args: checkpoint(*args, use_reentrant=False)  # noqa: E731
        places = torch.arange(n)[None]
        batch = {"hidden": torch.randn(1, n, width, requires_grad=True), "target_positions": places, "targets": places % vocabulary}
        LanguageObjective(model, size, again)(batch)["loss_sum"].backward()

    model = Head()
    step(0, 1)  # gradients exist before the measured step
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step(chunk, positions)
    changes = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    return {"bytes": max(itertools.accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())))}


def measured(processes: int) -> list[dict]:
    """All rows of the table."""
    rows = zero(processes)
    lora = in_child("lora_parameters")
    rows.append(row("LoRA", "trained parameters", "parameters", "full finetuning", lora["every"], lora["trained"]))
    bits = in_child("quantised_bytes")
    rows.append(row("4-bit weights", "linear layers (nf4, double quantisation)", "bytes", "bf16", bits["half"], bits["nf4"]))
    single = {"kind": "single"}
    plain, blocks = in_child("trained", kind=single), in_child("trained", kind=single, checkpoint_blocks=True)
    rows.append(row("gradient checkpointing", "kept for backward", "bytes", "fp32", plain["kept"], blocks["kept"]))
    rows.append(row("gradient checkpointing", "time of a step", "s", "fp32", plain["seconds"], blocks["seconds"]))
    eager, lazy = in_child("dataset_bytes", eager=True), in_child("dataset_bytes", eager=False)
    rows.append(row("lazy data", "memory before the first step", "bytes", "all pictures decoded", eager["bytes"], lazy["bytes"]))
    rows.append(row("lazy data", "time before the first step", "s", "all pictures decoded", eager["seconds"], lazy["seconds"]))
    slow, fast = in_child("init_seconds", fast=False), in_child("init_seconds", fast=True)
    rows.append(row("fast init", "time to build the modules", "s", "random weights", slow["seconds"], fast["seconds"]))
    whole, parts = in_child("loss_peak", chunk=0), in_child("loss_peak", chunk=64)
    quantity = "peak of the loss at vocabulary 128k, 1,024 positions, 64 a chunk"
    rows.append(row("chunked cross-entropy", quantity, "bytes", "all logits at once", whole["bytes"], parts["bytes"]))
    half = in_child("trained", kind=single, precision="bf16")
    rows.append(row("mixed precision", "kept for backward", "bytes", "fp32", plain["kept"], half["kept"]))
    rows.append(row("mixed precision", "time of a step", "s", "fp32", plain["seconds"], half["seconds"]))
    return rows


def child(spec: dict) -> None:
    """What `in_child` started."""
    result = globals()[spec["call"]](**spec["arguments"])
    if os.environ.get("RANK", "0") == "0":
        Path(spec["out"]).write_text(json.dumps(result))


def main() -> None:
    """Measure, print, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "mmkit" / "figures" / "data" / "measured_techniques.csv")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(json.loads(arguments.child))
        return
    rows = measured(arguments.processes)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", newline="", encoding="utf8") as file:
        file.write(f"# Measured by benchmarks/techniques.py --processes {arguments.processes} on CPU cores; one fresh process a number.\n")
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    for line in rows:
        claimed = line["claimed_percent"] or "-"
        print(f"{line['technique']:24} {line['quantity']:42} saved {line['saved_percent']:6} %   claimed {claimed} %")


if __name__ == "__main__":
    main()
