"""The plan's bytes are those that a toy really keeps; what does not fit is said before anything is read."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from mmkit.config import ConfigError, LoraConfig, changed, load
from mmkit.launch.machine import Machine, named
from mmkit.launch.plan import (
    FRACTIONS,
    GIB,
    Part,
    Plan,
    TooLargeError,
    activation_needs,
    count_parts,
    duration,
    make_plan,
    size,
    split_of,
    state_needs,
)  # fmt: skip

RATES = dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), 1e11)
LAPTOP = Machine("laptop", "cpu", "2 CPU cores", 1, 16 * GIB, peak=RATES, shared=True)
COMPONENTS = ((r"^connector\.", "connector"), (r"^language\.", "language"), (r"", "other"))


class Toy(nn.Module):
    """Two components, a head tied to nothing, a norm."""

    def __init__(self, width: int = 128):
        super().__init__()
        self.connector = nn.Linear(width, width)
        self.language = nn.Sequential(
            nn.Embedding(64, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)
        )
        self.head = nn.Linear(width, 64, bias=False)


def a_run(**overrides):
    return load("8b-debug", "finetune", {"trainable": "[connector]", **overrides})


@pytest.fixture(scope="module")
def counted() -> dict:
    """Bytes on rank 0 of two processes, measured in a child."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(Path(__file__).with_name("count_bytes.py")),
    ]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment | {"OMP_NUM_THREADS": "1"})
    found = re.search(r"COUNTED (\{.*\})", done.stdout)
    assert found, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(found[1])


@pytest.mark.parametrize("name", ["zero0", "zero1", "zero2", "zero3", "fsdp", "ddp"])
def test_weights_and_optimizer_are_within_a_tenth_of_the_bytes_a_backend_keeps(counted, name):
    layer = 128 * 128 + 128
    parts = (Part("connector", 4 * layer, trained=4 * layer), Part("language", 4 * layer))
    kind = (
        {"backend.kind": "torch", "backend.strategy": name}
        if name in ("fsdp", "ddp")
        else {"backend.kind": "deepspeed", "backend.zero_stage": name[-1]}
    )
    run = a_run(precision="fp32", global_batch=8, **kind, **{"backend.processes": 2})
    needs = state_needs(run, parts, 2)
    assert sum(need.weights for need in needs) == pytest.approx(counted[name]["weights"], rel=0.1)
    assert sum(need.optimizer for need in needs) == pytest.approx(counted[name]["optimizer"], rel=0.1)


def test_parts_are_counted_by_component_with_tied_weights_once():
    module = Toy()
    module.again = module.connector
    trained = {name for name, _ in module.named_parameters() if name.startswith("connector.")}
    parts = {part.component: part for part in count_parts(module, COMPONENTS, trained)}
    assert parts["connector"].parameters == parts["connector"].trained == 128 * 128 + 128
    assert parts["language"].trained == 0 and parts["language"].linear == 2 * 4 * 128 * 128
    assert parts["language"].tables == 64 * 128
    assert parts["other"].linear == 0, "the head is not quantised"
    assert sum(part.parameters for part in parts.values()) == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("targets", [(), (r"language\.1",), ("1",)])
def test_adapters_are_counted_as_peft_makes_them(targets, dora):
    from mmkit.training.adapters import inject, targets_of

    lora = LoraConfig(rank=4, targets=targets, use_dora=dora)
    module = Toy()
    adapted = targets_of(module, lora, COMPONENTS, module.head)
    parts = {part.component: part for part in count_parts(module, COMPONENTS, (), adapted, lora)}
    inject(module, lora, COMPONENTS, module.head)
    made = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert parts["language"].adapters == made > 0


def test_lora_needs_optimizer_state_for_adapters_only():
    run = a_run(trainable="[]", lora={"rank": 4})
    full = a_run(trainable="[language]")
    parts = (Part("language", 10**6, adapters=10**4),)
    whole = (Part("language", 10**6, trained=10**6),)
    assert sum(need.optimizer for need in state_needs(run, parts, 1)) == 8e4
    assert sum(need.optimizer for need in state_needs(full, whole, 1)) == 8e6


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_are_within_a_tenth_of_what_bitsandbytes_stores(bits):
    from mmkit.training.adapters import quantise

    module = Toy(512)
    [part] = [part for part in count_parts(module, COMPONENTS) if part.component == "language"]
    quantise(module.language, bits, torch.float32)
    stored = sum(p.numel() * p.element_size() for p in module.language.parameters())
    for layer in module.language.modules():
        state = getattr(getattr(layer, "weight", None), "quant_state", None)
        if state is not None:
            stored += state.absmax.numel() * state.absmax.element_size() + state.state2.absmax.numel() * state.state2.absmax.element_size()
            stored += sum(t.numel() * t.element_size() for t in (state.code, state.state2.code))
    run = a_run(bits=bits, precision="fp32")
    [need] = state_needs(run, [part], 1)
    assert need.weights == pytest.approx(stored, rel=0.1)


