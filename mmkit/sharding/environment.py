"""Who am I among how many processes: the variables of torchrun, SLURM, an MPI launcher or a TPU pod, or one
process alone.

`process_environment` is a pure function of the variables; `init_distributed` connects the processes and names those missing.
"""

from __future__ import annotations

import datetime
import logging
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from mmkit.config import ConfigError, RunConfig

log = logging.getLogger(__name__)
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_NODELIST", "SLURM_JOB_ID")
# launcher -> its rank, rank on this machine, all processes, processes on this machine. Open MPI:
# docs.open-mpi.org, "Environment variables that Open MPI sets in the run-time environment"; MVAPICH: its user
# guide; Hydra is the launcher of MPICH and Intel MPI.
MPI = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MVAPICH": (
        "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    "Hydra": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),
}  # fmt: skip
TPU_POD = ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES")
GRACE = 3.0  # seconds the process that holds the store outlives its own timeout
TPU_PORT = 8479  # any fixed port that libtpu (8471, 8476) does not use


@dataclass(frozen=True)
class ProcessEnvironment:
    """One process's place: its rank, its rank on this machine, all processes, where rank 0 listens, who said so."""

    rank: int
    local_rank: int
    world: int
    address: str
    port: int
    source: str

    def variables(self) -> dict[str, str]:
        """The same facts as torchrun's five variables, for libraries that read those."""
        return dict(zip(TORCHRUN, map(str, (self.rank, self.local_rank, self.world, self.address, self.port)), strict=True))


def started_by(env: Mapping[str, str]) -> tuple[str, int]:
    """(who started this process, how many it started): ``torchrun``, ``SLURM`` (a step of srun), a name of
    `MPI`, else ``""`` and 1.

    Torchrun's count is 0 where WORLD_SIZE is missing beside RANK, and 1 without a RANK: a kernel or a library left the
    others behind; so is an MPI's without its size. A batch script is no step of srun: it has SLURM_PROCID and
    SLURM_NTASKS, but its tasks are not started yet.
    """
    env = {name: value.strip() for name, value in env.items() if value.strip()}
    if any(name in env for name in TORCHRUN[:3]):
        own = env.get("RANK")
        return "torchrun", _number(env, "WORLD_SIZE", 0) if own else 1
    tasks = _number(env, "SLURM_STEP_NUM_TASKS", 1) if "SLURM_PROCID" in env else 1
    for launcher, (place, _, size, _) in MPI.items():
        if place not in env and size not in env:
            continue
        # srun speaks Hydra's protocol too (--mpi=pmi2) and then says the same twice; where the two differ,
        # the step is that of an mpirun's daemons, one on each host
        same = (env.get(place), env.get(size)) == (env.get("SLURM_PROCID"), env.get("SLURM_STEP_NUM_TASKS"))
        if not same and _number(env, size, 0) != 1:
            return launcher, _number(env, size, 0)
    return ("SLURM", tasks) if tasks != 1 else ("", 1)


def started_here(env: Mapping[str, str]) -> int:
    """How many processes the launcher started on this machine; 0 where it does not say."""
    names = ("LOCAL_WORLD_SIZE", *(here for *_, here in MPI.values()))
    return next((_number(env, name) for name in names if env.get(name, "").strip()), 0)


def process_environment(env: Mapping[str, str]) -> ProcessEnvironment:
    """The place that ``env`` describes. Torchrun's variables win over an MPI's and SLURM's, those over a TPU
    pod's.

    MASTER_ADDR and MASTER_PORT alone override what SLURM's variables give, and must be set beside an MPI's,
    which name no address. An empty variable counts as unset. ConfigError names the missing variables where a
    set is incomplete, and the variable that is not a number.
    """
    env = {name: value for name, value in env.items() if value.strip()}
    by, _ = started_by(env)
    if by:
        if by in MPI:
            return _from_mpi(env, by)
        return _from_torchrun(env) if by == "torchrun" else _from_slurm(env)
    several_hosts = "," in env.get("TPU_WORKER_HOSTNAMES", "")
    if several_hosts:
        return _from_tpu_pod(env)
    address = env.get("MASTER_ADDR", "127.0.0.1")
    return ProcessEnvironment(0, 0, 1, address, _number(env, "MASTER_PORT", 0) or free_port(), "one process")


def _from_torchrun(env: Mapping[str, str]) -> ProcessEnvironment:
    _require(env, TORCHRUN, "start with torchrun, set all of them, or unset them for one process")
    rank, local_rank, world = (_number(env, name) for name in TORCHRUN[:3])
    return _checked(ProcessEnvironment(rank, local_rank, world, env["MASTER_ADDR"], _number(env, "MASTER_PORT"), "torchrun"))


def _from_mpi(env: Mapping[str, str], launcher: str) -> ProcessEnvironment:
    names = (*MPI[launcher][:3], "MASTER_ADDR", "MASTER_PORT")
    with_it = "`mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500`"
    told = with_it if launcher == "Open MPI" else "MASTER_ADDR=HOST and MASTER_PORT=29500"
    others = f"with torchrun or with srun; unset {names[2]} for one process"
    _require(env, names, f"start with {told} (HOST: that of rank 0), {others}")
    rank, local_rank, world = (_number(env, name) for name in names[:3])
    address, port = env["MASTER_ADDR"], _number(env, "MASTER_PORT")
    return _checked(ProcessEnvironment(rank, local_rank, world, address, port, launcher))


