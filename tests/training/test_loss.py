"""The language loss: only supervised positions, in chunks, never NaN."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmkit.training.loss import LanguageObjective, at

B, T, D, V, M = 2, 12, 8, 50, 6
recompute = functools.partial(checkpoint, use_reentrant=False)


class Toy(nn.Module):
    """A language model reduced to an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.largest = 0
        self.head.register_forward_hook(lambda module, args, out: setattr(self, "largest", max(self.largest, out.numel())))

    def logits(self, hidden):
        return self.head(hidden)

    def forward(self, batch):
        return self.embed(batch["input_ids"])


def batch_of(supervised: int = M):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, V, (B, T), generator=g)
    targets = torch.full((B, M), -100)
    targets[:, :supervised] = torch.randint(0, V, (B, supervised), generator=g)
    positions = torch.stack([torch.randperm(T, generator=g)[:M].sort().values for _ in range(B)])
    return {"input_ids": ids, "targets": targets, "target_positions": positions}


def gradients(chunk, batch):
    torch.manual_seed(1)
    model = Toy()
    out = LanguageObjective(model, chunk, recompute)(batch)
    out["loss_sum"].backward()
    return out, [p.grad for p in model.parameters()], model


def test_loss_equals_cross_entropy_over_the_whole_vocabulary_tensor():
    batch = batch_of(4)
    out, (embed, head), model = gradients(0, batch)
    labels = torch.full((B, T), -100)
    for row in range(B):
        for position, target in zip(batch["target_positions"][row], batch["targets"][row]):
            labels[row, position] = target
    whole = F.cross_entropy(model.head(model(batch)).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    assert torch.allclose(out["loss_sum"], whole, rtol=1e-6)
    want = torch.autograd.grad(whole, list(model.parameters()))
    assert torch.allclose(embed, want[0], atol=1e-6) and torch.allclose(head, want[1], atol=1e-6)
    assert out["n_targets"] == 8


@pytest.mark.parametrize("chunk", [1, 5, 12, 100])
def test_chunks_change_neither_loss_nor_gradients(chunk):
    batch = batch_of(5)
    want, want_gradients, _ = gradients(0, batch)
    got, got_gradients, model = gradients(chunk, batch)
    assert torch.allclose(got["loss_sum"], want["loss_sum"], rtol=1e-6)
    assert got["n_correct"] == want["n_correct"] and got["n_targets"] == want["n_targets"]
    for a, b in zip(got_gradients, want_gradients, strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    assert model.largest == min(chunk, B * M) * V  # never more logits than a chunk of positions has


def test_a_batch_without_targets_gives_zero_loss_and_zero_gradients_and_is_counted():
    for chunk in (0, 5):
        out, found, _ = gradients(chunk, batch_of(0))
        assert out["loss_sum"] == 0 and out["n_targets"] == 0 and out["n_empty"] == 1
        assert all(g is not None and not g.any() for g in found)
    assert gradients(0, batch_of(2))[0]["n_empty"] == 0


def test_loss_is_fp32_under_bf16_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        out = LanguageObjective(Toy(), 4, recompute)(batch_of())
    assert out["loss_sum"].dtype == torch.float32


def test_n_correct_counts_right_answers_only_where_supervised():
    model = Toy()
    batch = batch_of(3)
    best = model.head(at(model(batch), batch["target_positions"])).argmax(-1)
    batch["targets"] = torch.where(batch["targets"] == -100, -100, best)
    batch["targets"][0, 0] = (best[0, 0] + 1) % V
    assert LanguageObjective(model)(batch)["n_correct"] == 5


def test_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="no mode 'los'"):
        LanguageObjective(Toy())(batch_of(), mode="los")
