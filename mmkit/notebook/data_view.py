"""What the data notebook looks at: examples of each source, their lengths in tokens, one conversation as the model is given it."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

from mmkit.config import RunConfig
from mmkit.data.conversation import Encoded, Formatter
from mmkit.data.example import BadRecord, Example

PUBLISHED_LENGTH = 2048  # the originals pad every sample to this many positions (Cambrian-1's and LLaVA's model_max_length)


def open_data(run: RunConfig) -> Any:
    """The mixture of a run's sources; ConfigError names a source that is not there and what makes it."""
    from mmkit.data.readers import open_mixture

    return open_mixture(run.data)


def pack_rows(run: RunConfig) -> list[dict[str, Any]]:
    """One row a pack the run reads (made first where it is not in the cache), with licence, sources, counts and what is missing."""
    from mmkit.data.demo import prepare

    names = list(dict.fromkeys(source.path for source in (*run.data.sources, *run.data.validation) if source.format == "pack"))
    fields = ("name", "status", "about", "counts", "sources", "licences", "reason")
    return [{field: getattr(record, field) for field in fields} for record in prepare(names)]


def first_examples(mixture: Any, count: int) -> list[Example]:
    """``count`` examples, taken in turn from every source, evenly spread over it."""
    each = -(-count // len(mixture.sources))
    chosen = []
    for source in mixture.sources:
        step = max(len(source) // each, 1)
        chosen.append([source[place] for place in range(0, min(step * each, len(source)), step)])
    turns = max(map(len, chosen))
    return [part[turn] for turn in range(turns) for part in chosen if turn < len(part)][:count]


def formatter_of(run: RunConfig) -> Formatter:
    """The formatter of this run's template and tokenizer."""
    from mmkit.models.build import tokenizer

    return Formatter.of(tokenizer(run.model), run.model)


def encode(run: RunConfig, example: Example) -> tuple[Encoded, Any]:
    """(the conversation as ids and what carries loss, the tokenizer); for a contrastive model its caption's tokens."""
    if run.model.kind == "vlm":
        formatter = formatter_of(run)
        return formatter.encode(example), formatter.tokenizer
    return _caption(run, example)


def _caption(run: RunConfig, example: Example) -> tuple[Encoded, Any]:
    import numpy as np

    from mmkit.models.build import tokenizer

    words = tokenizer(run.model)
    ids = np.asarray(words([example.caption])[0])
    return Encoded(ids, ids != 0), getattr(words, "tokenizer", words)


def lengths(run: RunConfig, mixture: Any, sample: int = 200) -> dict[str, list[int]]:
    """Tokens of up to ``sample`` conversations of each source, pictures counted with all their slots; unusable ones are left out."""
    if run.model.kind != "vlm":
        named = zip(mixture.configs, mixture.sources, strict=True)
        return {config.name: [len(text.split()) for text in _captions(source, sample)] for config, source in named}
    formatter, slots = formatter_of(run), run.model.n_image_tokens
    counted = {}
    for config, source in zip(mixture.configs, mixture.sources, strict=True):
        step = max(len(source) // sample, 1)
        counted[config.name] = [length for place in range(0, len(source), step) if (length := _length(formatter, source[place], slots))][
            :sample
        ]
    return counted


def fill_rows(run: RunConfig, mixture: Any, batches: int = 12, sample: int = 100) -> list[dict[str, Any]]:
    """Share of positions that hold real tokens, in percent: in this run's rows, and with each conversation padded as the originals do."""
    from mmkit.data.loader import loader
    from mmkit.models.build import image_transforms, tokenizer

    if run.model.kind != "vlm":
        return []
    settings = {"train": True, "seed": run.seed, "device_batch": run.train.device_batch, "source": mixture}
    with loader(run.data, run.model, tokenizer(run.model), image_transforms(run.model), **settings) as made:
        for _ in range(batches):
            next(made)
        here = made.fill
    each = [min(length, PUBLISHED_LENGTH) for found in lengths(run, mixture, sample).values() for length in found]
    padded = sum(each) / (PUBLISHED_LENGTH * max(len(each), 1))
    return [
        {"rows": f"this run's, {batches} batches", "real positions %": round(100 * here, 1)},
        {"rows": f"one conversation padded to {PUBLISHED_LENGTH}", "real positions %": round(100 * padded, 1)},
    ]


def drawn_rows(run: RunConfig, mixture: Any, samples: int = 10_000) -> list[dict[str, Any]]:
    """Wished and realised share of each source among the first ``samples`` of the first epoch, in the order in which training draws them."""
    from mmkit.data.mixture import iterate
    from mmkit.data.recipe import realised

    grouped = run.train.global_batch if run.data.group_by_length else 0
    order = mixture.order(run.seed, 0, by_image=run.data.share_image, megabatch=grouped)
    return realised(mixture, Counter(mixture.source_name(index) for index in islice(iterate(mixture, order), samples)))


def _captions(source: Any, sample: int) -> list[str]:
    return [source[place].caption for place in range(0, len(source), max(len(source) // sample, 1))][:sample]


def _length(formatter: Formatter, example: Example, slots: int) -> int:
    try:
        return formatter.encode(example).length(slots)
    except BadRecord:
        return 0
