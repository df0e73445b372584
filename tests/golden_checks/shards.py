"""Rank shards of torch_xla's FSDP against the consolidation of the original."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmkit.models.convert.cambrian import consolidated, rank_files


def check(folder: Path) -> None:
    """Every tensor equal, by its original name; the step-checkpoint name style gives the same; a missing rank is named."""
    wanted = load_file(folder / "consolidated_expected.safetensors")
    for style in ("{stem}_rank-{rank}-of-{world}.pth", "weights_rank-{rank}-of-{world}-pytorch_model.bin"):
        with tempfile.TemporaryDirectory() as scratch:
            files = [shutil.copy(file, Path(scratch, _renamed(file, style))) for file in rank_files(folder)]
            found = dict(consolidated(Path(scratch)))
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert torch.equal(found[name], tensor), name
            Path(files[-1]).unlink()
            with pytest.raises(ValueError, match=f"missing rank {len(files) - 1} of {len(files)}"):
                list(consolidated(Path(scratch)))


def _renamed(file: Path, style: str) -> str:
    stem, _, rest = file.name.partition("_rank-")
    rank, _, rest = rest.partition("-of-")
    return style.format(stem=stem, rank=rank, world=rest.removesuffix(".pth"))
