"""Puts a task's requests to a vision-language model: prompts as in training, pictures encoded once, greedy text out.

Several questions about one picture share its encoder features, and the shuffled control finds the same pictures again, so a whole
evaluation encodes each picture once (as far as they fit in `KEPT_BYTES`).
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mmkit.config import VlmConfig
from mmkit.data.conversation import Formatter
from mmkit.data.example import Example, ImageRef
from mmkit.data.images import open_image
from mmkit.data.prompting import prompt_batch
from mmkit.evaluation.task import Decode
from mmkit.models.generation import Sampling, generate

KEPT_BYTES = 512 * 2**20  # of encoder features
BUCKETS = (*range(16, 256, 16), *range(256, 4097, 64))  # prompt lengths, so that few shapes occur
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class VlmAnswerer:
    """``answerer(requests, decode)`` -> one text a request, in order; requests end with the turn to be answered.

    ``transforms`` as `models.build.image_transforms` gives them; ``precision`` is that of training (bf16 runs under autocast).
    """

    def __init__(self, model: torch.nn.Module, config: VlmConfig, tokenizer, transforms: Sequence[Callable], precision: str = "bf16"):
        self.model, self.config, self.tokenizer = model, config, tokenizer
        self.formatter = Formatter.of(tokenizer, config)
        self.pictures = EncodedPictures(model, transforms)
        self.precision = precision

    def __call__(self, requests: Sequence[Example], decode: Decode = Decode()) -> list[str]:
        device = next(self.model.parameters()).device
        stop = self.formatter.stop_ids
        with autocast(device, self.precision):  # the encoders too, as in training
            tensors = {name: tensor.to(device) for name, tensor in self.tensors(requests).items()}
            rows = generate(self.model, tensors, decode.max_new_tokens, stop, Sampling(decode.temperature, decode.top_p))
        return [self.tokenizer.decode([token for token in row if token not in stop], skip_special_tokens=True).strip() for row in rows]

    def tensors(self, requests: Sequence[Example]) -> dict[str, Tensor]:
        """The prompts as one batch, as `VisionLanguageModel` takes it."""
        self.pictures.encode([ref for request in requests for ref in request.images])
        return prompt_batch(requests, self.formatter, self.config, (), buckets=BUCKETS, features=self.pictures).tensors


class EncodedPictures:
    """Encoder features of pictures, computed in batches on demand and kept while they fit; the form of a feature cache."""

    def __init__(self, model: torch.nn.Module, transforms: Sequence[Callable], batch: int = 16):
        self.model, self.transforms, self.n_batch = model, list(transforms), batch
        self.kept: OrderedDict[str, tuple[list[Tensor], tuple[int, int]]] = OrderedDict()
        self.bytes = 0
        self.shapes = [((encoder.side**2, encoder.width), torch.float32) for encoder in model.encoders]

    def encode(self, refs: Sequence[ImageRef]) -> None:
        """Makes sure that all of these are there."""
        wanted = {ref.identity: ref for ref in refs}
        missing = [ref for name, ref in wanted.items() if name not in self.kept]
        self._make_room(wanted)
        device = next(self.model.parameters()).device
        for start in range(0, len(missing), self.n_batch):
            part = missing[start : start + self.n_batch]
            opened = [open_image(ref) for ref in part]
            images = [torch.stack([transform(image) for image in opened]).to(device) for transform in self.transforms]
            with torch.no_grad():
                grids = [grid.float().cpu() for grid in self.model.encode(images)]
            for row, (ref, image) in enumerate(zip(part, opened, strict=True)):
                self.kept[ref.identity] = ([grid[row].clone() for grid in grids], image.size)
                self.bytes += sum(grid[row].nbytes for grid in grids)

    def get(self, ref: ImageRef) -> tuple[list[Tensor], tuple[int, int]]:
        """(a grid (side * side, C) an encoder, (width, height)) of an encoded picture."""
        return self.kept[ref.identity]

    def _make_room(self, wanted: dict[str, ImageRef]) -> None:
        for name in [name for name in self.kept if name not in wanted]:
            if self.bytes <= KEPT_BYTES:
                return
            grids, _ = self.kept.pop(name)
            self.bytes -= sum(grid.nbytes for grid in grids)


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    """Mixed precision for bf16 and fp16, nothing for the others."""
    if precision not in AUTOCAST:
        return contextlib.nullcontext()
    return torch.autocast(device.type, AUTOCAST[precision])
