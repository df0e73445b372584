"""Text from a VisionLanguageModel: batched decoding with a key-value cache, streaming, and a conversation for notebooks.

Rows may be padded on either side: a row's answer continues from its last real position and never sees padding, so a batch gives
what its rows give one by one. In-LLM samplers run in the prefill, where the image slots are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from mmkit.errors import InputError
from mmkit.models.language import Places, text_config
from mmkit.models.regions import rows_at
from mmkit.models.vlm import VisionLanguageModel, check_batch


Turn = tuple[str, str]  # (role, text)


class Sampling(NamedTuple):
    """How the next token is chosen; temperature 0 takes the likeliest."""

    temperature: float = 0.0
    top_p: float = 1.0
    generator: torch.Generator | None = None


class Here:
    """What generation asks of a `sharding.backend.Backend`, for a model that stays where it is: eager, in the type of its weights."""

    compiled = False

    def __init__(self, model: VisionLanguageModel):
        self.device = next(model.parameters()).device

    def shard(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors beside the weights."""
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}

    def autocast(self) -> contextlib.AbstractContextManager:
        """Nothing is cast."""
        return contextlib.nullcontext()

    def sync(self) -> None:
        """Nothing waits."""


def generate(
    model: VisionLanguageModel,
    batch: Mapping[str, Tensor],
    max_new_tokens: int = 512,
    stop: Sequence[int] = (),
    sampling: Sampling = Sampling(),
    backend: Any = None,
) -> list[list[int]]:
    """New token ids of each row, up to and with its first stop token. Arguments as in `stream`."""
    rows: list[list[int]] = [[] for _ in range(batch["input_ids"].shape[0])]
    for tokens, fresh in stream(model, batch, max_new_tokens, stop, sampling, backend):
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
    backend: Any = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (tokens (B,), fresh (B,) bool) on the host, step by step; a row is fresh until after its stop token, and all stop together.

    ``batch`` as `VisionLanguageModel` takes it, on the host or the device. Padding is where ``segments`` (or ``attention_mask``) is 0;
    without either it is the language model's pad token at the ends of a row, and InputError where it has none. ``stop`` adds to the
    model's own end tokens. ``backend`` is where the model was put, and its precision; without one it is used where it is, as it is.
    """
    tokens = text_config(model.language)
    batch = with_mask(batch, tokens.pad_token_id, tokens.bos_token_id)
    check_batch(model.config, batch)  # before it goes to a device, which would have to be asked for every value
    ends = torch.tensor(sorted({*stop, *end_tokens(model)}), dtype=torch.long)
    training = model.training
    model.eval()
    try:
        fresh = torch.ones(batch["input_ids"].shape[0], dtype=torch.bool)
        for found in decode(model, batch, max_new_tokens, sampling, backend):
            tokens = found.cpu()
            yield tokens, fresh
            fresh = fresh & ~torch.isin(tokens, ends)
            if not fresh.any():
                return
    finally:
        model.train(training)


def decode(
    model: VisionLanguageModel, batch: Mapping[str, Tensor], steps: int, sampling: Sampling = Sampling(), backend: Any = None
) -> Iterator[Tensor]:
    """Yields the next tokens (B,) of all rows, on the device, without reading one: `stream` without its checks and its end.

    Where programs are compiled for shapes, the cache has its full length from the start: one program for all prompts of a shape and
    one for every further token. Elsewhere it grows, so that no position that is not there yet is looked at.
    """
    if steps < 1:
        return
    backend = backend or Here(model)
    batch = backend.shard(batch)
    places = keys = model.places(batch)
    length = batch["input_ids"].shape[1]
    # layers that keep all keys: sliding windows are in the masks
    layer = DynamicLayer
    if backend.compiled:
        layer = functools.partial(StaticLayer, length + steps - 1)
        keys = places.then(places.empty(steps - 1))
    cache = KeyValues(layer_class_to_replicate=layer)
    last = (places.index * (places.segments > 0)).argmax(1, keepdim=True)  # (B, 1)
    query = Places(*(part.gather(1, last) for part in places))
    query = query._replace(index=torch.full_like(last, length - 1))
    with torch.no_grad(), backend.autocast():
        embeds, vision = model.embed(batch)
        hidden = model.run(embeds, places, keys, cache, vision)
        tokens = choose(model.logits(rows_at(hidden, last)[:, 0]), sampling)
    for step in range(steps):
        backend.sync()
        yield tokens
        if step == steps - 1:
            return
        # counted up and not set: a number of Python would be a constant of the program, and the next one another program
        query = query._replace(index=query.index + 1, positions=query.positions + 1)
        keys = keys.at(query) if backend.compiled else keys.then(query)
        with torch.no_grad(), backend.autocast():
            hidden = model.run(model.language.get_input_embeddings()(tokens[:, None]), query, keys, cache)
            tokens = choose(model.logits(hidden[:, 0]), sampling)


class KeyValues(Cache):
    """Keys in the type of their values. Rotary embeddings make keys fp32 under autocast; attention would cast them at every step."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See `Cache.update`."""
        return super().update(key_states.to(value_states.dtype), value_states, *args, **kwargs)


