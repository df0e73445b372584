"""Text from a VisionLanguageModel: batched decoding with a key-value cache, streaming, and a conversation for notebooks.

Rows may be padded on either side: a row's answer continues from its last real position and never sees padding, so a batch gives
what its rows give one by one. In-LLM samplers run in the prefill, where the image slots are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmkit.models.language import Places, text_config
from mmkit.models.vlm import VisionLanguageModel, check_batch


Turn = tuple[str, str]  # (role, text)


class Sampling(NamedTuple):
    """How the next token is chosen; temperature 0 takes the likeliest."""

    temperature: float = 0.0
    top_p: float = 1.0
    generator: torch.Generator | None = None


def generate(
    model: VisionLanguageModel,
    batch: Mapping[str, Tensor],
    max_new_tokens: int = 512,
    stop: Sequence[int] = (),
    sampling: Sampling = Sampling(),
) -> list[list[int]]:
    """New token ids of each row, up to and with its first stop token. Arguments as in `stream`."""
    rows: list[list[int]] = [[] for _ in range(batch["input_ids"].shape[0])]
    for tokens, fresh in stream(model, batch, max_new_tokens, stop, sampling):
        for row, token, is_fresh in zip(rows, tokens.tolist(), fresh.tolist(), strict=True):
            if is_fresh:
                row.append(token)
    return rows


def stream(
    model: VisionLanguageModel,
    batch: Mapping[str, Tensor],
    max_new_tokens: int = 512,
    stop: Sequence[int] = (),
    sampling: Sampling = Sampling(),
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (tokens (B,), fresh (B,) bool) step by step; a row is fresh until after its stop token, and all stop together.

    ``batch`` as `VisionLanguageModel` takes it. Padding is where ``segments`` (or ``attention_mask``) is 0; without either it is
    the language model's pad token at the ends of a row. ``stop`` adds to the model's own end tokens.
    """
    batch = with_mask(batch, text_config(model.language).pad_token_id)
    check_batch(model.config, batch)
    ends = torch.tensor(sorted({*stop, *end_tokens(model)}), dtype=torch.long, device=batch["input_ids"].device)
    training = model.training
    model.eval()
    try:
        fresh = torch.ones(batch["input_ids"].shape[0], dtype=torch.bool, device=ends.device)
        for tokens in _decode(model, batch, max_new_tokens, sampling):
            yield tokens, fresh
            fresh = fresh & ~torch.isin(tokens, ends)
            if not fresh.any():
                return
    finally:
        model.train(training)


def _decode(model: VisionLanguageModel, batch: Mapping[str, Tensor], steps: int, sampling: Sampling) -> Iterator[Tensor]:
    from transformers import DynamicCache

    cache = DynamicCache()  # without a config it keeps all keys; sliding windows are in the masks
    places = model.places(batch)
    last = (places.index * (places.segments > 0)).argmax(1, keepdim=True)  # (B, 1)
    row = torch.arange(len(last), device=last.device)[:, None]
    query = Places(*(part[row, last] for part in places))
    with torch.no_grad():
        embeds, vision = model.embed(batch)
        hidden = model.run(embeds, places, cache=cache, vision=vision)[row, last]  # (B, 1, D)
    for step in range(steps):
        with torch.no_grad():
            tokens = choose(model.logits(hidden[:, 0]), sampling)
        yield tokens
        if step == steps - 1:
            return
        index = torch.full_like(query.index, batch["input_ids"].shape[1] + step)
        query = query._replace(index=index, positions=query.positions + 1)
        places = places.then(query)
        with torch.no_grad():
            hidden = model.run(model.language.get_input_embeddings()(tokens[:, None]), query, places, cache)


def choose(logits: Tensor, sampling: Sampling) -> Tensor:
    """(B, V) -> (B,): the likeliest token, or one drawn from the smallest set that holds ``top_p`` of the probability."""
    if sampling.temperature <= 0:
        return logits.argmax(-1)
    shares, order = (logits.float() / sampling.temperature).softmax(-1).sort(-1, descending=True)
    shares = shares.masked_fill(shares.cumsum(-1) - shares >= sampling.top_p, 0.0)
    device = sampling.generator.device if sampling.generator else shares.device
    drawn = torch.multinomial(shares.to(device), 1, generator=sampling.generator).to(order.device)
    return order.gather(-1, drawn)[:, 0]


def with_mask(batch: Mapping[str, Tensor], pad: int | None) -> Mapping[str, Tensor]:
    """The batch with a mask: given, or made from runs of the pad token at either end of a row."""
    if "segments" in batch or "attention_mask" in batch or pad is None:
        return batch
    text = batch["input_ids"] != pad
    real = (text.long().cumsum(1) > 0) & (text.flip(1).long().cumsum(1).flip(1) > 0)
    return {**batch, "attention_mask": real.long()}


def end_tokens(model: VisionLanguageModel) -> set[int]:
    """End tokens of the language model's own configs (one id, several or none)."""
    found: set[int] = set()
    for config in (text_config(model.language), getattr(model.language, "generation_config", None)):
        ids = getattr(config, "eos_token_id", None)
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    return found


class Chat:
    """A conversation with a model: ``chat(image, text, history)`` -> (answer, longer history).

    ``encode(images, turns, **more)`` makes the batch of one row that asks for the next answer: turns are (role, text) pairs with the
    roles user and assistant, ``more`` is what the caller gives besides (regions, for models that have them). ``decode(ids)`` turns
    new ids into text.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        encode: Callable[..., Mapping[str, Tensor]],
        decode: Callable[[list[int]], str],
        stop: Sequence[int] = (),
        max_new_tokens: int = 512,
        sampling: Sampling = Sampling(),
    ):
        self.model, self.encode, self.decode = model, encode, decode
        self.stop, self.max_new_tokens, self.sampling = tuple(stop), max_new_tokens, sampling

    def __call__(self, image: Any, text: str, history: Sequence[Turn] = (), **more: Any) -> tuple[str, list[Turn]]:
        """The answer to ``text`` about ``image`` (None, one, or a list) after ``history``, and the history with both turns added."""
        answer = "".join(self.stream(image, text, history, **more)).strip()
        return answer, [*history, ("user", text), ("assistant", answer)]

    def stream(self, image: Any, text: str, history: Sequence[Turn] = (), **more: Any) -> Iterator[str]:
        """The same answer in pieces, as soon as each is certain."""
        images = [] if image is None else image if isinstance(image, list) else [image]
        device = next(self.model.parameters()).device
        batch = {name: t.to(device) for name, t in self.encode(images, [*history, ("user", text)], **more).items()}
        ends = {*self.stop, *end_tokens(self.model)}
        ids: list[int] = []
        shown = ""
        for tokens, _ in stream(self.model, batch, self.max_new_tokens, self.stop, self.sampling):
            if (token := int(tokens[0])) not in ends:
                ids.append(token)
            whole = self.decode(ids)
            if len(whole) > len(shown) and not whole.endswith("\ufffd"):  # else a character is still missing bytes
                yield whole[len(shown) :]
                shown = whole
        if rest := self.decode(ids)[len(shown) :]:
            yield rest
