"""Tables for people: a list of rows (dicts) as HTML in a notebook and as aligned text elsewhere."""

from __future__ import annotations

import html as escaping
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


class Table:
    """Rows that show themselves: HTML in a notebook, aligned text in print."""

    def __init__(self, rows: Sequence[Row], caption: str = ""):
        self.rows, self.caption = list(rows), caption

    def _repr_html_(self) -> str:
        return html(self.rows, self.caption)

    def __str__(self) -> str:
        return (f"{self.caption}\n" if self.caption else "") + text(self.rows)

    __repr__ = __str__


def columns(rows: Sequence[Row]) -> list[str]:
    """Names of all columns in the order they first appear."""
    return list(dict.fromkeys(name for row in rows for name in row))


def shown(value: Any) -> str:
    """One cell: thousands apart, floats short, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, (list, tuple)):
        return ", ".join(shown(part) for part in value)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {shown(part)}" for key, part in value.items())
    return str(value)


def numeric(values: Sequence[Any]) -> bool:
    """Whether a column holds nothing but numbers."""
    return all(value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)) for value in values)


def html(rows: Sequence[Row], caption: str = "") -> str:
    """The rows as an HTML table; columns of numbers stand on the right."""
    sides = {name: "right" if numeric([row.get(name) for row in rows]) else "left" for name in columns(rows)}
    head = "".join(f'<th style="text-align:{side}">{escaping.escape(name)}</th>' for name, side in sides.items())
    body = []
    for row in rows:
        cells = (f'<td style="text-align:{side}">{escaping.escape(shown(row.get(name)))}</td>' for name, side in sides.items())
        body.append(f"<tr>{''.join(cells)}</tr>")
    title = f"<caption><b>{escaping.escape(caption)}</b></caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def text(rows: Sequence[Row]) -> str:
    """The rows as aligned columns of plain text."""
    names = columns(rows)
    cells = [[shown(row.get(name)) for name in names] for row in rows]
    widths = [max([len(name), *(len(line[i]) for line in cells)]) for i, name in enumerate(names)]
    numbers = [numeric([row.get(name) for row in rows]) for name in names]
    lines = [names, *cells]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(line, widths, numbers, strict=True)
        ).rstrip()
        for line in lines
    )
