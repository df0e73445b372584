"""A machine is named or found by looking; what is looked at is simulated: a driver's tool, variables, files."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading

import pytest

from mmkit import cli
from mmkit.config import ConfigError, load
from mmkit.launch import machine as machines
from mmkit.launch.machine import GIB, MIB, found, host_memory, machine_of, matmul_rate, named, this_cpu
from mmkit.launch.overview import MACHINES, overview
from mmkit.launch.preflight import plan_of, preflight

A100 = "NVIDIA A100-SXM4-80GB, 81920, GPU-{}, Disabled, 8.0"
LISTED = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-0)
  MIG 3g.40gb     Device  0: (UUID: MIG-a)
  MIG 1g.10gb     Device  1: (UUID: MIG-b)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-1)
"""


@pytest.fixture
def driver(tmp_path):
    """A maker of variables under which a tool named nvidia-smi prints rows, or fails."""

    def make(*rows: str, listed: str = "", fails: int = 0, lacks_field: bool = False, **env: str) -> dict[str, str]:
        (tmp_path / "rows").write_text("".join(f"{row}\n" for row in rows))
        (tmp_path / "listed").write_text(listed)
        tool = tmp_path / "nvidia-smi"
        old = 'case "$1" in *compute_cap*) echo \'Field "compute_cap" is not a valid field to query.\'; exit 2;; esac\n'
        body = f'if [ "$1" = -L ]; then cat {tmp_path}/listed; else cat {tmp_path}/rows; fi\nexit {fails}\n'
        tool.write_text(f"#!/bin/sh\n{old * lacks_field}{body}")
        tool.chmod(0o755)
        return {"PATH": f"{tmp_path}:/usr/bin:/bin", **env}

    return make


# ---------------------------------------------------------------- by name


@pytest.mark.parametrize(
    ("name", "kind", "devices", "hosts", "canonical"),
    [
        ("8xa100-80gb", "cuda", 8, 1, "8xa100-80gb"),
        ("2x8xh100-80gb", "cuda", 16, 2, "2x8xh100-80gb"),
        ("96x4xa100-40gb", "cuda", 384, 96, "96x4xa100-40gb"),
        ("L4", "cuda", 1, 1, "l4-24gb"),
        ("4xRTX4090", "cuda", 4, 1, "4xrtx-4090"),
        ("1x8xb200", "cuda", 8, 1, "8xb200-180gb"),
        ("v4-64", "tpu", 32, 8, "v4-64"),
        ("v4-8", "tpu", 4, 1, "v4-8"),
        ("v5e-256", "tpu", 256, 64, "v5e-256"),
        ("v5litepod-16", "tpu", 16, 4, "v5e-16"),
        ("v5p-384", "tpu", 192, 48, "v5p-384"),
        ("v6e-8", "tpu", 8, 1, "v6e-8"),
        ("cpu", "cpu", 1, 1, "cpu"),
    ],
)
def test_a_name_says_kind_devices_and_hosts(name, kind, devices, hosts, canonical):
    machine = named(name)
    assert (machine.kind, machine.devices, machine.hosts, machine.name) == (kind, devices, hosts, canonical)
    assert machine.named and machine.devices_per_host * hosts == devices and machine.memory > 0 and machine.host_memory > 0


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a100", "did you mean 'a100-40gb' or 'a100-80gb'"),
        ("8xh100-90gb", "did you mean 'h100-80gb'"),
        ("tpu-v4", "did you mean 'v4'"),
        ("gpus", "did you mean 'cpu'"),
        ("v4-63", "v4 has no slice of 63 cores; it has 8, 16, 32, 64, and multiples of 128 up to 4096"),
        ("v4-4", "v4 has no slice of 4 cores"),
        ("v5litepod-2", "v5e has no slice of 2 chips; it has 1, 4, 8, 16, 32, 64, 128, 256"),
        ("v4", "does not say how many"),
        ("0xl4", "does not say how many"),
        ("64xa100-80gb", "write hosts x devices of each, as 8x8xa100-80gb"),
        ("2x2x2xl4", "machines are DEVICE, NxDEVICE or HOSTSxNxDEVICE of"),
    ],
)
def test_an_unknown_name_and_a_size_there_is_not_are_refused_with_what_there_is(name, told):
    with pytest.raises(ConfigError, match=told):
        named(name)


