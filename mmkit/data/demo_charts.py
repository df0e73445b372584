"""The chart pack: bar charts of real tables (``vega_datasets``), questions with exact answers.

The package is read as plain files: importing it would need pandas. Train and test charts come from different tables. One figure
is reused for all charts (a new one costs several times the drawing), and the pictures are kept in the cache.
"""

from __future__ import annotations

import csv
import json
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mmkit.data.demo_files import python_package, row, write_split

LICENCE = "BSD-3-Clause (package); each table has its own source"
CHARTS = {"train": 300, "test": 80}
TEST_TABLES = ("iowa-electricity", "wheat", "iris")
INCHES, DPI = 1.6, 100  # 160 pixels a side
COLOURS = {"red": "#d62728", "blue": "#1f5fd6", "green": "#2ca02c", "yellow": "#f2d21b", "purple": "#8e44ad", "orange": "#ff8c1a",
           "black": "#111111", "gray": "#8c8c8c"}  # fmt: skip


@dataclass(frozen=True)
class Series:
    """One column of a table by label: what a chart draws a part of."""

    table: str
    title: str
    values: dict[str, float]


def build(folder: Path, seed: int):
    """Draws the charts of both splits and writes their questions; returns the asset used."""
    asset = python_package("vega_datasets", "vega_datasets", LICENCE)
    series = tables(asset.folder / "_data")
    (folder / "images").mkdir()
    canvas = Canvas()
    for split, n_charts in CHARTS.items():
        chosen = [one for one in series if (one.table in TEST_TABLES) == (split == "test")]
        by_table = defaultdict(list)
        for one in chosen:
            by_table[one.table].append(one)
        generator, rows = random.Random(f"charts {split} {seed}"), []
        for place in range(n_charts):
            one = generator.choice(by_table[generator.choice(sorted(by_table))])
            bars = some_bars(one, generator)
            name = f"images/{split}-{place:04d}.png"
            canvas.draw(one.title, bars, folder / name)
            rows += chart_rows(f"{split}-{place}", name, one, bars, generator)
        write_split(folder, split, rows)
    return [asset]


def tables(folder: Path) -> list[Series]:
    """Every series of at least three labels with positive values."""
    found = [series for read in READ for series in read(folder)]
    return [series for series in found if len(series.values) >= 3 and min(series.values.values()) >= 0 and max(series.values.values()) > 0]


def _records(folder: Path, name: str) -> list[dict]:
    path = folder / f"{name}.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf8"))
    with (folder / f"{name}.csv").open(encoding="utf8", newline="") as file:
        return list(csv.DictReader(file))


def _means(records: list[dict], label: Callable[[dict], str], column: str) -> dict[str, float]:
    """Mean of a column by label, records without a value left out."""
    sums: dict[str, list[float]] = defaultdict(list)
    for record in records:
        if record.get(column) not in (None, ""):
            sums[label(record)].append(float(record[column]))
    return {name: sum(values) / len(values) for name, values in sums.items()}


def _barley(folder: Path) -> list[Series]:
    records = _records(folder, "barley")
    out = []
    for year in (1931, 1932):
        for by in ("variety", "site"):
            part = [record for record in records if record["year"] == year]
            out.append(Series("barley", f"barley yield {year}", _means(part, lambda record, by=by: record[by], "yield")))
    return out


def _cars(folder: Path) -> list[Series]:
    records = _records(folder, "cars")
    columns = ("Miles_per_Gallon", "Horsepower", "Weight_in_lbs", "Acceleration", "Displacement")
    brand, year = (lambda record: record["Name"].split()[0]), (lambda record: record["Year"][:4])
    return [Series("cars", column.replace("_", " "), _means(records, by, column)) for column in columns for by in (brand, year)]


def _iris(folder: Path) -> list[Series]:
    records = _records(folder, "iris")
    return [
        Series("iris", column, _means(records, lambda record: record["species"], column))
        for column in ("sepalLength", "sepalWidth", "petalLength", "petalWidth")
    ]


