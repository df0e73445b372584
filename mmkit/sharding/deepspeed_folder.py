"""DeepSpeed's own checkpoint folders (ZeRO 1 to 3, any number of ranks), read as whole tensors by name.

DeepSpeed's converter to its universal format does the joining; it runs in a process of its own, since its files are pickles that need
DeepSpeed's classes. What it leaves out is which samples were seen: such a folder has no data position.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from mmkit.config import ConfigError

PARTS = {"param": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def step_folder(path: str | Path) -> Path | None:
    """The folder with one step's files: ``path`` itself or what its ``latest`` file names; None where this is no DeepSpeed checkpoint."""
    path = Path(path)
    if (path / "latest").is_file():
        path = path / (path / "latest").read_text(encoding="utf8").strip()
    return path if any(path.glob("*_optim_states.pt")) else None


def convert(path: str | Path, target: str | Path) -> None:
    """Joins the ranks' files of ``path`` into ``target``. ConfigError with DeepSpeed's last line where it cannot."""
    folder = step_folder(path)
    if folder is None:
        raise ConfigError(f"{path} is no DeepSpeed checkpoint: it has no *_optim_states.pt and no file `latest` that names a folder with some")
    options = ["--input_folder", str(folder), "--output_folder", str(target), "--inject_missing_state"]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *options, *workers]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    if done.returncode:
        told = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise ConfigError(f"DeepSpeed cannot read its checkpoint {folder}: {told}")


class Universal:
    """A converted folder: trained parameters with both moments by DeepSpeed's names."""

    def __init__(self, folder: str | Path, source: str | Path):
        self.folder = Path(folder) / "zero"
        self.source = step_folder(source) or Path(source)
        self.names = sorted(path.name for path in self.folder.iterdir() if (path / "exp_avg.pt").is_file())

    @property
    def step(self) -> int:
        """Optimizer steps done: the optimizer's own count, else the number in the folder's name."""
        for path in self.folder.glob("*/step.pt"):
            return int(torch.load(path, weights_only=True))
        numbers = re.findall(r"\d+", self.source.name)
        if not numbers:
            raise ConfigError(f"{self.source} does not say its step; rename the folder to global_stepN")
        return int(numbers[-1])

    def get(self, name: str, shape: torch.Size) -> dict[str, Tensor]:
        """param, exp_avg and exp_avg_sq of ``name`` in fp32; ZeRO-3's are flat and get ``shape``."""
        return {part: self._tensor(name, file, shape) for part, file in PARTS.items()}

    def _tensor(self, name: str, file: str, shape: torch.Size) -> Tensor:
        found = torch.load(self.folder / name / f"{file}.pt", weights_only=True)
        tensor = found["param"] if isinstance(found, dict) else found
        if tensor.dim() == 1:
            tensor = tensor[: shape.numel()].reshape(shape) if tensor.numel() >= shape.numel() else tensor
        return tensor.float()