def test_what_a_device_does_not_compute_in_has_no_rate_and_no_time():
    assert "bf16" not in named("t4").peak and "fp16" in named("t4").peak and "fp16" not in named("v4-8").peak
    plan = plan_of(load("8b-debug", "finetune", {"precision": "bf16"}), machine=named("t4"), samples=100)
    assert "T4 16GB does not compute in bf16" in str(plan) and "not known" in str(plan)


# ---------------------------------------------------------------- NVIDIA GPUs


def test_gpus_of_the_table_are_recognised_and_others_kept_as_they_are(driver):
    eight = found(driver(*map(A100.format, range(8))))
    assert (eight.name, eight.device, eight.devices, eight.memory) == ("8xa100-80gb", "A100 80GB", 8, 80 * GIB)
    assert eight.peak == named("8xa100-80gb").peak and eight.calibrated and not eight.named
    assert eight.host_memory == host_memory({}) and eight.cores == this_cpu({}).cores
    for row, name in (
        ("NVIDIA GeForce RTX 4090, 24564, GPU-x, [N/A], 8.9", "rtx-4090"),
        ("Tesla T4, 15360, GPU-x, [N/A], 7.5", "t4-16gb"),
        ("NVIDIA L40S, 46068, GPU-x, [N/A], 8.9", "l40s-48gb"),
        ("NVIDIA H100 80GB HBM3, 81559, GPU-x, Disabled, 9.0", "h100-80gb"),
    ):
        assert found(driver(row)).name == name
    pcie, a6000 = (found(driver(f"NVIDIA {row}")) for row in ("H100 PCIe, 81559, GPU-x, Disabled, 9.0", "RTX A6000, 49140, GPU-x, [N/A], 8.6"))
    assert (pcie.name, a6000.name, a6000.memory) == ("NVIDIA H100 PCIe", "NVIDIA RTX A6000", 49140 * MIB)
    assert set(a6000.peak.values()) == {0.0} and a6000.measured, "how fast is measured"
    volta = found(driver("Tesla V100-SXM2-32GB, 32768, GPU-x, [N/A], 7.0"))
    assert "bf16" not in volta.peak and "fp16" in volta.peak


def test_a_driver_s_tool_without_newer_fields_is_asked_for_the_others(driver):
    assert found(driver("Tesla T4, 15360, GPU-x, [N/A]", lacks_field=True)).name == "t4-16gb"


def test_different_gpus_are_as_good_as_the_weakest_and_it_is_said(driver, caplog):
    mixed = found(driver(A100.format(0), "Tesla T4, 15360, GPU-x, [N/A], 7.5"))
    assert mixed.devices == 2 and mixed.memory == 15360 * MIB and "bf16" not in mixed.peak
    assert mixed.name == "2 x A100 80GB and T4 16GB" and "the weakest decides" in caplog.text


@pytest.mark.parametrize(
    ("asked", "devices"),
    [("0,2", 2), ("3", 1), ("", 0), ("-1", 0), ("GPU-1", 1), ("GPU-1,GPU-2", 2), ("0,9,1", 1), ("1,1", 1), ("NoDevFiles", 0)],
)
def test_cuda_visible_devices_is_read_as_cuda_does(driver, asked, devices):
    machine = found(driver(*map(A100.format, range(4)), CUDA_VISIBLE_DEVICES=asked))
    assert (machine.kind, machine.devices) == (("cuda", devices) if devices else ("cpu", 1))


