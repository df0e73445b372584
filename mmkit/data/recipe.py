"""Published mixtures as data: files of ``params/mixtures`` with sources, sizes, category ratios and the cap on one source."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmkit.config import ConfigError, SourceConfig, nearest
from mmkit.data.mixture import pool
from mmkit.presets import params_files, read_mapping


def recipe(name: str) -> dict[str, Any]:
    """The content of ``params/mixtures/NAME.yaml``: name, cap, ratios (category -> share), sources (name, category, samples)."""
    known = params_files("mixtures/*.yaml")
    if name not in known:
        raise ConfigError(f"no mixture {name!r}{nearest(name, known)}; mixtures are {', '.join(known)}")
    return read_mapping(known[name][0])


def sources_of(
    name: str, folder: str, *, images: str | None = None, cap: int | None = None, ratios: bool = False, file: str = "{name}.jsonl"
) -> tuple[SourceConfig, ...]:
    """Config entries of a published mixture whose source files lie in ``folder`` as ``file`` says.

    ``cap`` limits every source (the paper's threshold t). With ``ratios`` the categories get their published shares, inside a
    category sources keep their (capped) sizes; without, sizes decide alone.
    """
    facts = recipe(name)
    sources = [
        SourceConfig(
            name=row["name"],
            format="llava",
            path=str(Path(folder) / file.format(name=row["name"])),
            images=images or folder,
            cap=cap,
            category=row["category"],
        )
        for row in facts["sources"]
    ]
    if not ratios:
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


def category_shares(rows: Sequence[Mapping[str, Any]], field: str = "realised") -> dict[str, float]:
    """Shares of categories from rows of `realised` or `Mixture.lines`."""
    out: Counter = Counter()
    for row in rows:
        out[row["category"]] += row[field]
    return dict(out)
