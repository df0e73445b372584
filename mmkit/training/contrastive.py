"""Contrastive losses over all devices (clip-training sections 1, 2, 5, 12): CLIP, SigLIP, CoCa, distillation.

Every loss is a SUM over this process's pairs, to be divided once by the number of pairs of the global batch: summed over
processes it is the loss of one process holding the joined batch, and so are its gradients. b = pairs of this process,
N = pairs of all processes, D = width of the shared space.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmkit.config import ConfigError, ContrastiveConfig
from mmkit.sharding.exchange import exchange, from_process

CAPTION_WEIGHT = 2.0  # of CoCa's caption loss beside a contrastive weight of 1 (CoCa section 4, open_clip's default)
PAD_TOKEN = 0  # carries no caption loss
MANY_DUPLICATES = 0.25  # share of repeated captions that is warned of


def check_model(config: ContrastiveConfig, architecture: dict[str, Any]) -> None:
    """Refuses what `check` does, and a loss that does not suit the model (``architecture``: its complete open_clip settings)."""
    check(config)
    captions = "multimodal_cfg" in architecture
    if captions != (config.kind == "coca"):
        has, choice = ("a", "kind 'coca'") if captions else ("no", "another kind or a CoCa model")
        raise ConfigError(f"contrastive.kind {config.kind!r} with a model that has {has} caption decoder (multimodal_cfg): use {choice}")
    if config.kind == "siglip" and architecture.get("init_logit_bias") is None:
        raise ConfigError("contrastive.kind 'siglip' needs model.init_logit_bias (SigLIP starts at -10); it is not set")
    if (config.kind == "distill") != (config.distill_from is not None):
        raise ConfigError(
            f"contrastive.kind {config.kind!r} with distill_from {config.distill_from!r}: kind 'distill' needs the name of an open_clip "
            "model to learn from, other kinds have no use for it"
        )


def check(config: ContrastiveConfig) -> None:
    """Refuses the combinations whose gradients are wrong: ConfigError with the reason (measured in clip-training section 1)."""
    if config.gather_with_grad or config.kind == "siglip":
        return
    if config.local_loss:
        raise ConfigError(
            "contrastive.local_loss=true with gather_with_grad=false trains in a wrong direction: the other devices' share of each "
            "feature's gradient is lost (cosine to the true gradient 0.77 on 2 devices). Set gather_with_grad=true"
        )
    raise ConfigError(
        "contrastive.local_loss=false with gather_with_grad=false shrinks every weight gradient by the number of devices but not "
        "the temperature's, which breaks gradient clipping and Adam's eps. Set gather_with_grad=true"
    )


class ContrastiveLoss:
    """Features of this process's pairs -> the loss sum and what is logged; holds no parameters.

    ``backend`` offers ``gather(x, with_grad)`` (concatenation over processes, identity where one program sees the whole batch)
    and ``rank``.
    """

    def __init__(self, config: ContrastiveConfig, backend):
        check(config)
        self.config = config
        self.backend = backend
        self._n_processes: int | None = None

    def __call__(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """``features``: image_features, text_features (b, D) of norm 1, logit_scale () already exponentiated, logit_bias () or None;
        for distillation also teacher_image, teacher_text (b, D'), teacher_scale; for CoCa caption_sum () and caption_tokens ()."""
        image, text = features["image_features"], features["text_features"]
        dtype = self._logit_dtype(image)
        bias = features["logit_bias"].reshape(()) if "logit_bias" in features else None
        with torch.autocast(image.device.type, enabled=False):
            scale = features["logit_scale"].float().reshape(())
            loss_sum, largest = self._pair_loss(image.float(), text.float(), scale, bias, dtype, features)
            metrics = self._metrics(features, loss_sum, largest)
            if "caption_sum" in features:
                loss_sum = loss_sum + CAPTION_WEIGHT * self._caption_loss(features, len(image))
        return {"loss_sum": loss_sum, "n_targets": len(image), "logit_scale": scale.detach()} | metrics

    @torch.no_grad()
    def _metrics(self, features, loss_sum, largest) -> dict[str, Tensor]:
        """The largest |logit| of all processes, the share of captions that occur more than once, and how far the softmax loss lies
        from ln N, the loss of features that know nothing (U33)."""
        n = len(features["image_features"])
        metrics = {"max_logit": self.backend.gather(largest.detach()[None], with_grad=False).max()}
        if "caption_hash" in features:
            hashes = self.backend.gather(features["caption_hash"], with_grad=False)
            metrics["duplicate_share"] = repeated_share(hashes)
        if self.config.kind in ("clip", "coca"):
            metrics["loss_gap"] = loss_sum.detach() / n - math.log(n * self._ring(largest)[0])
        return metrics

    def _logit_dtype(self, image: Tensor) -> torch.dtype:
        if self.config.logits_fp32:
            return torch.float32
        kind = image.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else image.dtype

    def _pair_loss(self, image, text, scale, bias, dtype, features):
        if self.config.kind == "siglip":
            return self._sigmoid(image, text, scale, bias, dtype)
        rows, columns, offset, share = self._sides(image, text)
        similarity = functools.partial(_RowLosses, scale=scale, bias=bias, chunk=self.config.chunk, dtype=dtype)
        sides = [similarity(rows[0], columns[1], offset), similarity(rows[1], columns[0], offset)]
        loss_sum = sum(side.cross_entropy() for side in sides) / 2 * share
        if self.config.kind == "distill":
            teacher_scale = features["teacher_scale"].float().reshape(())
            teacher_rows, teacher_columns, _, _ = self._sides(features["teacher_image"].float(), features["teacher_text"].float())
            for side, teacher, targets in zip(sides, teacher_rows, reversed(teacher_columns), strict=True):
                loss_sum = loss_sum + side.teacher_cross_entropy(teacher, targets, teacher_scale) / 2 * share
        return loss_sum, torch.stack([side.largest for side in sides]).max()

    def _sides(self, image, text):
        """Rows to score, columns to score them against, the column of row 0's own pair, and this process's share of the rows' loss."""
        everything = tuple(self.backend.gather(x, with_grad=self.config.gather_with_grad) for x in (image, text))
        replicas = len(everything[0]) // len(image)
        if replicas == 1:
            return (image, text), everything, 0, 1.0
        if self.config.local_loss:
            return (image, text), everything, self.backend.rank * len(image), 1.0
        return everything, everything, 0, 1.0 / replicas

    def _sigmoid(self, image, text, scale, bias, dtype):
        """SigLIP: every pair is a yes-no question; blocks of texts travel, logits stay b x b."""
        parts = [
            _sigmoid_sum(image, block, scale, bias, own_pairs, self.config.chunk, dtype) for block, own_pairs in self._text_blocks(text)
        ]
        return torch.stack([loss for loss, _ in parts]).sum(), torch.stack([top for _, top in parts]).max()

    def _text_blocks(self, text):
        """(texts of one process, whether they are this process's own) for every process, by the configured exchange."""
        n, rank = self._ring(text)
        pattern = self.config.siglip_exchange if n > 1 else "shift"
        if pattern == "gather":
            blocks = self.backend.gather(text, with_grad=True).split(len(text))
            yield from ((block, source == rank) for source, block in enumerate(blocks))
            return
        if pattern == "reduce":  # the own block too goes round, so that backward runs the same collectives everywhere
            yield from ((from_process(text, source), source == rank) for source in range(n))
            return
        yield text, True
        if pattern == "shift":
            for _ in range(n - 1):
                (text,) = exchange((text,), (1,))
                yield text, False
        else:
            onward = backward = text
            for _ in range((n - 1) // 2):
                onward, backward = exchange((onward, backward), (1, -1))
                yield from ((onward, False), (backward, False))
            if n % 2 == 0:
                yield exchange((onward,), (1,))[0], False

    def _ring(self, like):
        """How many processes hold pairs of their own, and this one's place; one program over many devices is one."""
        if self._n_processes is None:
            self._n_processes = len(self.backend.gather(torch.zeros(1, device=like.device), with_grad=False))
        return self._n_processes, self.backend.rank if self._n_processes > 1 else 0

    def _caption_loss(self, features, n_pairs):
        """Caption loss scaled so that, divided by the pairs of the global batch, it is the mean over its caption tokens."""
        tokens = features["caption_tokens"]
        count = torch.stack([tokens, tokens.new_tensor(n_pairs)])  # whole numbers, which fp32 holds up to 2**24 only
        tokens, pairs = self.backend.gather(count[None], with_grad=False).sum(0)
        return features["caption_sum"].float() * (pairs / tokens.clamp(min=1))


class _RowLosses:
    """Softmax losses of ``rows`` (b, D) against ``columns`` (N, D); row i's own pair is column offset + i."""

    def __init__(self, rows, columns, offset, *, scale, bias, chunk, dtype):
        self.rows, self.columns, self.offset, self.scale, self.bias = rows, columns, offset, scale, bias
        self.chunk, self.dtype = chunk, dtype
        log_sums, tops = zip(*self._by_chunk(_log_sum, (rows,), (columns,), scale), strict=True)
        self.log_sum = torch.stack(log_sums).logsumexp(0)  # (chunks, b) -> (b,)
        self.largest = torch.stack(tops).max()

    def _by_chunk(self, function, of_rows, of_columns, *rest):
        """``function`` on each chunk of columns; recomputed in backward, so that one chunk's logits live at a time."""
        n = len(self.columns)
        size = self.chunk or n
        call = functools.partial(function, bias_free=self.bias is None, dtype=self.dtype)
        for start in range(0, n, size):
            part = [columns[start : start + size] for columns in of_columns]
            inputs = (*of_rows, *part, *rest, *(() if self.bias is None else (self.bias.float(),)))
            yield call(*inputs) if size >= n else _Recomputed.apply(call, *inputs)

    def cross_entropy(self) -> Tensor:
        """Sum over rows of -log softmax at the own pair."""
        own = self.columns[self.offset : self.offset + len(self.rows)]
        logits = self.scale * (self.rows.to(self.dtype) * own.to(self.dtype)).sum(-1).float()
        if self.bias is not None:
            logits = logits + self.bias.float()
        return (self.log_sum - logits).sum()

    def teacher_cross_entropy(self, rows, columns, scale) -> Tensor:
        """Sum over rows of the cross-entropy against the teacher's softmax of ``rows`` (b, D') and ``columns`` (N, D')."""
        teacher = _RowLosses(rows, columns, self.offset, scale=scale, bias=None, chunk=self.chunk, dtype=self.dtype)
        expected = self._by_chunk(_expected_logit, (self.rows, rows, teacher.log_sum), (self.columns, columns), self.scale, scale)
        return self.log_sum.sum() - torch.stack([part for part, _ in expected]).sum()


def _logits(rows, columns, scale, bias, dtype):
    """(b, D), (c, D) -> (b, c) in float32 after a product in ``dtype``."""
    logits = ((scale * rows).to(dtype) @ columns.to(dtype).T).float()
    return logits if bias is None else logits + bias


def _log_sum(rows, columns, scale, *bias, bias_free, dtype):
    logits = _logits(rows, columns, scale, None if bias_free else bias[0], dtype)
    return logits.logsumexp(1), logits.detach().abs().max()


def _expected_logit(rows, teacher_rows, log_sum, columns, teacher_columns, scale, teacher_scale, *bias, bias_free, dtype):
    """Sum over these columns of teacher probability x student logit."""
    teacher = (_logits(teacher_rows, teacher_columns, teacher_scale, None, dtype) - log_sum[:, None]).exp()
    logits = _logits(rows, columns, scale, None if bias_free else bias[0], dtype)
    return (teacher * logits).sum(), logits.detach().abs().max()


def _sigmoid_sum(image, text, scale, bias, own_pairs, chunk, dtype):
    """Sum of -log sigmoid(z logit) over a block, z = 1 on the diagonal of the own block and -1 elsewhere; and the largest |logit|."""
    size = chunk or len(text)
    bias = scale.new_zeros(()) if bias is None else bias.float()
    parts = []
    for start in range(0, len(text), size):
        call = functools.partial(_sigmoid_chunk, diagonal=start if own_pairs else None, dtype=dtype)
        inputs = (image, text[start : start + size], scale, bias)
        parts.append(call(*inputs) if size >= len(text) else _Recomputed.apply(call, *inputs))
    return torch.stack([loss for loss, _ in parts]).sum(), torch.stack([top for _, top in parts]).max()


def _sigmoid_chunk(image, text, scale, bias, *, diagonal, dtype):
    logits = _logits(image, text, scale, bias, dtype)
    signs = torch.full_like(logits, -1)
    if diagonal is not None:
        signs = signs + 2 * torch.eye(len(image), diagonal + len(text), device=image.device)[:, diagonal:]
    return -F.logsigmoid(signs * logits).sum(), logits.detach().abs().max()


class _Recomputed(torch.autograd.Function):
    """A function of tensors that keeps its inputs only and runs again in backward; its second result carries no gradient.

    torch.utils.checkpoint cannot be used here: its form without re-entry fails on XLA devices, the other loses gradients of views.
    """

    @staticmethod
    def forward(ctx, function, *inputs):
        ctx.function = function
        ctx.save_for_backward(*inputs)
        value, aside = function(*inputs)
        ctx.mark_non_differentiable(aside)
        return value, aside

    @staticmethod
    def backward(ctx, gradient, _):
        needed = ctx.needs_input_grad[1:]
        inputs = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            value, _ = ctx.function(*inputs)
        wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
        found = iter(torch.autograd.grad(value, wanted, gradient))
        return None, *(next(found) if need else None for need in needed)


class ContrastiveObjective(nn.Module):
    """A clip model with its loss, wrapped whole so that every access to weights runs inside one forward (U48).

    ``model(batch)`` (`ClipModel`, or anything of its form) returns image_features and text_features of norm 1, logit_scale
    (exponentiated), logit_bias or None, and for CoCa logits (B, L, V) with labels (B, L). ``teacher`` is a frozen model of the same
    form, for distillation.
    """

    def __init__(self, model: nn.Module, backend, config: ContrastiveConfig, teacher: nn.Module | None = None):
        super().__init__()
        self.model = model
        self.teacher = teacher.eval().requires_grad_(False) if teacher is not None else None
        self.loss = ContrastiveLoss(config, backend)
        if (config.kind == "distill") != (teacher is not None):
            raise ConfigError(f"contrastive.kind {config.kind!r} with teacher {type(teacher).__name__}: distillation needs distill_from")

    def forward(self, batch: dict[str, Tensor], mode: str = "loss", gradients: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """``loss``: the loss sum of this process's pairs and its metrics. ``features``: what the loss needs, for cached accumulation.
        ``surrogate``: loss_sum whose gradient is ``gradients`` of the features. ``encode``: features of the towers present in ``batch``."""
        if mode == "loss":
            return self.loss(self._features(batch))
        if mode == "features":
            return self._features(batch)
        if mode == "surrogate":
            features = self._features(batch, taught=False)
            return {"loss_sum": sum((features[name].float() * gradient).sum() for name, gradient in gradients.items())}
        if mode == "encode":
            return self.model(batch, mode="encode")
        raise ValueError(f"no mode {mode!r}; modes are loss, features, surrogate, encode")

    def train(self, mode: bool = True):
        """Train mode for the student; a teacher stays in evaluation mode."""
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    def _features(self, batch, taught=True):
        out = self.model(batch)
        features = {name: out[name] for name in ("image_features", "text_features", "logit_scale")}
        features["caption_hash"] = caption_hash(batch["text"] if "text" in batch else batch["text_features"])
        if out.get("logit_bias") is not None:
            features["logit_bias"] = out["logit_bias"]
        elif self.loss.config.kind == "siglip":
            raise ConfigError("contrastive.kind 'siglip' needs model.init_logit_bias (SigLIP starts at -10); it is not set")
        if out.get("logits") is not None:
            labels = out["labels"]
            losses = F.cross_entropy(out["logits"].flatten(0, 1).float(), labels.flatten(), ignore_index=PAD_TOKEN, reduction="sum")
            features |= {"caption_sum": losses, "caption_tokens": (labels != PAD_TOKEN).sum()}
        if self.teacher is not None and taught:
            with torch.no_grad():
                known = self.teacher(batch)
            features |= {f"teacher_{name}": known[f"{name}_features"] for name in ("image", "text")}
            features["teacher_scale"] = known["logit_scale"]
        return features


def caption_hash(text: Tensor) -> Tensor:
    """(B, L) tokens or (B, C) cached features -> (B,) int64, equal for equal captions."""
    words = text.float().contiguous().view(torch.int32).long() if text.is_floating_point() else text
    odd = torch.arange(1, 2 * words.shape[1], 2, device=words.device) * 0x9E3779B97F4A7C1
    mixed = (words + 1) * odd
    return (mixed ^ (mixed >> 29)).sum(1)


def repeated_share(hashes: Tensor) -> Tensor:
    """Share of the values (N,) that occur more than once."""
    ordered = hashes.sort().values
    same = ordered[1:] == ordered[:-1]
    return (F.pad(same, (1, 0)) | F.pad(same, (0, 1))).float().mean()


def advice(row: dict) -> str:
    """A warning about a step's numbers, or an empty text."""
    if row.get("duplicate_share", 0) >= MANY_DUPLICATES:
        return (
            f"step {row['step']}: {row['duplicate_share']:.0%} of the batch's captions occur more than once; equal captions push each "
            "other apart as wrong negatives. Remove duplicates from the data or use another caption field"
        )
    return ""


def is_unmasked(step: int, total_steps: int, config: ContrastiveConfig) -> bool:
    """Whether ``step`` (from 0) lies in the last share of training, which runs without patch dropout (FLIP section 4)."""
    return step >= total_steps - round(total_steps * config.unmasked_last)


def unmask_when_due(model: nn.Module, step: int, total_steps: int, config: ContrastiveConfig) -> None:
    """Turns patch dropout off when ``step`` has come to the unmasked last phase."""
    if is_unmasked(step, total_steps, config):
        model.set_patch_dropout(0.0)