@pytest.mark.parametrize(
    ("asked", "name", "memory"),
    [
        (None, "A100 80GB 3g.40gb", 40 * 10**9),
        ("MIG-b", "A100 80GB 1g.10gb", 10 * 10**9),
        ("0", "A100 80GB 3g.40gb", 40 * 10**9),
        ("1", "a100-80gb", 80 * GIB),
    ],
)
def test_of_a_gpu_that_is_cut_up_one_instance_is_used(driver, asked, name, memory):
    rows = (A100.format(0).replace("Disabled", "Enabled"), A100.format(1))
    env = {} if asked is None else {"CUDA_VISIBLE_DEVICES": asked}
    machine = found(driver(*rows, listed=LISTED, **env))
    assert (machine.name, machine.devices, machine.memory) == (name, 1, memory)
    if "1g" in name:
        assert machine.peak["bf16"] == pytest.approx(312e12 / 7)


def test_a_broken_driver_is_said_and_no_gpus_is_no_fault(driver, caplog, monkeypatch):
    message = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    broken = driver(message, fails=9)
    assert found(broken).kind == "cpu" and message in caplog.text
    monkeypatch.setenv("PATH", broken["PATH"])
    from mmkit.doctor import examine

    [finding] = [finding for finding in examine().findings if finding.what == "NVIDIA GPUs"]
    assert finding.state == "FAULT" and message in finding.found
    caplog.clear()
    for fails in (0, 6):
        assert found(driver("No devices were found", fails=fails)).kind == "cpu" and not caplog.text
    left = found(driver("NVIDIA GB10, [N/A], GPU-x, [N/A], 12.1", A100.format(1)))
    assert left.name == "a100-80gb" and "does not tell the memory of NVIDIA GB10" in caplog.text


def test_slurm_says_how_many_hosts_and_its_tasks_may_see_one_gpu_each(driver):
    four = [A100.replace("80GB, 81920", "40GB, 40960").format(k) for k in range(4)]
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "96", "SLURM_NNODES": "96", "SLURM_GPUS_ON_NODE": "4", "SLURM_PROCID": "0"}
    assert found(driver(*four, **job)).name == "96x4xa100-40gb"
    step = job | {"SLURM_STEP_NUM_NODES": "96", "SLURM_STEP_NUM_TASKS": "384", "CUDA_VISIBLE_DEVICES": "0"}
    machine = found(driver(*four, **step))
    assert (machine.name, machine.devices, machine.devices_per_host) == ("96x4xa100-40gb", 384, 4)
    alone = found(driver(*four, CUDA_VISIBLE_DEVICES="0", SLURM_JOB_ID="7", SLURM_JOB_NUM_NODES="1", SLURM_GPUS_ON_NODE="4"))
    assert alone.name == "a100-40gb", "hidden by hand, not by a task's binding"


# ---------------------------------------------------------------- TPUs


def pci(root, *kinds: str, vendor: str = "0x1ae0"):
    """Files of a PCI bus with devices of these kinds."""
    for k, kind in enumerate(kinds):
        folder = root / f"sys/bus/pci/devices/0000:00:0{k}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{kind}\n")
    return root


