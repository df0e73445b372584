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
from typing import Any

import psutil

MAX_LINES = 25
EVERY = 30.0  # seconds between plain lines
REDRAW = 1.0  # seconds between drawings of the live curve
WATCHED = ("JPY_SESSION_NAME", "VSCODE_PID", "COLAB_RELEASE_TAG")  # set where a person has the notebook open


def watched() -> bool:
    """Whether a person looks at this notebook: a kernel of JupyterLab or an editor, not one of papermill or nbconvert."""
    if "ipykernel" not in sys.modules or os.environ.get("MMKIT_HEADLESS"):
        return False
    try:
        parent = " ".join(psutil.Process(os.getppid()).cmdline())
    except psutil.Error:  # the parent belongs to another user or has ended
        parent = ""
    headless = any(word in parent for word in ("papermill", "nbconvert", "pytest", "mmkit"))
    return not headless and any(name in os.environ for name in WATCHED)


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

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __call__(self, record: dict[str, Any] | None = None, **values: Any) -> None:
        """One more step is done: ``record`` holds ``step`` and what else there is to show (loss, lr, ...)."""
        self.latest = {**(record or {}), **values}
        self.step = int(self.latest.get("step", self.step + 1))
        self.total = int(self.latest.get("total_steps", self.total))
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
        left = spent / self.step * (self.total - self.step) if self.step else math.inf
        parts.append(f"{_clock(spent)} so far" + (f", {_clock(left)} left" if 0 < left < math.inf else ""))
        return ", ".join(parts)

    def _print(self, now: float) -> None:
        self.drawn, self.lines = now, self.lines + 1
        print(self.text(now), flush=True)

    def _draw(self, now: float) -> None:
        from IPython.display import HTML, display

        self.drawn = now
        picture = HTML(f"<div>{bar(self.step / self.total)} {self.text(now)}</div>{curve(self.points, self.held_out)}")
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


def curve(points: Points, held_out: Points = (), width: int = 560, height: int = 150, most: int = 400) -> str:
    """The loss so far as an SVG picture of at most ``most`` points, that of held-out data as circles; empty before there are two."""
    if len(points) < 2:
        return ""
    kept = points[:: math.ceil(len(points) / most)]
    steps, losses = [step for step, _ in kept], [loss for _, loss in kept]
    circled = held_out[:: math.ceil(len(held_out) / most) or 1]
    losses += [loss for _, loss in circled]
    low, high = min(losses), max(losses)
    across = (width - 60) / max(steps[-1] - steps[0], 1)
    up = (height - 30) / ((high - low) or 1.0)
    place = lambda step, loss: (f"{50 + (step - steps[0]) * across:.1f}", f"{10 + (high - loss) * up:.1f}")  # noqa: E731
    path = " ".join(",".join(place(*point)) for point in kept)
    circles = "".join('<circle cx="{}" cy="{}" r="3" fill="#d62728"/>'.format(*place(*point)) for point in circled)
    return (
        f'<svg width="{width}" height="{height}" style="font:11px sans-serif"><polyline points="{path}" fill="none" stroke="#1f77b4"/>'
        f"{circles}"
        f'<text x="0" y="14">{high:.3g}</text><text x="0" y="{height - 18}">{low:.3g}</text>'
        f'<text x="50" y="{height - 4}">step {steps[0]}</text><text x="{width - 70}" y="{height - 4}">step {steps[-1]}</text></svg>'
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
