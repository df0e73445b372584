"""Puts a task's requests to a vision-language model: prompts as in training, pictures encoded once, greedy text out.

Several questions about one picture share its encoder features, and the shuffled control finds the same pictures again, so a whole
evaluation encodes each picture once (as far as they fit in `KEPT_BYTES`).
"""

from __future__ import annotations

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
from mmkit.sharding.backend import Backend

KEPT_BYTES = 512 * 2**20  # of encoder features
PICTURES = 16  # encoded at a time
BUCKETS = (*range(16, 256, 16), *range(256, 4097, 64))  # prompt lengths, so that few shapes occur


class VlmAnswerer:
    """``answerer(requests, decode)`` -> one text a request, in order; requests end with the turn to be answered.

    ``transforms`` as `models.build.image_transforms` gives them; ``backend`` is where the model was put, and its precision.
    """

    def __init__(self, model: torch.nn.Module, config: VlmConfig, tokenizer, transforms: Sequence[Callable], backend: Backend):
        self.model, self.config, self.tokenizer, self.backend = model, config, tokenizer, backend
        self.formatter = Formatter.of(tokenizer, config)
        self.pictures = EncodedPictures(model, transforms, backend)
        self.n_rows = 0  # of the largest batch so far

    def __call__(self, requests: Sequence[Example], decode: Decode = Decode()) -> list[str]:
        wanted = len(requests)
        if self.backend.compiled:  # a smaller last batch would be two more programs: it is filled up
            self.n_rows = max(self.n_rows, wanted)
            requests = [*requests, *requests[:1] * (self.n_rows - wanted)]
        stop, sampling = self.formatter.stop_ids, Sampling(decode.temperature, decode.top_p)
        # around all steps: the casts of fp32 weights are kept until it ends
        with self.backend.autocast():
            rows = generate(self.model, self.tensors(requests), decode.max_new_tokens, stop, sampling, self.backend)[:wanted]
        return [self.tokenizer.decode([token for token in row if token not in stop], skip_special_tokens=True).strip() for row in rows]

    def tensors(self, requests: Sequence[Example]) -> dict[str, Tensor]:
        """The prompts as one batch, as `VisionLanguageModel` takes it."""
        self.pictures.encode([ref for request in requests for ref in request.images])
        return prompt_batch(requests, self.formatter, self.config, (), buckets=BUCKETS, features=self.pictures).tensors


class EncodedPictures:
    """Encoder features of pictures, computed in batches on demand and kept while they fit; the form of a feature cache."""

    def __init__(self, model: torch.nn.Module, transforms: Sequence[Callable], backend: Backend, batch: int = PICTURES):
        self.model, self.transforms, self.backend, self.n_batch = model, list(transforms), backend, batch
        self.kept: OrderedDict[str, tuple[list[Tensor], tuple[int, int]]] = OrderedDict()
        self.bytes = 0
        self.shapes = [((encoder.side**2, encoder.width), torch.float32) for encoder in model.encoders]

    def encode(self, refs: Sequence[ImageRef]) -> None:
        """Makes sure that all of these are there."""
        wanted = {ref.identity: ref for ref in refs}
        missing = [ref for name, ref in wanted.items() if name not in self.kept]
        self._make_room(wanted)
        for start in range(0, len(missing), self.n_batch):
            part = missing[start : start + self.n_batch]
            opened = [open_image(ref) for ref in part]
            # one shape, so one program, where programs are compiled for shapes; what fills it up is not kept
            filled = opened + opened[:1] * (self.n_batch - len(part) if self.backend.compiled else 0)
            pixels = {str(e): torch.stack([transform(image) for image in filled]) for e, transform in enumerate(self.transforms)}
            with torch.no_grad(), self.backend.autocast():  # the encoders too, as in training
                grids = [grid.float() for grid in self.model.encode(list(self.backend.shard(pixels).values()))]
            self.backend.sync()
            grids = [grid.cpu() for grid in grids]
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