def _iowa(folder: Path) -> list[Series]:
    records = _records(folder, "iowa-electricity")
    out = []
    for source in sorted({record["source"] for record in records}):
        part = [record for record in records if record["source"] == source]
        out.append(Series("iowa-electricity", source, _means(part, lambda record: record["year"][:4], "net_generation")))
    return out


def _by_year(folder: Path) -> list[Series]:
    out = []
    for table, columns in (("driving", ("miles", "gas")), ("wheat", ("wheat", "wages"))):
        records = _records(folder, table)
        out += [Series(table, column, _means(records, lambda record: str(record["year"]), column)) for column in columns]
    return out


def _stocks(folder: Path) -> list[Series]:
    records = _records(folder, "stocks")
    years = sorted({record["date"][-4:] for record in records})
    return [
        Series("stocks", f"price {year}", _means([r for r in records if r["date"][-4:] == year], lambda r: r["symbol"], "price"))
        for year in years
    ]


def _weather(folder: Path) -> list[Series]:
    records = _records(folder, "seattle-weather")
    month = lambda record: record["date"][5:7]  # noqa: E731
    return [Series("seattle-weather", column, _means(records, month, column)) for column in ("precipitation", "temp_max", "wind")]


READ = (_barley, _cars, _iris, _iowa, _by_year, _stocks, _weather)


@dataclass(frozen=True)
class Bar:
    """One bar: its label, value and colour name."""

    label: str
    value: float
    colour: str


def some_bars(series: Series, generator: random.Random) -> list[Bar]:
    """Three to six bars whose values differ visibly (by 5% of the tallest), in different colours."""
    labels = sorted(series.values)
    generator.shuffle(labels)
    tallest = max(series.values.values())
    chosen: list[str] = []
    for label in labels:
        value = series.values[label]
        if all(abs(value - series.values[other]) > 0.05 * tallest for other in chosen):
            chosen.append(label)
    chosen = chosen[: generator.randint(3, 6)]
    colours = generator.sample(sorted(COLOURS), len(chosen))
    return [Bar(label, series.values[label], colour) for label, colour in zip(chosen, colours, strict=True)]


def chart_rows(key: str, name: str, series: Series, bars: list[Bar], generator: random.Random) -> list[dict]:
    """Five questions: the number of bars, the colours of the tallest and shortest, and two comparisons, one of each answer."""
    ordered = sorted(bars, key=lambda bar: bar.value)
    low, high = sorted(generator.sample(ordered, 2), key=lambda bar: bar.value)
    asked = [
        ("how many bars are there?", str(len(bars)), "count"),
        ("what color is the tallest bar?", ordered[-1].colour, "colour"),
        ("what color is the shortest bar?", ordered[0].colour, "colour"),
        (f"is the {high.colour} bar taller than the {low.colour} bar?", "yes", "yes-no"),
        (f"is the {low.colour} bar taller than the {high.colour} bar?", "no", "yes-no"),
    ]
    common = {"image": key, "table": series.table, "title": series.title, "bars": [[bar.label, bar.value, bar.colour] for bar in bars]}
    return [
        row(f"{key}-{place}", [name], [("user", f"<image>\n{question}"), ("assistant", answer)],
            answer=answer, question=question, type=kind, **common)
        for place, (question, answer, kind) in enumerate(asked)
    ]  # fmt: skip


class Canvas:
    """One matplotlib figure, cleared and drawn again for each chart; it never touches pyplot's state."""

    def __init__(self):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.figure = Figure(figsize=(INCHES, INCHES), dpi=DPI)
        FigureCanvasAgg(self.figure)
        self.axes = self.figure.add_axes((0.2, 0.16, 0.77, 0.72))

    def draw(self, title: str, bars: list[Bar], path: Path) -> None:
        """Writes one chart as PNG."""
        self.axes.clear()
        places = range(len(bars))
        self.axes.bar(places, [bar.value for bar in bars], color=[COLOURS[bar.colour] for bar in bars])
        self.axes.set_xticks(list(places), [bar.label[:6] for bar in bars], fontsize=5)
        self.axes.tick_params(axis="y", labelsize=5)
        self.axes.set_title(title, fontsize=6)
        self.figure.savefig(path, metadata={"Software": None})
