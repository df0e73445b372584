"""The language loss: cross-entropy on supervised positions only, as a sum to be divided once by the global number of targets.

The head is applied to the hidden states that predict a target, in chunks whose logits are recomputed in backward: no
(B, T, V) tensor ever exists, and with chunks not even a (B, M, V) one. The head is called as a module, because under ZeRO-3
and FSDP a weight is whole only inside its own module's forward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmkit.config import IGNORE_INDEX


def at(hidden: Tensor, positions: Tensor) -> Tensor:
    """Hidden states (B, T, D) at ``positions`` (B, M) -> (B, M, D)."""
    return hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[-1]))


def chunk_loss(head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """``hidden`` (P, D), ``targets`` (P,) -> the fp32 sum of cross-entropy over targets that are not ignored, and how many are right.

    Where all targets are ignored the sum is 0 with zero gradients, not NaN (U26).
    """
    logits = head(hidden).float()  # (P, D) -> (P, V)
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    correct = ((logits.detach().argmax(-1) == targets) & (targets != IGNORE_INDEX)).sum()
    return loss, correct


class LanguageObjective(nn.Module):
    """A vision-language model with its loss, wrapped whole so that all of a step runs inside one forward (U48).

    ``chunk`` is the number of positions per call of the head, 0 for all at once; ``checkpoint(function, *args)`` recomputes a
    call in backward (`Backend.checkpoint`).
    """

    def __init__(self, model: nn.Module, chunk: int = 0, checkpoint: Callable | None = None):
        super().__init__()
        self.model = model
        self.chunk = chunk
        self.checkpoint = checkpoint

    def forward(self, batch: dict[str, Tensor], mode: str = "loss") -> dict[str, Tensor]:
        """``loss``: loss_sum, n_targets, n_correct and n_empty (1 where no position is supervised), 0-dim tensors.
        ``hidden``: the hidden states (B, T, D)."""
        if mode not in ("loss", "hidden"):
            raise ValueError(f"no mode {mode!r}; modes are loss, hidden")
        hidden = self.model(batch)
        if mode == "hidden":
            return {"hidden": hidden}
        targets = batch["targets"].flatten()  # (B, M) -> (P,)
        loss, correct = self._chunked(at(hidden, batch["target_positions"]).flatten(0, 1), targets)
        n_targets = (targets != IGNORE_INDEX).sum()
        return {"loss_sum": loss, "n_targets": n_targets, "n_correct": correct, "n_empty": (n_targets == 0).long()}

    def _chunked(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The loss sum and the right answers over all positions, `chunk` of them at a time."""
        logits = self.model.logits
        if not 0 < self.chunk < len(targets):
            return chunk_loss(logits, hidden, targets)
        loss, correct = hidden.new_zeros((), dtype=torch.float32), targets.new_zeros(())
        for start in range(0, len(targets), self.chunk):
            part = slice(start, start + self.chunk)
            one, right = self.checkpoint(chunk_loss, logits, hidden[part], targets[part])
            loss, correct = loss + one, correct + right
        return loss, correct
