"""SPMD on virtual devices: the mesh, cuts by rule, one program for all steps, precision, skips, late mode switches, clearing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmkit.config import BackendConfig, ConfigError
from mmkit.sharding import xla

ROOT = Path(__file__).resolve().parents[2]
PRELUDE = """
import torch
from torch import nn
from mmkit.config import BackendConfig, ConfigError, TrainConfig
from mmkit.sharding.backend import create

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.up, self.down = nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x, *, scale):
        return x + self.down(torch.relu(self.up(self.norm(self.conv(x[..., None])).squeeze(-1)))) * scale

class Objective(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(2)), "frozen": nn.Linear(8, 8)})
        self.model["frozen"].requires_grad_(False)
        self.model.register_buffer("idle", torch.arange(3.0))  # no step writes it
    def forward(self, x):
        x = self.model["frozen"](x)
        for block in self.model["blocks"]:
            x = block(x, scale=0.5)
        return x.float().square().sum()

RULES = ((r"up\\.weight$", ("fsdp", None)), (r"down\\.weight$", (None, "fsdp")), (r"conv\\.weight$", ("fsdp",)))

def prepared(devices=4, precision="fp32", accumulation=1, **more):
    backend = create(BackendConfig(kind="xla", xla_devices=devices, **more), precision)
    train = TrainConfig(precision=precision, checkpoint_blocks=True)
    factory = lambda named: torch.optim.AdamW(named.values(), lr=1e-2)
    return backend, backend.prepare(Objective(), factory, train=train, rules=RULES, blocks=("Block",), accumulation=accumulation)

def step(backend, model, i, factor=1.0, window=1):
    for part in range(window):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(i + part))
        loss = model(backend.shard({"x": x})["x"]) * backend.shard({"factor": torch.tensor(factor)})["factor"]
        backend.backward(loss / backend.sum_over_devices(64.0), last=part == window - 1)
    backend.set_learning_rates([0.01 * (i % 3) / 2])  # 0 among them, as at the start of a warm-up
    return float(backend.update(1.0))
