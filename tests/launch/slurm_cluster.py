"""A real SLURM of two nodes on loopback: one controller and two daemons on this host, gone when the test ends."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue", "scancel")


def missing_reason() -> str:
    """Why no cluster can be started here, or an empty text."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"SLURM is not installed ({', '.join(absent)} missing; Debian: slurm-wlm and munge)"
    return "" if os.geteuid() == 0 else "the loopback cluster needs root"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class Cluster:
    """Context manager; ``env`` makes SLURM's commands talk to this cluster only."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.processes: list[subprocess.Popen] = []
        self.env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> Cluster:
        try:
            self._start_all()
        except BaseException:
            self._stop()
            raise
        return self

    def _start_all(self) -> None:
        self.folder.chmod(0o755)
        (self.folder / "state").mkdir()
        munge = self.folder / "munge"
        munge.mkdir(mode=0o755)
        key = munge / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._start(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}/socket", f"--pid-file={munge}/pid",
            f"--log-file={munge}/log", f"--seed-file={munge}/seed",
        )  # fmt: skip
        self._wait(lambda: (munge / "socket").exists(), "munged opened no socket")
        (self.folder / "slurm.conf").write_text(self._config(munge / "socket"), encoding="utf8")
        self._start("slurmctld", "-D", "-i")
        for name in ("node1", "node2"):
            (self.folder / f"spool-{name}").mkdir()
            self._start("slurmd", "-D", "-N", name)
        self._wait(lambda: self.run("sinfo", "-h", "-o", "%D %t").strip() == "2 idle", "nodes did not become idle")

    def __exit__(self, *_) -> None:
        self.run("scancel", "--user=root", "--signal=KILL", "--full", check=False)
        self.run("scancel", "--user=root", check=False)
        self._settle()
        self._stop()

    def _stop(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()

    def _settle(self) -> None:
        end = time.monotonic() + 20
        while time.monotonic() < end and self.run("squeue", "-h", check=False).strip():
            time.sleep(0.5)

    def _config(self, socket_path: Path) -> str:
        host, folder = socket.gethostname().split(".")[0], self.folder
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=4 RealMemory=2000 State=UNKNOWN"
            for name in ("node1", "node2")
        )
        return f"""ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
AuthType=auth/munge
AuthInfo=socket={socket_path}
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
KillWait=5
InactiveLimit=0
JobRequeue=1
UnkillableStepTimeout=60
{nodes}
PartitionName=main Nodes=node1,node2 Default=YES MaxTime=30 State=UP
"""

    def _start(self, *command: str) -> None:
        log = (self.folder / f"{command[0]}-{len(self.processes)}.out").open("w")
        self.processes.append(subprocess.Popen(command, env=self.env, stdout=log, stderr=log))

    def _wait(self, ready, complaint: str, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if ready():
                return
            time.sleep(0.2)
        logs = "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in sorted(self.folder.glob("*.out")))
        raise RuntimeError(f"{complaint} within {seconds:.0f} s\n{logs}")

    def run(self, *command: str, check: bool = False) -> str:
        """The output of a SLURM command on this cluster."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False, timeout=60)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout

    def state(self, job: str) -> str:
        """The job's state as scontrol names it, e.g. RUNNING or COMPLETED."""
        text = self.run("scontrol", "show", "job", job)
        return next((part.split("=", 1)[1] for part in text.split() if part.startswith("JobState=")), "GONE")

    def wait_for(self, job: str, states: tuple[str, ...], seconds: float) -> str:
        """Wait until the job is in one of the states; RuntimeError with the last state otherwise."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if (state := self.state(job)) in states:
                return state
            time.sleep(0.3)
        raise RuntimeError(f"job {job} is {self.state(job)} after {seconds:.0f} s, not {' or '.join(states)}")
