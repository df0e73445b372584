"""Conversations to token ids with labels: one tokenisation, labels from the character spans of that same text.

Nothing is tokenised twice and no separator length is assumed, so labels are right for every tokenizer (user report U01). A
conversation without a supervised token is a `BadRecord`, never a silent zero loss.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmkit.config import IGNORE_INDEX, IMAGE_TOKEN_INDEX, REGION_TOKEN_INDEX, ConfigError, nearest
from mmkit.data.example import IMAGE, REGION, REGION_FEATURE, BadRecord, Example, Turn, checked
from mmkit.data.offsets import adds_bos, tokens_with_starts
from mmkit.data.templates import EOS, TEMPLATES, Rendered, render, render_with_tokenizer

_MARKER = re.compile(f"{re.escape(REGION_FEATURE)}|{re.escape(REGION)}")


@dataclass(frozen=True, eq=False)
class Encoded:
    """A tokenised conversation. One -200 stands for a whole picture, one -300 for a region token.

    ids (L,) int64; trained (L,) bool; regions: indices into the example's regions, one for each -300 in order.
    """

    ids: np.ndarray
    trained: np.ndarray
    regions: tuple[int, ...] = ()

    @property
    def labels(self) -> np.ndarray:
        """(L,) int64: the ids where trained, -100 elsewhere; not shifted."""
        return np.where(self.trained, self.ids, IGNORE_INDEX)

    @property
    def n_images(self) -> int:
        """Pictures in the conversation."""
        return int((self.ids == IMAGE_TOKEN_INDEX).sum())

    def length(self, slots: int) -> int:
        """Tokens once every picture takes ``slots`` places."""
        return len(self.ids) + self.n_images * (slots - 1)


class Formatter:
    """Turns examples into `Encoded` for one tokenizer and template.

    ``region_token`` is the text of the region token (`RegionConfig.token`) or None for a model without region features: its
    ``<region>`` becomes coordinates alone. ``stop_tokens`` are further end-of-turn strings of the language model.
    """

    def __init__(self, tokenizer, template: str, region_token: str | None = None, stop_tokens: Sequence[str] = ()):
        if template != "tokenizer" and template not in TEMPLATES:
            known = (*TEMPLATES, "tokenizer")
            raise ConfigError(f"model.template: no template {template!r}{nearest(template, known)}; templates are {', '.join(known)}")
        self.tokenizer, self.name, self.region_token = tokenizer, template, region_token
        self.template = TEMPLATES.get(template)
        self.bos = tokenizer.bos_token_id if adds_bos(tokenizer) else None
        self.eos = tokenizer.eos_token or ""
        known_region = region_token is not None and self._single(region_token) is not None
        self._region_id = self._single(region_token) if known_region else None
        self._split = re.compile("|".join(re.escape(mark) for mark in ([IMAGE] if known_region else [IMAGE, region_token or IMAGE])))
        self._stop_tokens = tuple(stop_tokens)

    @classmethod
    def of(cls, tokenizer, model) -> Formatter:
        """The formatter of a `VlmConfig`."""
        return cls(tokenizer, model.template, model.regions.token if model.regions else None, model.language.stop_tokens)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: end of sequence, the template's end of turn, the language model's own stop tokens."""
        ends = [*self._stop_tokens, self.template.end.replace(EOS, self.eos).strip() if self.template else ""]
        ids = [self.tokenizer.eos_token_id, *(self._single(end) for end in ends if end)]
        return tuple(dict.fromkeys(token for token in ids if token is not None))

    def render(self, turns: Sequence[Turn], generate: bool = False) -> Rendered:
        """Text and trained spans of turns whose region markers are already written out."""
        if self.template is None:
            return render_with_tokenizer(self.tokenizer, turns, generate)
        return render(self.template, turns, generate, self.eos or EOS)

    def encode(self, example: Example) -> Encoded:
        """Ids and labels for training; BadRecord for wrong counts, roles out of order or nothing to learn from."""
        encoded = self._encode(example, generate=False)
        if not encoded.trained.any():
            raise BadRecord(
                f"no supervised token with template {self.name!r}; it needs an answer that is not empty",
                key=example.key, source=example.source, reason="no supervised token",
            )  # fmt: skip
        return encoded

    def prompt(self, example: Example) -> Encoded:
        """Ids up to where the next answer begins: a last assistant turn is left out."""
        turns = example.turns[:-1] if example.turns and example.turns[-1].role == "assistant" else example.turns
        dropped = sum(len(_MARKER.findall(turn.text)) for turn in example.turns[len(turns) :])
        kept = example.regions[: len(example.regions) - dropped]
        return self._encode(replace(example, turns=turns, regions=kept), generate=True)

    def prompt_for(self, turns: Sequence[Turn]) -> str:
        """The prompt text that asks for the next answer."""
        return self.render(turns, generate=True).text

    def _encode(self, example: Example, generate: bool) -> Encoded:
        turns, regions = self._write_regions(checked(example))
        try:
            rendered = self.render(turns, generate)
        except ValueError as error:
            raise BadRecord(str(error), key=example.key, source=example.source, reason="turns") from None
        ids, starts = self._tokens(rendered.text)
        edges = np.array(rendered.spans, dtype=np.int64).reshape(-1)
        # starts lie inside a span where an odd number of span edges is at or before them
        trained = (np.searchsorted(edges, starts, side="right") % 2).astype(bool)
        images_or_regions = ids < 0
        return Encoded(ids, trained & ~images_or_regions, regions)

    def _write_regions(self, example: Example) -> tuple[list[Turn], tuple[int, ...]]:
        """Turns with coordinates (and, for users, the region token) in place of markers; the regions that have a token."""
        if not example.regions:
            return list(example.turns), ()
        turns, used, count = [], [], 0
        for turn in example.turns:
            asks = turn.role == "user" and self.region_token is not None
            parts, end = [], 0
            for match in _MARKER.finditer(turn.text):
                words = [] if match[0] == REGION_FEATURE else [example.regions[count].text]
                if asks:
                    words.append(self.region_token)
                    used.append(count)
                parts += [turn.text[end : match.start()], " ".join(words)]
                end, count = match.end(), count + 1
            turns.append(replace(turn, text="".join([*parts, turn.text[end:]])))
        return turns, tuple(used)

    def _tokens(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the text, markers as negative ids, and the character each starts at."""
        ids, starts, end = [], [], 0
        for match in self._split.finditer(text):
            self._append(text[end : match.start()], end, ids, starts)
            ids.append(IMAGE_TOKEN_INDEX if match[0] == IMAGE else REGION_TOKEN_INDEX)
            starts.append(match.start())
            end = match.end()
        self._append(text[end:], end, ids, starts)
        if self.bos is not None and ids[:1] != [self.bos]:
            ids.insert(0, self.bos)
            starts.insert(0, -1)
        ids = np.array(ids, dtype=np.int64)
        if self._region_id is not None:
            ids[ids == self._region_id] = REGION_TOKEN_INDEX
        return ids, np.array(starts, dtype=np.int64)

    def _append(self, chunk: str, offset: int, ids: list[int], starts: list[int]) -> None:
        chunk_ids, chunk_starts = tokens_with_starts(self.tokenizer, chunk)
        ids += chunk_ids
        starts += [start + offset for start in chunk_starts]

    def _single(self, text: str) -> int | None:
        """The id of a text that is one token of the vocabulary, or None."""
        token = self.tokenizer.convert_tokens_to_ids(text)
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        return token if isinstance(token, int) and token >= 0 and (token != unknown or text == self.tokenizer.unk_token) else None