def _from_slurm(env: Mapping[str, str]) -> ProcessEnvironment:
    _require(env, SLURM, "start with srun, or unset SLURM_PROCID for one process")
    rank, world = _number(env, "SLURM_PROCID"), _number(env, "SLURM_STEP_NUM_TASKS")
    hosts = expand_hosts(env["SLURM_JOB_NODELIST"])
    local_rank = _number(env, "SLURM_LOCALID", rank % max(world // len(hosts), 1))
    port = _number(env, "MASTER_PORT", 20000 + _number(env, "SLURM_JOB_ID") % 20000)
    return _checked(ProcessEnvironment(rank, local_rank, world, env.get("MASTER_ADDR", hosts[0]), port, "SLURM"))


def _from_tpu_pod(env: Mapping[str, str]) -> ProcessEnvironment:
    _require(env, TPU_POD, "they come with a TPU VM; unset TPU_WORKER_HOSTNAMES for one host")
    hosts = env["TPU_WORKER_HOSTNAMES"].split(",")
    port = _number(env, "MASTER_PORT", TPU_PORT)
    return _checked(ProcessEnvironment(_number(env, "TPU_WORKER_ID"), 0, len(hosts), env.get("MASTER_ADDR", hosts[0]), port, "TPU pod"))


def _require(env: Mapping[str, str], names: tuple[str, ...], hint: str) -> None:
    if missing := [name for name in names if name not in env]:
        present = [name for name in names if name in env]
        raise ConfigError(f"environment has {', '.join(present)} but not {', '.join(missing)}; {hint}")


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"environment variable {name}={text!r} is not a whole number") from None


def _checked(place: ProcessEnvironment) -> ProcessEnvironment:
    inside = 0 <= place.rank < place.world
    if not inside:
        raise ConfigError(f"rank {place.rank} from {place.source} is not below the {place.world} processes it gives")
    return place


def expand_hosts(text: str) -> list[str]:
    """``gpu[03-05,11],login`` -> gpu03, gpu04, gpu05, gpu11, login: SLURM's short form written out, zeros kept.

    ConfigError for a list without a host and for one that is not of this form.
    """
    try:
        hosts = [host for part in re.split(r",(?![^\[]*\])", text.strip()) for host in _expand(part.strip()) if host]
    except ValueError as error:
        raise ConfigError(f"SLURM_JOB_NODELIST={text!r}: {error}; write hosts as gpu[03-05,11],login") from None
    if not hosts:
        raise ConfigError(f"SLURM_JOB_NODELIST={text!r} names no host")
    return hosts


def _expand(part: str) -> list[str]:
    """The hosts of one part; ValueError says what is wrong with it."""
    match = re.match(r"([^\[]*)\[([^\]]*)\](.*)$", part)
    if not match and set("[]") & set(part):
        raise ValueError(f"{part!r} has a bracket without its other half")
    if not match:
        return [part]
    before, ranges, after = match.groups()
    numbers = []
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        span = re.fullmatch(r"\d+(-\d+)?", item.strip()) and range(int(first), int(last or first) + 1)
        if not span:
            raise ValueError(f"{item!r} is no number and no range of numbers")
        numbers += [str(n).zfill(len(first.strip())) for n in span]
    return [before + number + rest for number in numbers for rest in _expand(after)]


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def check_devices(run: RunConfig, devices: int) -> None:
    """ConfigError where another number of ``devices`` shares a step than the batch was divided by: a step would have other samples."""
    found = max(devices, started_by(os.environ)[1])  # a backend of one process does not ask how many were started
    if found != run.devices:
        raise ConfigError(
            f"global_batch {run.train.global_batch} = device_batch {run.train.device_batch} x accumulation {run.accumulation} x {run.devices} "
            f"devices by the settings of backend {run.backend.kind}, but {found} devices share a step here; "
            "give the number of devices in the settings of backend, or start as many"
        )


# ---------------------------------------------------------------- connecting


def init_distributed(transport: str = "gloo", timeout: float = 600.0) -> ProcessEnvironment:
    """Connect this process to the others and return its place; a second call returns the same place.

    gloo carries host tensors and Python objects, NCCL those of CUDA devices. Processes that do not show up within ``timeout``
    seconds are named in a ConfigError; so is a port that is taken.
    """
    place = process_environment(os.environ)
    if dist.is_initialized():
        return place
    os.environ.update(place.variables())
    log.info("process %d of %d (local %d) from %s, rank 0 at %s:%d", place.rank, place.world, place.local_rank, place.source,
             place.address, place.port)
    dist.init_process_group(
        transport,
        store=_meet(place, timeout),
        rank=place.rank,
        world_size=place.world,
        timeout=datetime.timedelta(seconds=timeout),
    )
    return place


def _meet(place: ProcessEnvironment, timeout: float) -> dist.Store:
    """The store all processes have signed; those that have not after ``timeout`` seconds are named."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun itself listens on the port
    wait = datetime.timedelta(seconds=timeout)
    server = place.rank == 0 and not agent
    try:
        store = dist.TCPStore(place.address, place.port, place.world, server, timeout=wait, wait_for_workers=False)
    except dist.DistNetworkError as error:
        taken = "in use" in str(error)
        what = "is taken; set MASTER_PORT" if taken else f"does not answer within {timeout:.0f} s: rank 0 is missing there"
        raise ConfigError(f"rank {place.rank}: {place.address}:{place.port} {what} (from {place.source})") from error
    store = dist.PrefixStore(f"mmkit/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    store.set(f"here/{place.rank}", "1")
    missing, deadline = list(range(place.world)), time.monotonic() + timeout
    while missing := [rank for rank in missing if not store.check([f"here/{rank}"])]:
        if time.monotonic() > deadline:
            time.sleep(GRACE if server else 0)  # the others ask this process who is missing
            raise ConfigError(
                f"rank {place.rank}: after {timeout:.0f} s ranks {missing} of {place.world} have not come to {place.address}:{place.port}"
            )
        time.sleep(0.1)
    return store