def choose(logits: Tensor, sampling: Sampling) -> Tensor:
    """(B, V) -> (B,): the likeliest token, or one drawn from the smallest set that holds ``top_p`` of the probability."""
    if sampling.temperature <= 0:
        return logits.argmax(-1)
    shares, order = (logits.float() / sampling.temperature).softmax(-1).sort(-1, descending=True)
    shares = shares.masked_fill(shares.cumsum(-1) - shares >= sampling.top_p, 0.0)
    device = sampling.generator.device if sampling.generator else shares.device
    drawn = torch.multinomial(shares.to(device), 1, generator=sampling.generator).to(order.device)
    return order.gather(-1, drawn)[:, 0]


def with_mask(batch: Mapping[str, Tensor], pad: int | None, bos: int | None = None) -> Mapping[str, Tensor]:
    """The batch with a mask: given, or made from runs of the pad token at either end of a row.

    InputError for several rows without either: one of them may be padded, with what only the caller knows. So
    it is for a row that begins with a token that is both padding and the beginning of a text (``bos``).
    """
    rows = len(batch["input_ids"])
    no_pad = pad is None or pad < 0  # the first Llamas say -1 where they have none
    if "segments" in batch or "attention_mask" in batch or (no_pad and rows == 1):
        return batch
    if no_pad:
        raise InputError(
            f"{rows} prompts have no mask, and the language model's pad_token_id is {pad}, so padding would be read "
            "as text; give attention_mask (1 = real, 0 = padding), or one prompt at a time"
        )
    text = batch["input_ids"] != pad
    if pad == bos and not text[:, 0].all():
        raise InputError(
            f"a prompt begins with token {pad}, which is the language model's padding and its beginning of a text: "
            "give attention_mask (1 = real, 0 = padding)"
        )
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
    new ids into text. ``backend`` as in `stream`.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        encode: Callable[..., Mapping[str, Tensor]],
        decode: Callable[[list[int]], str],
        stop: Sequence[int] = (),
        max_new_tokens: int = 512,
        sampling: Sampling = Sampling(),
        backend: Any = None,
    ):
        self.model, self.encode, self.decode = model, encode, decode
        self.stop, self.max_new_tokens, self.sampling = tuple(stop), max_new_tokens, sampling
        self.backend = backend

    def __call__(self, image: Any, text: str, history: Sequence[Turn] = (), **more: Any) -> tuple[str, list[Turn]]:
        """The answer to ``text`` about ``image`` (None, one, or a list) after ``history``, and the history with both turns added."""
        answer = "".join(self.stream(image, text, history, **more)).strip()
        return answer, [*history, ("user", text), ("assistant", answer)]

    def stream(self, image: Any, text: str, history: Sequence[Turn] = (), **more: Any) -> Iterator[str]:
        """The same answer in pieces, as soon as each is certain."""
        images = [] if image is None else image if isinstance(image, list) else [image]
        batch = self.encode(images, [*history, ("user", text)], **more)
        ends = {*self.stop, *end_tokens(self.model)}
        ids: list[int] = []
        shown = ""
        for tokens, _ in stream(self.model, batch, self.max_new_tokens, self.stop, self.sampling, self.backend):
            if (token := int(tokens[0])) not in ends:
                ids.append(token)
            whole = self.decode(ids)
            if len(whole) > len(shown) and not whole.endswith("\ufffd"):  # else a character is still missing bytes
                yield whole[len(shown) :]
                shown = whole
        if rest := self.decode(ids)[len(shown) :]:
            yield rest