"""


def run(code, devices=4, **variables):
    env = {name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_USE_SPMD")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **variables}
    done = subprocess.run([sys.executable, "-c", PRELUDE + code], env=env, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


TRAIN = """
import sys
devices = int(sys.argv[1]) if len(sys.argv) > 1 else {devices}
backend, model = prepared(devices, fsdp_axis={axis})
names = (("blocks.0.up.weight", 16), ("blocks.0.up.base_layer.weight", 16), ("a.up.weight", 15))
print("axes", *(backend.axes(name, (rows, 8)) for name, rows in names))
print("cut", model.model["blocks"][0].up.weight.device, backend._library._XLAC._get_xla_sharding_spec(model.model["blocks"][0].up.weight))
count = backend.compiles()
print("idle", dict(backend.full_parameters())["idle"].tolist(), backend.compiles() - count)
norms = [step(backend, model, 0), step(backend, model, 1)]
count = backend.compiles()
norms += [step(backend, model, i) for i in range(2, 6)]
print("norms", *(f"{{n:.6f}}" for n in norms))
print("new programs", backend.compiles() - count)
before = {{name: entry for name, entry in backend.export_state()}}
count = backend.compiles()
step(backend, model, 6, float("nan"))
print("skipped", bool(backend.skipped), int(backend.n_skipped), backend.extra_state()["optimizer_step"], backend.compiles() - count)
print("unchanged", all(torch.equal(t, before[name][key]) for name, entry in backend.export_state() for key, t in entry.items()))
print("reached", sum(backend.reached.values()), len(backend.reached))
state = backend.rng_state()
print("rng", sorted(state))
backend.set_rng_state(state)
"""


@pytest.mark.slow
def test_two_and_four_devices_give_the_norms_of_one_process_and_compile_nothing_after_the_second_step():
    alone = PRELUDE.replace('kind="xla", xla_devices=devices', 'kind="single"') + (
        "backend, model = prepared()\nprint('norms', *(f'{step(backend, model, i):.6f}' for i in range(6)))"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    reference = subprocess.run([sys.executable, "-c", alone], env=env, capture_output=True, text=True, check=True).stdout
    wanted = [float(n) for n in reference.split()[1:]]
    for devices, axis in ((2, 1), (4, 2)):
        out = dict(line.split(" ", 1) for line in run(TRAIN.format(devices=devices, axis=axis)).splitlines() if " " in line)
        assert [float(n) for n in out["norms"].split()] == pytest.approx(wanted, rel=1e-5)
        assert out["new"] == "programs 0" and out["idle"] == "[0.0, 1.0, 2.0] 0"  # reading whole tensors compiles nothing
        assert out["skipped"] == "True 1 6 0" and out["unchanged"] == "True" and out["reached"] == "16 16"
        assert out["axes"] == "('fsdp', None) ('fsdp', None) " + ("('fsdp', None)" if axis == 1 else "(None, None)")
        assert out["rng"] == "['cpu', 'xla']"
        assert ("devices=" in out["cut"]) == (axis > 1)  # really cut over the axis


@pytest.mark.slow
def test_windows_of_any_length_share_programs_and_bf16_passes_convolution_with_norm():
    out = run(
        "backend, model = prepared(2, 'bf16', accumulation=3)\n"
        "norms = [step(backend, model, i, window=3) for i in range(2)]\n"
        "count = backend.compiles()\n"
        "norms += [step(backend, model, 2, window=2), step(backend, model, 3, window=3)]\n"
        "assert all(0 < n < 100 for n in norms), norms\n"
        "print('new programs', backend.compiles() - count)\n"
        "import gc\n"
        "live = lambda: sum(issubclass(type(x), torch.Tensor) and x.device.type == 'xla' for x in gc.get_objects())\n"
        "plain, before = backend.plain, live()\n"
        "backend.clear()\n"
        "print('live', before, live())\n"
        "print('on', {p.device.type for p in plain.parameters()}, backend.optimizer)\n"
        "for keep in (True, False):\n"
        "    again, model = prepared(2)\n"
        "    begun = again.compiles()\n"
        "    assert step(again, model, 0) > 0\n"
        "    print('needed', again.compiles() - begun)\n"
        "    again.clear(keep_programs=keep)\n"
        "last, model = prepared(2)\n"
        "begun = last.compiles()\n"
        "step(last, model, 0)\n"
        "print('needed', last.compiles() - begun)"
    )
    before, after = map(int, out.split("live ")[1].split()[:2])
    assert before > 60 and after < 5  # scalars are left: no weight, moment or gradient
    assert "new programs 0" in out and "on {'cpu'} None" in out
    first, kept, dropped = (int(line.split()[1]) for line in out.splitlines() if line.startswith("needed"))
    assert kept == 0 < first == dropped


def test_late_mode_switches_are_clear_errors():
    out = run(
        "import os, torch_xla\n"
        "x = torch.ones(2).to('xla')\n"
        "try: create(BackendConfig(kind='xla'), 'fp32')\n"
        "except ConfigError as error: print('outside:', error)\n"
        "try: create(BackendConfig(kind='xla', xla_devices=4), 'fp32')\n"
        "except ConfigError as error: print('late:', error)\n",
        PJRT_DEVICE="CPU",
    )
    assert "outside: this process has used an XLA device outside SPMD; restart the kernel" in out
    assert "late: torch_xla is already loaded in this process with CPU_NUM_DEVICES=None, the run wants 4 virtual devices; restart" in out


def test_mesh_axes_divide_the_devices():
    assert xla.mesh_shape(8, BackendConfig(kind="xla")) == (1, 8)
    assert xla.mesh_shape(8, BackendConfig(kind="xla", fsdp_axis=2)) == (4, 2)
    with pytest.raises(ConfigError, match="backend.fsdp_axis = 3 does not divide the 8 devices"):
        xla.mesh_shape(8, BackendConfig(kind="xla", fsdp_axis=3))


def test_children_get_the_runtime_variables_of_virtual_devices_only_when_asked(monkeypatch):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    assert xla.runtime_variables(4) == {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4", "USE_TORCH_XLA": "1"}
    assert xla.runtime_variables(None) == {"USE_TORCH_XLA": "1"}
    monkeypatch.setenv("PJRT_DEVICE", "TPU")  # as the command of a pod does: 16 chips are no reason to compute on the CPU
    assert xla.runtime_variables(16) == {"USE_TORCH_XLA": "1"}


def test_fp16_is_refused():
    with pytest.raises(ConfigError, match="fp16' does not exist on backend xla; use bf16"):
        xla.XlaBackend(BackendConfig(kind="xla", xla_devices=2), "fp16")
