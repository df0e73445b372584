"""What a run leaves open is decided for a machine: published pairings fit, a hand-set value stays, a global batch is met or refused."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

from mmkit.cli import build_parser, main
from mmkit.config import ConfigError, asked, changed, load, load_file
from mmkit.launch import choose as choosing
from mmkit.launch import overview as overviews
from mmkit.launch import slurm, tpu
from mmkit.launch.choose import changes_that_fit, choose, for_machine
from mmkit.launch.counting import count
from mmkit.launch.launch import for_this_machine, launch
from mmkit.launch.machine import machine_of, named
from mmkit.launch.plan import TooLargeError
from mmkit.launch.preflight import plan_of, preflight
from mmkit.notebook.parameters import assemble, check, of_notebook
from mmkit.presets import presets
from mmkit.rules import CHOOSABLE
from mmkit.run_options import run_of
from tests.training.tiny_run import sourced, tiny_run

ROOT = Path(__file__).resolve().parents[2]
MACHINES = ("t4-16gb", "l4-24gb", "4xrtx-4090", "2xa100-80gb", "8xa100-80gb", "4x8xh100-80gb", "v4-64", "v4-512", "cpu")


def chosen(model: str, stage: str, machine: str, **settings):
    """The choice for a preset on a named machine; settings with their dots as double underscores."""
    return choose(load(model, stage, {name.replace("__", "."): value for name, value in settings.items()}), named(machine))


@pytest.mark.parametrize(
    ("model", "stage", "machine", "backend", "precision", "batch"),
    [
        ("8b", "finetune", "v4-64", "xla", "bf16", (8, 32, 2)), ("8b", "pretrain", "v4-64", "xla", "bf16", (8, 32, 2)),
        ("13b", "finetune", "v4-128", "xla", "bf16", (8, 64, 1)), ("13b", "pretrain", "v4-128", "xla", "bf16", (8, 64, 1)),
        ("34b", "finetune", "v4-256", "xla", "bf16", (4, 128, 2)), ("34b", "pretrain", "v4-256", "xla", "bf16", (8, 128, 1)),
        ("8b", "finetune", "v4-512", "xla", "bf16", (2, 256, 1)), ("13b", "finetune", "v4-512", "xla", "bf16", (2, 256, 1)),
        ("34b", "finetune", "v4-512", "xla", "bf16", (4, 256, 1)),
        ("13b", "finetune", "8xa100-80gb", "fsdp", "bf16", (8, 8, 8)),
        ("ferret-7b", "finetune", "8xa100-80gb", "zero3", "bf16", (16, 8, 1)),
        ("llava-7b", "finetune", "8xa100-80gb", "zero3", "bf16", (16, 8, 1)), ("llava-7b", "pretrain", "8xa100-80gb", "zero2", "bf16", (32, 8, 1)),
        ("ferret-7b-lora", "finetune", "4xrtx-4090", "zero2", "bf16", (2, 4, 8)),
        ("ferret-7b-qlora", "finetune", "l4-24gb", "single", "bf16", (2, 1, 32)),
        ("ferret-7b-qlora", "finetune", "t4-16gb", "single", "fp16", (2, 1, 32)),
        ("clip-vit-l-14", "pretrain", "96x4xa100-40gb", "ddp", "tf32", (224, 384, 1)),
        ("tiny", "pretrain", "cpu", "single", "bf16", (16, 1, 1)), ("tiny", "finetune", "cpu", "single", "bf16", (4, 1, 1)),
    ],
)  # fmt: skip
def test_published_pairings_fit(model, stage, machine, backend, precision, batch):
    choice = chosen(model, stage, machine)
    run = choice.run
    assert choice.plan.fits and choice.backend == backend and run.train.precision == precision
    assert (run.train.device_batch, run.devices, run.accumulation) == batch
    assert run.train.global_batch == load(model, stage).train.global_batch


def test_v4_64_has_32_devices_where_cambrian_counts_64():
    """A slice is named by TensorCores, two a chip. Cambrian's readme multiplies by cores (4 x 8 x 64 = 2048, one process each); v4's
    two cores share a chip's memory and are one device to torch_xla, so the same batch takes twice the accumulation: 4 x 16 x 32."""
    run = chosen("8b", "finetune", "v4-64", device_batch=4, global_batch=2048).run
    assert (run.devices, run.train.device_batch, run.accumulation) == (32, 4, 16)


