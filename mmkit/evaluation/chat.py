"""A conversation with a trained model in a notebook: pictures and regions in, text out, by the code that evaluation uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mmkit.config import VlmConfig
from mmkit.data.conversation import Formatter
from mmkit.data.example import IMAGE, Example, ImageRef, Region, Turn
from mmkit.data.prompting import prompt_batch
from mmkit.errors import InputError
from mmkit.evaluation.answering import BUCKETS
from mmkit.models.generation import Chat, Sampling
from mmkit.sharding.backend import Backend


def open_chat(
    model: torch.nn.Module,
    config: VlmConfig,
    tokenizer,
    transforms: Sequence[Callable],
    backend: Backend,
    max_new_tokens: int = 512,
    sampling: Sampling = Sampling(),
) -> Chat:
    """``chat(image, text, history, regions=...)`` for this model; an image is a path, URL, bytes, PIL image or array.

    Text may say where pictures stand (``<image>``), else they come first; each ``<region>`` takes the next of ``regions``, which are
    those of the whole conversation in order. ``transforms`` as `models.build.image_transforms` gives them.
    ``backend`` is where the model was put, and its precision: ``open_chat(*opened(export, backend), backend)`` (`scoring.opened`).
    """
    formatter = Formatter.of(tokenizer, config)
    # a conversation gets longer and longer: where programs are compiled for shapes, few lengths occur
    buckets = BUCKETS if backend.compiled else ()

    def encode(images: list[Any], turns: list[tuple[str, str]], regions: Sequence[Region] = ()) -> dict[str, torch.Tensor]:
        refs = tuple(ImageRef(image) for image in images)
        example = Example("chat", refs, with_image_markers(turns, len(refs)), tuple(regions))
        return prompt_batch([example], formatter, config, transforms, buckets=buckets).tensors

    words = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)  # noqa: E731
    return Chat(model, encode, words, formatter.stop_ids, max_new_tokens, sampling, backend)


def with_image_markers(turns: Sequence[tuple[str, str]], count: int) -> tuple[Turn, ...]:
    """Turns in which ``count`` pictures have their places: markers that no text has come before the first message."""
    missing = count - sum(text.count(IMAGE) for _, text in turns)
    if missing < 0:
        raise InputError(f"the text has {count - missing} {IMAGE} markers for {count} pictures; give as many pictures as markers")
    (role, first), *rest = turns
    return (Turn(role, f"{IMAGE}\n" * missing + first), *(Turn(role, text) for role, text in rest))