def test_a_tpu_is_known_by_its_variables_its_metadata_or_its_chips(tmp_path, monkeypatch):
    assert found({"TPU_ACCELERATOR_TYPE": "v4-64", "TPU_WORKER_ID": "3"}, tmp_path).name == "v4-64"
    four, asked = pci(tmp_path, *["0x0063"] * 4), []

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers["Metadata-Flavor"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"v5litepod-16\n")

        def log_message(self, *words):
            """Says nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(machines, "METADATA", f"http://127.0.0.1:{server.server_port}")
        slice_ = found({}, four)
        server.shutdown()
    assert (slice_.name, slice_.devices, slice_.hosts, slice_.named) == ("v5e-16", 16, 4, False)
    assert asked == [("/accelerator-type", "Google")]
    by_chips = found({"TPU_WORKER_HOSTNAMES": "a,b"}, four)
    assert (by_chips.kind, by_chips.devices, by_chips.hosts, by_chips.memory) == ("tpu", 8, 2, 16 * GIB)


def test_part_of_a_tpu_and_another_device_of_its_host(tmp_path, caplog):
    v6e = {"TPU_ACCELERATOR_TYPE": "v6e-8"}
    assert (found(v6e | {"TPU_VISIBLE_CHIPS": "0,1"}, tmp_path).devices, found(v6e, tmp_path).devices) == (2, 8)
    one = found({"TPU_ACCELERATOR_TYPE": "v4-64", "TPU_PROCESS_BOUNDS": "1,1,1"}, tmp_path)
    assert (one.name, one.devices, one.hosts) == ("4 of v4-64", 4, 1)
    assert found(v6e | {"PJRT_DEVICE": "CPU"}, tmp_path).kind == "cpu"
    with pytest.raises(ConfigError, match="MMKIT_MACHINE"):
        found({"TPU_ACCELERATOR_TYPE": "v3-8"}, tmp_path)
    assert found({}, pci(tmp_path, "0x1572", vendor="0x8086")).kind == "cpu"


def test_a_tpu_that_is_only_asked_for_is_not_believed(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(machines, "METADATA", "http://127.0.0.1:9")
    assert found({"PJRT_DEVICE": "TPU"}, tmp_path).kind == "cpu" and "has no TPU chip" in caplog.text


# ---------------------------------------------------------------- limits of a host


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_control_groups_hold_also_those_of_groups_above(tmp_path, version):
    names = {1: ("5:memory:{0}\n6:cpu,cpuacct:{0}\n", "memory", "cpu"), 2: ("0::{0}\n", ".", ".")}[version]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(names[0].format("/job_7/step_0"))
    memory, cpu = (tmp_path / "sys/fs/cgroup" / name for name in names[1:])
    for folder in (memory, cpu):
        (folder / "job_7/step_0").mkdir(parents=True, exist_ok=True)
    if version == 2:
        (memory / "job_7/memory.max").write_text(f"{2 * GIB}\n")
        (memory / "job_7/step_0/memory.max").write_text("max\n")
        (cpu / "job_7/cpu.max").write_text("100000 100000\n")
        (cpu / "job_7/step_0/cpu.max").write_text("max 100000\n")
    else:
        (memory / "job_7/memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
        (memory / "job_7/step_0/memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
        (cpu / "job_7/cpu.cfs_quota_us").write_text("100000\n")
        (cpu / "job_7/cpu.cfs_period_us").write_text("100000\n")
        (cpu / "job_7/step_0/cpu.cfs_quota_us").write_text("-1\n")
        (cpu / "job_7/step_0/cpu.cfs_period_us").write_text("100000\n")
    machine = found({"PATH": ""}, tmp_path)
    assert (machine.memory, machine.host_memory, machine.cores, machine.device) == (2 * GIB, 2 * GIB, 1, "1 CPU core")


def test_the_memory_that_slurm_grants_is_a_limit(tmp_path):
    job = {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "2"}
    assert host_memory(job | {"SLURM_MEM_PER_NODE": "1024"}, tmp_path) == GIB
    assert host_memory(job | {"SLURM_MEM_PER_CPU": "1024"}, tmp_path) == 2 * GIB
    assert host_memory(job | {"SLURM_MEM_PER_NODE": "0"}, tmp_path) == host_memory({}, tmp_path)


def test_looking_starts_nothing_and_a_product_is_tried_in_a_process_of_its_own():
    code = (
        "import sys; from mmkit.launch.machine import found; machine = found(); torch = sys.modules.get('torch'); "
        "print(machine.kind, bool(torch and torch.cuda.is_initialized()), 'torch_xla' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1:] == ["False", "False"]
    assert 1e7 < matmul_rate.__wrapped__("fp32", seconds=0.05) < 1e15


# ---------------------------------------------------------------- what a named machine is for


def test_a_machine_given_by_name_is_planned_for_and_does_not_train_here(monkeypatch):
    run = load("8b-debug", "finetune", {"start_from": "source"})
    with pytest.raises(ConfigError, match="machine 8xa100-80gb is not here: this is .* CPU core"):
        preflight(run, named("8xa100-80gb"))
    dry = preflight(load("8b-debug", "finetune", {"dry_run": True}), named("v4-64"))
    assert dry.plan.machine.name == "v4-64" and dry.shapes
    assert preflight(run, named("cpu")).plan.fits, "this computer by its name"
    monkeypatch.setenv("MMKIT_MACHINE", "v4-65")
    with pytest.raises(ConfigError, match="65 cores.*MMKIT_MACHINE"):
        machine_of()
    monkeypatch.setenv("MMKIT_MACHINE", "v4-64")
    with pytest.raises(ConfigError, match="machine v4-64 is not here"):
        preflight(run)
    assert machine_of("l4").name == "l4-24gb" and plan_of(run).machine.name == "v4-64"


def test_some_of_the_gpus_that_are_here_may_be_named_and_no_more(driver, monkeypatch):
    for name, value in driver(*map(A100.format, range(4))).items():
        monkeypatch.setenv(name, value)
    for good in ("4xa100-80gb", "a100-80gb"):
        machines.check_is_here(named(good))
    for other in ("8xa100-80gb", "4xa100-40gb", "2x4xa100-80gb", "cpu", "v4-8"):
        with pytest.raises(ConfigError, match="this is 4xa100-80gb"):
            machines.check_is_here(named(other))


def test_a_job_is_asked_for_as_the_machine_is_named(capsys, monkeypatch):
    base = ["launch", "--model", "clip-vit-l-14-debug", "--stage", "pretrain", "--show", "--backend", "ddp"]
    assert cli.main([*base, "--slurm", "--machine", "2x8xh100-80gb", "--set", "global_batch=256", "device_batch=16"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=2" in script and "--ntasks-per-node=8" in script and "--gres=gpu:8" in script
    tpu = ["launch", "--model", "8b-debug", "--stage", "pretrain", "--backend", "xla", "--tpu", "--show", "--run-dir", "gs://b/r"]
    monkeypatch.setenv("MMKIT_MACHINE", "v5e-4")
    assert cli.main([*tpu, "--set", "global_batch=64", "device_batch=1"]) == 0
    assert "--accelerator-type=v5litepod-4" in capsys.readouterr().out
    assert cli.main([*base, "--slurm"]) == 2 and "machine v5e-4 is a TPU slice" in capsys.readouterr().err
    assert cli.main([*base, "--slurm", "--machine", "8xl4", "--option", "nodes=2"]) == 2
    assert "--option nodes=2, but machine 8xl4-24gb has nodes 1" in capsys.readouterr().err


def test_the_command_line_names_a_machine_and_says_what_is_wrong_with_it(capsys):
    assert cli.main(["plan", "--model", "8b-debug", "--machine", "8xa100-80gb"]) == 0
    assert "8 x A100 80GB" in capsys.readouterr().out
    for command in ("plan", "train"):
        assert cli.main([command, "--model", "8b-debug", "--machine", "v4-5"]) == 2
        assert "v4 has no slice of 5 cores" in capsys.readouterr().err


def test_the_table_has_a_row_a_preset_and_a_column_a_machine(capsys):
    small, large, clip = overview(["8b-debug", "llava-7b", "clip-vit-l-14"])
    assert {"model", "stage", "parameters", "trainable", "here", *MACHINES} == set(large)
    assert (small["stage"], clip["stage"]) == ("finetune", "pretrain (it has no finetune)")
    assert large["parameters"] == "7.05 B" and clip["trainable"] == clip["parameters"] == "0.428 B"
    assert large["here"].startswith("no") and not small["here"].startswith("no") and not large["v4-512"].startswith("no")
    assert cli.main(["plan", "--all", "--model", "tiny", "--machine", "v4-8"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("tiny", "here", *MACHINES))