def test_language_activations_are_near_what_backward_keeps():
    """Counted by hooks on what autograd saves, for a small Llama, all its weights trained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    run = a_run(
        trainable="[language]", precision="fp32", device_batch=2, global_batch=2, checkpoint_blocks=False, **{"data.max_length": 256, "data.buckets": "[256]"}
    )
    architecture = run.model.language.architecture | {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
    architecture = {key: value for key, value in architecture.items() if key != "model_type"}
    model = LlamaForCausalLM(LlamaConfig(**architecture, attn_implementation="sdpa"))
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.model(torch.ones(2, 256, dtype=torch.long)).last_hidden_state
    small = run.model.language.model_copy(update={"architecture": architecture | {"vocab_size": 1}})
    planned = activation_needs(run.model_copy(update={"model": run.model.model_copy(update={"language": small})}))["language"]
    assert hidden.requires_grad
    assert 0.75 * sum(kept.values()) < planned < 1.33 * sum(kept.values())


def test_too_large_says_what_it_needs_what_there_is_and_two_ways_on():
    run = load("13b", "finetune")
    plan = make_plan(run, (Part("language", 13 * 10**9, trained=13 * 10**9), Part("encoders", 2 * 10**9)), LAPTOP)
    with pytest.raises(TooLargeError) as caught:
        plan.check()
    message = str(caught.value)
    for words in (
        "13b/finetune does not fit",
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "16.0 GiB",
        "dry_run True",
        run.intended_for,
    ):
        assert words in message
    assert isinstance(caught.value, ConfigError)


def test_more_devices_and_fewer_bits_need_less():
    parts = (Part("language", 7 * 10**9, adapters=10**8, linear=6 * 10**9),)
    lora = {"lora": {"rank": 64}, "trainable": "[]"}

    def total(n=1, **more):
        run = load("llava-7b", "finetune", {**lora, "global_batch": 64, "device_batch": 1, "backend.processes": n, **more})
        return make_plan(run, parts, named(f"{n}xa100-80gb")).need.total

    assert total(bits=4) < total(bits=8) < total(bits=16)
    assert total(8, **{"backend.kind": "deepspeed", "backend.zero_stage": 3}) < total(1)
    assert total(1, checkpoint_blocks=True) < total(1, checkpoint_blocks=False)


def test_dataset_size_plays_no_part_in_memory_but_in_time():
    run = load("8b", "pretrain")
    parts = (Part("language", 8 * 10**9), Part("connector", 10**8, trained=10**8))
    small, large = (make_plan(run, parts, dataclasses.replace(named("v4-512"), price=3.0), samples) for samples in (10**5, 10**7))
    assert small.need == large.need and large.hours == pytest.approx(100 * small.hours, rel=0.01)
    assert "USD" in str(large) and small.steps == 196


@pytest.mark.parametrize("preset", ["8b", "ferret-7b", "llava-7b"])
def test_published_full_runs_fit_their_accelerators_and_no_laptop(preset):
    run = load(preset, "finetune")
    parts = (Part("language", 7 * 10**9, trained=7 * 10**9), Part("connector", 10**8, trained=10**8), Part("encoders", 10**9))
    assert not make_plan(run, parts, LAPTOP).fits
    many = changed(
        run, backend__kind="deepspeed", backend__zero_stage=3, backend__processes=8, train__global_batch=64, train__device_batch=1
    )
    assert make_plan(many, parts, named("8xh100-80gb")).fits


def test_processes_on_one_cpu_share_its_memory():
    run = a_run(global_batch=8)
    parts = (Part("language", 2 * 10**9),)
    one = make_plan(run, parts, LAPTOP)
    four = make_plan(run, parts, Machine("laptop", "cpu", "2 CPU cores", 4, 16 * GIB, peak=RATES, shared=True))
    assert one.fits and not four.fits


def test_rows_add_up():
    plan = make_plan(a_run(), (Part("connector", 1000, trained=1000), Part("language", 5000)), LAPTOP)
    *rows, total = plan.rows()
    assert total["component"] == "all" and total["parameters"] == sum(row["parameters"] for row in rows) == 6000
    assert total["trainable"] == 1000 and total["frozen"] == 5000


def test_sizes_and_times_are_written_for_people():
    assert size(3 * GIB) == "3.0 GiB" and size(2**20) == "1.0 MiB"
    assert [duration(s) for s in (0.5, 90, 600, 8000, 300000)] == ["0.5 s", "90 s", "10 min", "2.22 h", "3.47 days"]
    assert split_of(a_run(), 1).master == 0 and isinstance(make_plan(a_run(), (), LAPTOP), Plan)


PUBLISHED = Path(__file__).resolve().parents[2] / "mmkit/figures/data"


def rows_of(name: str) -> list[dict[str, str]]:
    """The rows of a published table, without its comments."""
    with (PUBLISHED / f"{name}.csv").open(encoding="utf8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def reached(name: str, precision: str, samples_a_second: float) -> float:
    """The fraction of an A100's peak that a published model reached, by the operations that a plan counts for it."""
    plan_of = importlib.import_module("mmkit.launch.preflight").plan_of
    settings = {"model.name": name, "precision": precision, "global_batch": 384, "device_batch": 1, "trainable": "[image, text, scale]"}
    plan = plan_of(load("clip-vit-l-14", "pretrain", settings), machine=named("96x4xa100-40gb"))
    return plan.operations / 384 * samples_a_second / plan.machine.peak[precision]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_fractions_of_an_a100_are_those_of_the_published_speeds(precision):
    long = {"bf16": "bfloat16", "fp16": "float16"}[precision]
    speeds = {row["model"]: float(row["samples_per_s_per_gpu"]) for row in rows_of("laion_large_clip_speed") if row["precision"] == long}
    found = [reached(f"ViT-{name.replace('/', '-')}", precision, speeds[name]) for name in ("H/14", "g/14")]
    assert sum(found) / 2 == pytest.approx(FRACTIONS["clip", precision][0], rel=0.03)


