"""Progress of a long cell: a live curve and bar in JupyterLab, a few plain lines everywhere else.

Under papermill a widget bar freezes at 0% and a text bar leaves one stored line for every refresh, so without a person watching there is
one line every 30 seconds, never more than 25 in all, and the last one says 100%.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

MAX_LINES = 25
EVERY = 30.0  # seconds between plain lines
REDRAW = 1.0  # seconds between drawings of the live curve
WATCHED = ("JPY_SESSION_NAME", "VSCODE_PID", "COLAB_RELEASE_TAG")  # set where a person has the notebook open
HEADLESS = ("papermill", "nbconvert", "jupyter-nbconvert", "jupyter-execute", "pytest")  # what starts a kernel that nobody looks at


def watched() -> bool:
    """Whether a person looks at this notebook: a kernel of JupyterLab or an editor, not one of papermill or nbconvert."""
    if "ipykernel" not in sys.modules or os.environ.get("MMKIT_HEADLESS"):
        return False
    try:
        # names of programs, not any part of a path: the checkout that JupyterLab was started in may be called anything
        parent = {Path(word).name for word in psutil.Process(os.getppid()).cmdline()}
    except psutil.Error:  # the parent belongs to another user or has ended
        parent = set()
    return parent.isdisjoint(HEADLESS) and any(name in os.environ for name in WATCHED)


class Progress:
    """Shows how far a run is; call it with each record of metrics.jsonl, and `close` it (or use ``with``).

    ``total`` is the number of steps, and is corrected by a record's ``total_steps``. ``live`` chooses between the curve and plain
    lines, by default whatever suits the place.
    """

    def __init__(self, total: int, label: str = "step", *, live: bool | None = None, clock: Callable[[], float] = time.monotonic):
        self.total, self.label, self.clock = max(int(total), 1), label, clock
        self.live = watched() if live is None else live
        self.started = self.drawn = clock()
        self.lines, self.step, self.points, self.held_out, self.handle = 0, 0, [], [], None
        self.latest: dict[str, Any] = {}
        self.before, self.note = 0, ""  # steps that were made before, and what is to be said of them

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __call__(self, record: dict[str, Any] | None = None, **values: Any) -> None:
        """One more step is done: ``record`` holds ``step`` and what else there is to show (loss, lr, ...)."""
        first, last = not self.latest, self.step
        self.latest = {**(record or {}), **values}
        self.step = int(self.latest.get("step", self.step + 1))
        self.total = int(self.latest.get("total_steps", self.total))
        trains = "loss" in self.latest  # only training numbers its records one by one
        if trains and first and self.step > 1:
            self.before, self.note = self.step - 1, f"resumed at step {self.step - 1}"
        elif trains and self.step <= last:
            # what the stability guard took back is no longer part of the run, and a line drawn backwards cannot be read
            self.before, self.note = self.before - (last - self.step + 1), f"rewound to step {self.step - 1}"
            self.points = [point for point in self.points if point[0] < self.step]
            self.held_out = [point for point in self.held_out if point[0] < self.step]
        for name, points in (("loss", self.points), ("eval_loss", self.held_out)):
            loss = self.latest.get(name)
            if isinstance(loss, (int, float)) and math.isfinite(loss):
                points.append((self.step, float(loss)))
        if self.step >= self.total:
            return  # the last state is shown by close
        now = self.clock()
        if self.live and now - self.drawn >= REDRAW:
            self._draw(now)
        elif not self.live and now - self.drawn >= EVERY and self.step / self.total >= self.lines / (MAX_LINES - 1):
            self._print(now)

    def close(self) -> None:
        """Shows the last state, where there was one; a run that ended early says so."""
        if not self.latest:
            return
        now = self.clock()
        self._draw(now) if self.live else self._print(now)

    def text(self, now: float) -> str:
        """One line: how far, the loss, the speed and the time left."""
        spent = max(now - self.started, 1e-9)
        parts = [f"{self.label} {self.step}/{self.total} ({100 * self.step // self.total}%)"]
        parts += [
            f"{name} {self.latest[name]:.4g}"
            for name in ("loss", "eval_loss", "grad_norm", "lr")
            if isinstance(self.latest.get(name), (int, float))
        ]
        made = self.step - self.before
        left = spent / made * (self.total - self.step) if made > 0 else math.inf
        parts.append(f"{_clock(spent)} so far" + (f", {_clock(left)} left" if 0 < left < math.inf else ""))
        return ", ".join([*parts, self.note] if self.note else parts)

    def _print(self, now: float) -> None:
        self.drawn, self.lines = now, self.lines + 1
        print(self.text(now), flush=True)

    def _draw(self, now: float) -> None:
        from IPython.display import HTML, display

        self.drawn = now
        drawn = curve(self.points, self.held_out, note=self.note)
        picture = HTML(f"<div>{bar(self.step / self.total)} {self.text(now)}</div>{drawn}")
        if self.handle is None:
            self.handle = display(picture, display_id=True)
        else:
            self.handle.update(picture)


def bar(share: float, width: int = 240) -> str:
    """A progress bar as HTML; ``share`` of it is full."""
    share = min(max(share, 0.0), 1.0)
    return (
        f'<div style="display:inline-block;width:{width}px;height:10px;background:#ddd"><div style="width:{share * width:.0f}px;'
        f'height:10px;background:#1f77b4"></div></div>'
    )


Points = list[tuple[int, float]]


def curve(points: Points, held_out: Points = (), width: int = 640, height: int = 240, most: int = 400, note: str = "") -> str:
    """The loss over steps so far as an SVG picture of at most ``most`` points, that of held-out data as circles; empty before there are
    two. ``note`` stands above the first step. The picture brings its own white ground, since a notebook's may be dark."""
    if len(points) < 2:
        return ""
    from matplotlib.ticker import MaxNLocator

    kept = points[:: math.ceil(len(points) / most)]
    circled = held_out[:: math.ceil(len(held_out) / most) or 1]
    first, last = kept[0][0], kept[-1][0]
    losses = [loss for _, loss in (*kept, *circled)]
    spread = max(losses) - min(losses) or abs(losses[0]) or 1.0
    low, high = min(losses) - 0.05 * spread, max(losses) + 0.05 * spread
    left, right, top, bottom = 78, width - 16, 30, height - 40  # of the box that the axes frame
    x = lambda step: left + (step - first) * (right - left) / max(last - first, 1)  # noqa: E731
    y = lambda loss: bottom - (loss - low) * (bottom - top) / (high - low)  # noqa: E731
    loss_ticks = [tick for tick in MaxNLocator(5).tick_values(low, high) if low <= tick <= high]
    step_ticks = [tick for tick in MaxNLocator(7, integer=True).tick_values(first, last) if first <= tick <= last]
    word = '<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>'
    parts = [f'<path d="M{left} {y(tick):.1f}H{right}" stroke="#e3e3e3"/>' for tick in loss_ticks]
    parts += [f'<path d="M{x(tick):.1f} {bottom}v5" stroke="#333"/>' for tick in step_ticks]
    parts += [word.format(left - 7, y(tick) + 4, "end", f"{tick:.6g}") for tick in loss_ticks]
    parts += [word.format(x(tick), bottom + 18, "middle", f"{tick:,.0f}") for tick in step_ticks]
    parts += [f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#333"/>']
    parts += [word.format((left + right) / 2, height - 6, "middle", "step")]
    parts += [f'<text transform="translate(14 {(top + bottom) / 2}) rotate(-90)" text-anchor="middle">loss (nats)</text>']
    line = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in kept)
    parts += [f'<polyline points="{line}" fill="none" stroke="#0072b2" stroke-width="1.5"/>']
    parts += [f'<circle cx="{x(step):.1f}" cy="{y(loss):.1f}" r="3.5" fill="#d55e00"/>' for step, loss in circled]
    parts += [word.format(left, 18, "start", note)] if note else []
    names = [("#0072b2", "training"), *([("#d55e00", "held out")] if circled else [])]
    for place, (colour, name) in enumerate(reversed(names)):
        parts += [f'<text x="{right - 70 * place}" y="18" text-anchor="end" style="fill:{colour}">{name}</text>']
    style = "background:#fff;font:12px sans-serif;fill:#222;display:block;max-width:100%"
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" style="{style}">{"".join(parts)}</svg>'


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
