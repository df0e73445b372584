"""Published mixtures as data: files of ``params/mixtures`` with sources, sizes, category ratios and the cap on one source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from mmkit.config import ConfigError, DataConfig, Settings, SourceConfig, nearest
from mmkit.data.mixture import pool
from mmkit.presets import params_files, read_mapping
from mmkit.values import checked


class MixtureSource(Settings):
    """A row of a mixture."""

    name: str  # of the file ROOT/NAME.jsonl
    category: str  # whose share it has a part of
    samples: int = Field(gt=0)  # as published


class MixtureFile(Settings):
    """A file of ``params/mixtures``."""

    name: str  # for people
    cap: int | None = Field(None, gt=0)  # most samples of one source
    ratios: dict[str, Annotated[float, Field(gt=0)]] = {}  # category -> share
    sources: tuple[MixtureSource, ...] = Field(min_length=1)  # what is mixed


def recipe(name: str) -> dict[str, Any]:
    """The content of ``params/mixtures/NAME.yaml``, a `MixtureFile`; ConfigError where it is none."""
    known = params_files("mixtures/*.yaml")
    if name not in known:
        raise ConfigError(f"no mixture {name!r}{nearest(name, known)}; mixtures are {', '.join(known)}")
    path = known[name][0]
    return checked(MixtureFile, read_mapping(path), str(path)).model_dump()


def sources_of(data: DataConfig) -> tuple[SourceConfig, ...]:
    """What a run trains on: ``data.sources``, or those of ``data.mixture`` with the files of ``data.mixture_root``.

    The mixture's ``cap`` limits every source (the paper's threshold t). Where it has ``ratios``, categories
    get these shares and inside a category sources keep their capped sizes; else sizes decide alone.
    ConfigError where both settings name sources, or for a name that is not known.
    """
    if data.mixture is None:
        return data.sources
    facts = recipe(data.mixture)
    if data.sources:
        names = ", ".join(source.name for source in data.sources[:3])
        raise ConfigError(
            f"data.sources ({names}) and data.mixture {data.mixture!r} both say what to train on; set "
            "data.sources=[] to train on the mixture, or leave data.mixture out"
        )
    root = data.mixture_root.rstrip("/")
    sources = [
        SourceConfig(
            name=row["name"], format="llava", path=f"{root}/{row['name']}.jsonl", images=f"{root}/images",
            cap=facts.get("cap"), category=row["category"],
        )
        for row in facts["sources"]
    ]  # fmt: skip
    if not facts.get("ratios"):
        return tuple(sources)
    return with_category_shares(sources, facts["ratios"], {row["name"]: row["samples"] for row in facts["sources"]})


def with_category_shares(sources: Sequence[SourceConfig], shares: Mapping[str, float], sizes: Mapping[str, int]) -> tuple[SourceConfig, ...]:
    """The sources weighted so that categories have ``shares`` (normalised) and sources keep their capped sizes inside one."""
    if unknown := {source.category for source in sources} - set(shares):
        raise ConfigError(f"category {min(unknown)!r} has no share{nearest(min(unknown), shares)}; shares are given for {', '.join(shares)}")
    pools = {source.name: pool(source, sizes[source.name]) for source in sources}
    of_category: dict[str, int] = defaultdict(int)
    for source in sources:
        of_category[source.category] += pools[source.name]
    total = sum(shares[category] for category in of_category)
    return tuple(
        source.model_copy(update={"weight": shares[source.category] / total * pools[source.name] / of_category[source.category]})
        for source in sources
    )


def realised(mixture, counts: Mapping[str, int]) -> list[dict[str, Any]]:
    """One row a source: the share wished and the share of ``counts`` (`Loader.counts["sources"]`), and by how much they differ."""
    total = max(sum(counts.values()), 1)
    return [
        {
            "source": row["source"],
            "category": row["category"],
            "wished": row["share"],
            "seen": counts.get(row["source"], 0),
            "realised": counts.get(row["source"], 0) / total,
            "difference": counts.get(row["source"], 0) / total - row["share"],
        }
        for row in mixture.lines()
    ]