def test_every_decision_has_one_row_that_says_why():
    choice = chosen("13b", "finetune", "8xa100-80gb")
    rows = {row["setting"]: row for row in choice.rows}
    # neither of what another kind of backend reads
    assert set(rows) == {*CHOOSABLE, "accumulation"} - {"backend.zero_stage", "backend.xla_devices"} and len(rows) == len(choice.rows)
    assert all(row["why"] for row in choice.rows)
    assert "ddp would need 211.7 GiB" in rows["backend.kind"]["why"] and rows["train.checkpoint_blocks"]["why"] == "the preset's"
    first, second = str(choice).splitlines()
    assert first.startswith("backend: torch fsdp on 8 x A100 80GB, bf16 (fsdp fits") and "8 a device x 8 devices x 8 accumulation = 512" in second


# ---------------------------------------------------------------- what is tried, in which order


@pytest.mark.parametrize(
    ("model", "stage", "machine", "backend"),
    [
        ("8b", "finetune", "8xa100-80gb", "fsdp"),  # prefers xla, which no GPU is driven by
        ("ferret-7b", "finetune", "v4-64", "xla"), ("ferret-7b", "pretrain", "a100-80gb", "single"),
        ("ferret-7b-lora", "finetune", "8xt4-16gb", "fsdp"),  # prefers zero2, which needs 17 GiB of weights and activations
    ],
)  # fmt: skip
def test_a_preference_is_taken_where_it_fits_and_left_where_not(model, stage, machine, backend):
    assert chosen(model, stage, machine).backend == backend


def without_recomputation(run):
    return run.model_copy(update={"train": run.train.model_copy(update={"checkpoint_blocks": False})})


def test_a_smaller_batch_comes_before_recomputation_and_that_before_offload():
    run = without_recomputation(load("llava-7b", "finetune"))
    smaller, recomputed = choose(run, named("8xh200-141gb")).run, choose(run, named("8xl4-24gb"))
    assert (smaller.train.device_batch, smaller.train.checkpoint_blocks) == (4, False), "16 would need 190 GiB"
    assert recomputed.run.train.checkpoint_blocks and not recomputed.run.backend.offload
    assert "without recomputation it does not fit" in str(recomputed)
    offloaded = chosen("13b", "finetune", "2xa100-80gb")
    assert offloaded.run.backend.offload and offloaded.plan.host_need > 100e9 and "without offload it does not fit" in str(offloaded)
    assert "a host, which has" in offloaded.plan.message()


def test_offload_that_the_host_has_no_memory_for_does_not_fit():
    machine = dataclasses.replace(named("2xa100-80gb"), host_memory=64 * 10**9)
    with pytest.raises(TooLargeError, match="offloaded"):
        choose(load("13b", "finetune"), machine)


def test_batch_norms_that_train_are_not_recomputed():
    run = load("clip-tiny", "pretrain")
    small = dataclasses.replace(named("t4-16gb"), memory=2**20)
    assert not choose(run, small, must_fit=False).run.train.checkpoint_blocks


def test_fp16_stands_in_for_bf16_and_a_rewind_s_precision_must_exist():
    assert chosen("8b-debug", "finetune", "t4-16gb", precision="fp32").run.train.precision == "fp32"
    bf16 = changed(load("8b-debug", "finetune"), train__steps=4).model_copy(update={"pinned": ()})
    bf16 = bf16.model_copy(update={"train": bf16.train.model_copy(update={"precision": "bf16"})})
    assert choose(bf16, named("t4-16gb")).run.train.precision == "fp16" and choose(bf16, named("l4-24gb")).run.train.precision == "bf16"
    with pytest.raises(ConfigError, match="train.precision = bf16: T4 16GB .* use fp16"):
        chosen("8b-debug", "finetune", "t4-16gb", precision="bf16")
    with pytest.raises(ConfigError, match="stability.rewind_precision = bf16: T4 16GB"):
        chosen("8b-debug", "finetune", "t4-16gb", stability__action="rewind", stability__rewind_precision="bf16")


