"""One golden case: its json, its tensors, and comparison at its tolerance."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """``path`` is the json file; tensors, where there are any, lie beside it."""

    path: Path

    @cached_property
    def json(self):
        """The whole json file."""
        return json.loads(self.path.read_text(encoding="utf8"))

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors under the names of the file."""
        return load_file(self.path.with_suffix(".safetensors"))

    @property
    def kind(self) -> str | None:
        """The case's kind, or None where the file has none."""
        return self.json.get("kind") if isinstance(self.json, dict) else None

    @property
    def weights(self) -> dict[str, Tensor]:
        """Tensors that are weights, under their original names."""
        return {name: t for name, t in self.tensors.items() if not name.startswith(("in.", "mid.", "out."))}

    def renamed(self, to) -> dict[str, Tensor]:
        """The weights under ``to`` of their names, each under its own."""
        out = {to(name): tensor for name, tensor in self.weights.items()}
        assert len(out) == len(self.weights)
        return out

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def many(self, stem: str) -> list[Tensor]:
        """``stem.0``, ``stem.1``, ... as far as they go."""
        out = []
        while f"{stem}.{len(out)}" in self.tensors:
            out.append(self.tensors[f"{stem}.{len(out)}"])
        return out

    def close(self, got: Tensor, want: str | Tensor, where: Tensor | None = None) -> None:
        """Asserts equality with tensor ``want``: integers and flags exactly, floats at the case's tolerance, within ``where``."""
        expected = self.tensors[want] if isinstance(want, str) else want
        if where is not None:
            got, expected = got[where], expected[where]
        if expected.dtype.is_floating_point:
            stated = self.json.get("tolerance")
            tolerance = stated if isinstance(stated, float) else 1e-5
            torch.testing.assert_close(got.detach(), expected, atol=tolerance, rtol=tolerance, msg=lambda m: f"{want}: {m}")
        else:
            assert torch.equal(got.to(expected.dtype), expected), want