def test_a_published_run_that_no_fraction_was_taken_from_is_planned_within_a_quarter():
    """LAION-400M's ViT-L/14: 12.8 billion samples on 400 A100 40GB, in half precision with recomputation."""
    [row] = [row for row in rows_of("openclip_gpu_hours") if row["model"] == "ViT-L/14"]
    devices, batch = int(row["gpus_a100_40gb"]), int(row["global_batch"])
    settings = {"precision": "fp16", "global_batch": batch, "device_batch": int(row["batch_per_gpu"]), "processes": 4, "nodes": devices // 4}
    plan_of = importlib.import_module("mmkit.launch.preflight").plan_of
    run = load("clip-vit-l-14", "pretrain", settings | {"epochs": 1})
    plan = plan_of(run, machine=named(f"{devices // 4}x4xa100-40gb"), samples=12_800_000_000)
    assert plan.hours == pytest.approx(float(row["hours"]), rel=0.25)


def test_the_published_vit_l_14_is_planned_within_a_quarter_of_its_days():
    """32 billion samples at 27,862 a second on 384 A100 40GB in tf32: 13.3 days."""
    plan_of = importlib.import_module("mmkit.launch.preflight").plan_of
    plan = plan_of(load("clip-vit-l-14", "pretrain"), machine=named("96x4xa100-40gb"), samples=200_000_000)
    assert plan.hours == pytest.approx(32e9 / 27_862 / 3600, rel=0.25)
    assert reached("ViT-L-14", "tf32", 27_862 / 384) == pytest.approx(FRACTIONS["clip", "tf32"][0], rel=0.03)
    assert "tf32, as ViT-L/14 on 384 A100 40GB" in str(plan) and "not calibrated" not in str(plan)
    other = plan_of(load("clip-vit-l-14", "pretrain"), machine=named("48x8xh100-80gb"), samples=200_000_000)
    assert "not calibrated for tf32 on 48x8xh100-80gb" in str(other) and other.hours < plan.hours


@pytest.mark.parametrize(("preset", "hours"), [("llava-7b", 3.5), ("llava-13b", 5.5)])
def test_the_fraction_of_language_models_is_that_of_llava_s_pretraining(preset, hours):
    """Rows there have about 600 positions: 576 of the picture and a caption."""
    plan_of = importlib.import_module("mmkit.launch.preflight").plan_of
    run = load(preset, "pretrain", {"max_length": 600, "checkpoint_blocks": True, "global_batch": 256, "device_batch": 32})
    assert plan_of(run, machine=named("8xa100-80gb"), samples=558_128).hours == pytest.approx(hours, rel=0.2)


def test_a_rate_is_of_the_run_s_precision_and_one_measured_here_is_said_to_be():
    parts = (Part("language", 10**9, trained=10**9, tables=10**8),)
    plans = {name: make_plan(a_run(precision=name), parts, named("a100-40gb")) for name in ("bf16", "tf32", "fp32")}
    assert plans["bf16"].seconds_a_step < plans["tf32"].seconds_a_step < plans["fp32"].seconds_a_step
    run = a_run(checkpoint_blocks=False)
    assert make_plan(run, parts, LAPTOP).operations == run.train.global_batch * run.data.max_length * 6 * 9 * 10**8
    here = dataclasses.replace(LAPTOP, peak=dict.fromkeys(RATES, 0.0), measured={"bf16": 1e12, "fp32": 0.0}.__getitem__)
    told = str(make_plan(a_run(precision="bf16"), parts, here))
    assert "of the 1,000 GFLOP/s of a bf16 product measured here" in told
    assert "time:             not known" in str(make_plan(a_run(precision="fp32"), parts, here))


def test_every_published_preset_can_be_planned():
    preflight = importlib.import_module("mmkit.launch.preflight")
    plan = preflight.plan_of(load("llava-7b", "pretrain"), machine=LAPTOP)
    assert 6.5e9 < sum(part.parameters for part in plan.parts if part.component == "language") < 7e9 and not plan.fits