# ---------------------------------------------------------------- what must not happen


@pytest.mark.parametrize(
    ("machine", "settings"),
    [
        ("8xa100-80gb", {"backend.kind": "deepspeed", "backend.zero_stage": 3}), ("8xa100-80gb", {"backend.strategy": "fsdp"}),
        ("8xa100-80gb", {"backend.zero_stage": 3, "backend.offload": True}), ("8xa100-80gb", {"backend.processes": 4, "train.device_batch": 1}),
        ("4x8xa100-80gb", {"backend.nodes": 2}), ("v4-128", {"train.device_batch": 2, "backend.xla_devices": 64}),
        ("8xh200-141gb", {"train.checkpoint_blocks": False, "train.device_batch": 1}), ("8xh100-80gb", {"train.precision": "fp16"}),
        ("v4-128", {"train.precision": "fp32", "backend.kind": "xla"}),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_given_by_hand_is_never_changed(machine, settings):
    run = load("13b", "finetune", settings)
    choice = choose(run, named(machine), must_fit=False)
    assert set(settings) <= set(choice.run.pinned)
    for name, value in settings.items():
        section, _, key = name.partition(".")
        assert getattr(getattr(choice.run, section), key) == value, name
    assert {row["why"] for row in choice.rows if row["setting"] in settings} == {"given by hand"}


@pytest.mark.parametrize(
    ("machine", "settings", "message"),
    [
        ("8xa100-80gb", {"backend.kind": "xla"}, "backend.kind = xla does not drive the A100 80GB of 8xa100-80gb; use single, torch or deepspeed"),
        ("v4-128", {"backend.kind": "torch"}, "backend.kind = torch does not drive the TPU v4 chip of v4-128; use xla"),
        ("v4-128", {"backend.strategy": "fsdp"}, "backend.strategy on v4-128: it is driven by xla; leave it out"),
        ("v4-128", {"train.bits": 4, "train.lora": {}, "train.trainable": ["connector"]}, "v4-128 is driven by xla alone"),
        ("8xa100-80gb", {"backend.xla_devices": 4}, "read by xla, which does not drive 8xa100-80gb; leave them out"),
        ("v4-128", {"backend.xla_devices": 32}, "backend.xla_devices = 32, but v4-128 has 64 chips"),
        ("v4-128", {"train.precision": "fp16"}, "train.precision = fp16: TPU v4 chip"),
        ("8xa100-80gb", {"backend.processes": 16}, "backend.processes = 16, but 8xa100-80gb has 8 devices a host"),
        ("8xa100-80gb", {"backend.nodes": 2}, "backend.nodes = 2, but 8xa100-80gb has 1"),
        ("8xa100-80gb", {"backend.strategy": "fsdp", "train.bits": 4, "train.lora": {}, "train.trainable": ["connector"]}, "torch fsdp cannot cut"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_machine_lacks_is_refused_in_one_line(machine, settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        choose(load("13b", "finetune", settings), named(machine))
    assert len(str(caught.value).splitlines()) == 1 and not isinstance(caught.value, TooLargeError)


@pytest.mark.parametrize(
    ("model", "machine", "settings", "nearest"),
    [
        ("8b", "v4-512", {"global_batch": 500}, (256, 512)), ("8b", "v4-512", {"global_batch": 600}, (512, 768)),
        ("8b", "v4-512", {"device_batch": 3}, (768, 1536)), ("13b", "8xa100-80gb", {"global_batch": 100}, (96, 104)),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be_met_is_refused_with_the_two_nearest(model, machine, settings, nearest):
    with pytest.raises(ConfigError, match="does not divide") as caught:
        chosen(model, "finetune", machine, **settings)
    told = tuple(map(int, re.search(r"the nearest global batches that do are (\d+) and (\d+)", str(caught.value)).groups()))
    assert told == nearest
    for batch in told:
        assert chosen(model, "finetune", machine, **settings | {"global_batch": batch}).run.accumulation


def test_fewer_devices_are_used_where_the_batch_has_fewer_rows():
    choice = chosen("8b-debug", "finetune", "8xa100-80gb", backend__kind="auto")
    assert choice.run.devices == 4 == choice.run.train.global_batch
    assert "4 of 8 devices" in next(row["why"] for row in choice.rows if row["setting"] == "backend.processes")


@pytest.mark.parametrize("machine", MACHINES)
def test_no_choice_changes_the_batch_or_computes_in_what_a_device_lacks(machine):
    where, fits = named(machine), 0
    for model in (name for name in presets() if not name.endswith("-debug")):
        run = load(model, "pretrain")
        try:
            choice = choose(run, where, must_fit=False)
        except ConfigError as error:
            assert "does not divide" in str(error)
            continue
        train, fits = choice.run.train, fits + choice.plan.fits
        assert train.global_batch == run.train.global_batch == train.device_batch * choice.run.devices * choice.run.accumulation
        assert 1 <= train.device_batch <= run.train.device_batch and train.precision in where.peak
        assert choice.run.devices <= max(where.devices, 1) and (where.kind == "tpu") == (choice.run.backend.kind == "xla")
        assert choose(choice.run, where, must_fit=False).run == choice.run, "what was chosen stays"
        assert asked(choice.run) == run, "and what was asked for comes back"
    assert fits >= 3


# ---------------------------------------------------------------- where it cannot fit


def typed(line: str) -> tuple[list[str], dict[str, str]]:
    """(words of the command line, parameters of a notebook) that a printed change says to type."""
    command, _, rest = line.partition(": ")[2].partition("   (notebooks: ")
    book = shlex.split(rest.rpartition("); ")[0])
    return shlex.split(command), dict(zip(book[1::3], book[2::3]))


@pytest.mark.parametrize(
    ("model", "machine", "settings"),
    [
        ("13b", "cpu", []), ("13b", "2xl4-24gb", []), ("ferret-7b", "a100-40gb", ["backend.kind=single", "device_batch=16"]),
        ("llava-7b", "8xa100-40gb", ["device_batch=16", "checkpoint_blocks=false"]), ("34b", "v4-8", []),
        ("13b", "8xa100-80gb", ["backend.strategy=ddp"]), ("13b", "2xa100-80gb", ["backend.kind=torch", "strategy=fsdp", "offload=false"]),
        ("clip-vit-l-14", "t4-16gb", ["device_batch=1792", "checkpoint_blocks=true"]),
    ],
)  # fmt: skip
def test_each_printed_change_makes_the_run_fit(model, machine, settings, capsys):
    stage = "pretrain" if model.startswith("clip") else "finetune"
    options = ["--model", model, "--stage", stage, *(["--set", *settings] if settings else [])]
    parsed = build_parser().parse_args(["plan", *options, "--machine", machine])
    run, where = run_of(parsed), named(machine)
    if "cpu" == machine:
        where = dataclasses.replace(where, memory=16 * 2**30, host_memory=16 * 2**30)
    with pytest.raises(TooLargeError):
        choose(run, where)
    lines = [line.strip().removeprefix("it fits with").strip() for line in for_machine(run, where).plan.message().splitlines() if "it fits with" in line]
    assert len(lines) == 3 and len({line.partition(":")[0] for line in lines}) == 3, lines
    book = nbformat.read(ROOT / "notebooks/03_finetune.ipynb", as_version=4)
    for line in lines:
        words, parameters = typed(line)
        assert words and parameters
        again = build_parser().parse_args(["plan", *options, *words])
        there = named(again.machine) if again.machine else where
        assert choose(run_of(again), there).plan.fits, line
        values = check(parameters, of_notebook(book, "03_finetune.ipynb"), "-p")
        there = machine_of(values.pop("machine", None)) if "machine" in values else where
        own = dict(pair.split("=") for pair in settings) | values.pop("settings", {})
        in_book = assemble({"model": model, "settings": own, **values}, stage, "-p")
        assert choose(in_book, there).plan.fits, line
    if machine != "cpu":
        assert main(["plan", *options, "--machine", machine]) == 0
        assert capsys.readouterr().out.count("it fits with") == 3


def test_what_leaves_the_numbers_alone_is_named_first():
    run = load("llava-7b", "finetune", {"device_batch": 16, "checkpoint_blocks": False})
    assert [change.what for change in changes_that_fit(run, named("8xa100-80gb"), most=2)] == ["smaller micro-batch", "recomputation"]
    lora = changes_that_fit(load("13b", "finetune"), named("a100-80gb"), most=1)[0]
    assert lora.what == "LoRA" and lora.settings["train.trainable"] == ["connector", "samplers"]


# ---------------------------------------------------------------- what is written


def test_job_files_hold_the_choice_for_their_target(tmp_path):
    run = load("13b", "finetune", {"root": "gs://bucket/runs"})
    slurm.prepare(run, slurm.SlurmConfig(nodes=1, tasks_per_node=8, device="a100-80gb"), tmp_path / "slurm")
    job = load_file(tmp_path / "slurm/config.yaml")
    assert job.resolved and (job.backend.kind, job.backend.strategy, job.devices, job.accumulation) == ("torch", "fsdp", 8, 8)
    slice_ = tpu.for_slice(run, tpu.TpuConfig(accelerator="v4-128"))
    assert slice_.resolved and (slice_.backend.kind, slice_.devices, slice_.backend.world) == ("xla", 64, 1)
    with pytest.raises(TooLargeError, match="it fits with"):
        slurm.prepare(run, slurm.SlurmConfig(nodes=1, tasks_per_node=1, device="t4-16gb"), tmp_path / "small")
    assert not (tmp_path / "small").exists()
    with pytest.raises(TooLargeError, match="taken for a100-40gb; name others by --machine, or --option device="):
        slurm.prepare(run, slurm.SlurmConfig(nodes=1, tasks_per_node=1), tmp_path / "small")
    with pytest.raises(ConfigError, match="no machine '1x8xa100-90gb'"):
        slurm.prepare(run, slurm.SlurmConfig(nodes=1, tasks_per_node=8, device="a100-90gb"), tmp_path / "small")


def auto_run(folder: Path, **settings):
    return tiny_run(folder, model=sourced(folder), precision="bf16", backend={"kind": "auto"}, **settings)


def test_config_yaml_keeps_auto_and_environment_json_what_was_chosen(tmp_path):
    tmp_path.joinpath("run").mkdir()
    run = auto_run(tmp_path / "run", checkpoint={"save_every": 2})
    result = launch(preflight(run).run)
    kept = load_file(f"{result.folder}/config.yaml")
    assert kept.backend == run.backend and kept.backend.kind == "auto" and not kept.chosen
    facts = json.loads(Path(result.folder, "environment.json").read_text())
    rows = {row["setting"]: row for row in facts["chosen"]}
    assert rows["backend.kind"]["value"] == "single" and rows["backend.kind"]["asked"] == "auto" and facts["accumulation"] == 2


def test_a_resume_on_a_machine_without_bf16_goes_on_with_the_same_batch_and_says_so(tmp_path, monkeypatch):
    tmp_path.joinpath("run").mkdir()
    launch(auto_run(tmp_path / "run", steps=2))
    here = named("cpu")
    other = dataclasses.replace(here, name="old", device="old CPU", peak={"fp32": 0.0, "fp16": 0.0}, named=False)
    monkeypatch.setattr("mmkit.launch.machine.found", lambda *_: other)
    longer = auto_run(tmp_path / "run", steps=4)
    result = launch(preflight(longer).run)
    assert (result.made, result.steps) == (2, 4)
    facts = json.loads(Path(result.folder, "environment.json").read_text())
    assert facts["precisions"] == [{"step": 0, "precision": "bf16"}, {"step": 2, "precision": "fp16"}]
    assert load_file(f"{result.folder}/config.yaml").train.precision == "bf16", "as it was asked for"


def test_the_precision_of_a_rewind_stays_where_a_machine_lacks_the_one_that_was_asked_for(tmp_path, monkeypatch):
    from mmkit.sharding.backend import create
    from mmkit.training import run_folder

    tmp_path.joinpath("run").mkdir()
    run = auto_run(tmp_path / "run")
    here, there = choose(run, named("a100-80gb")).run, choose(run, named("t4-16gb")).run
    assert (here.train.precision, there.train.precision) == ("bf16", "fp16")
    saved = {"guard": {"precision": "fp32"}, "asked_precision": asked(here).train.precision}
    monkeypatch.setattr(run_folder, "Checkpoint", lambda path: SimpleNamespace(state=saved))
    backend = create(changed(run, backend__kind="single").backend, "fp32")
    for each, wanted in ((here, "fp32"), (there, "fp32"), (changed(there, train__precision="tf32"), "tf32")):
        assert run_folder.precision_in_force(SimpleNamespace(run=each, backend=backend), "step-00000001") == wanted


def test_a_job_s_config_that_does_not_fit_names_changes_of_what_was_asked_for():
    job = choose(load("13b", "finetune"), named("8xa100-80gb")).run
    ways = changes_that_fit(job, named("2xl4-24gb"))
    assert [way.what for way in ways] == ["more devices", "GPUs", "a TPU slice"] and all(way.plan.fits for way in ways)


def test_workers_of_torchrun_choose_for_as_many_devices_as_there_are_workers(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    run = for_this_machine(load("tiny", "pretrain"))
    assert (run.backend.kind, run.backend.strategy, run.devices, run.train.device_batch) == ("torch", "ddp", 2, 8)
    assert for_this_machine(run) is run, "resolved by the launcher"
    spread = named("8xa100-80gb").for_workers(16)
    assert (spread.devices, spread.hosts, spread.devices_per_host) == (16, 2, 8) and named("v4-64").for_workers(8) == named("v4-64")


def test_training_in_place_of_an_open_run_says_what_chooses():
    from mmkit.training.loop import train

    with pytest.raises(ConfigError, match="no backend 'auto'.*chosen for the machine by `mmkit.launch.launch.launch`"):
        train(load("tiny", "pretrain"))


def test_a_machine_named_in_the_environment_that_is_elsewhere_is_not_trained_for(monkeypatch):
    monkeypatch.setenv("MMKIT_MACHINE", "v4-64")
    with pytest.raises(ConfigError, match="machine v4-64 is not here"):
        launch(load("tiny", "pretrain"))


def test_the_table_of_machines_counts_each_preset_once_and_takes_the_choice(monkeypatch):
    counted = []
    monkeypatch.setattr(overviews, "count", lambda run: counted.append(run.preset) or count(run))
    built = []
    monkeypatch.setattr(choosing, "count", lambda run: built.append(run.preset) or count(run))
    rows = {row["model"]: row for row in overviews.overview(["13b", "ferret-7b-lora", "clip-tiny"], "finetune", named("cpu"))}
    assert counted == ["13b", "ferret-7b-lora", "clip-tiny"] and built == []
    assert rows["13b"]["8xa100-80gb"] == "47.6 fsdp" and rows["13b"]["v4-128"].endswith(" xla") and rows["13b"]["t4-16gb"].startswith("no: ")
    assert rows["13b"]["96x4xa100-40gb"] == "no: batch"
    assert rows["clip-tiny"]["stage"] == "pretrain"


def test_a_plan_is_the_choice_s(capsys):
    plan = plan_of(load("13b", "finetune"), machine=named("8xa100-80gb"), samples=1000)
    assert plan.run.backend.strategy == "fsdp" and plan.fits and plan.steps == 2
    assert main(["plan", "--model", "13b", "--stage", "finetune", "--machine", "8xa100-80gb"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("backend: torch fsdp on 8 x A100 80GB") and "\nbatch:   8 a device" in shown and "8 of 8 devices" in shown
    assert main(["plan", "--model", "8b-debug", "--backend", "xla", "--machine", "8xa100-80gb"]) == 2
    assert "does not drive the A100 80GB" in capsys.readouterr().err
