"""Progress lines stay few when nobody watches and the live picture stays small."""

from __future__ import annotations

import re
import sys

import psutil
import pytest

from mmkit.notebook.progress import MAX_LINES, Progress, bar, curve, watched


class Clock:
    """Seconds that pass only when told."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("seconds_a_step", [0.001, 1.0, 10.0, 600.0])
def test_a_thousand_steps_print_at_most_25_lines_and_the_last_says_100_percent(capsys, seconds_a_step):
    clock = Clock()
    with Progress(1000, live=False, clock=clock) as progress:
        for step in range(1, 1001):
            clock.now += seconds_a_step
            progress({"step": step, "loss": 1 / step})
    lines = capsys.readouterr().out.splitlines()
    assert 1 <= len(lines) <= MAX_LINES
    assert "step 1000/1000 (100%)" in lines[-1] and "100%" not in "".join(lines[:-1])
    if seconds_a_step == 1.0:
        assert len(lines) > 15, "a long run is not silent"


def test_lines_come_at_least_30_seconds_apart(capsys):
    clock = Clock()
    progress = Progress(100, live=False, clock=clock)
    for _ in range(29):
        clock.now += 1
        progress()
    assert capsys.readouterr().out == ""
    clock.now += 1
    progress()
    assert capsys.readouterr().out.startswith("step 30/100 (30%)")


def test_a_run_that_ends_early_does_not_claim_100_percent(capsys):
    with Progress(10, live=False, clock=Clock()) as progress:
        progress({"step": 4, "loss": float("nan")})
    assert "4/10 (40%)" in capsys.readouterr().out


def test_a_test_run_is_not_watched():
    assert watched() is False


def test_the_loss_of_held_out_data_is_shown_beside_that_of_training(capsys):
    with Progress(10, live=False, clock=Clock()) as progress:
        progress({"step": 1, "loss": 3.0})
        progress({"step": 2, "loss": 2.0, "eval_loss": 2.5})
    assert "loss 2, eval_loss 2.5" in capsys.readouterr().out
    drawn = curve(progress.points, progress.held_out)
    [(x, y)] = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', drawn)
    [(left, top, right, bottom)] = re.findall(r'points="([\d.]+),([\d.]+) ([\d.]+),([\d.]+)"', drawn)
    assert x == right and float(y) == pytest.approx((float(top) + float(bottom)) / 2, abs=0.1), "2.5 is half-way from 3 to 2"


def test_the_curve_is_thinned_and_the_bar_is_bounded():
    assert curve([(1, 1.0)]) == ""
    drawn = curve([(step, 1.0 / step) for step in range(1, 5001)])
    [line] = re.findall(r'points="([^"]*)"', drawn)
    assert 300 < len(line.split()) <= 400
    assert "width:240px;height:10px;background:#1f77b4" in bar(3.0)


def test_the_curve_has_its_own_ground_axes_with_ticks_and_names():
    drawn = curve([(step, 5 - step / 100) for step in range(1, 301)], [(150, 3.6)])
    assert "background:#fff" in drawn and "fill:#222" in drawn, "black on white, whatever the theme"
    words = re.findall(r">([^<>]+)</text>", drawn)
    assert {"step", "loss (nats)", "training", "held out"} <= set(words)
    numbers = [float(word) for word in words if re.fullmatch(r"[\d.]+", word)]
    assert {100.0, 200.0, 300.0} & set(numbers) and any(2 <= number <= 5 for number in numbers)


def test_a_resumed_run_says_where_and_counts_the_time_of_its_own_steps(capsys):
    clock = Clock()
    with Progress(100, live=False, clock=clock) as progress:
        for step in (41, 42, 43, 44):
            clock.now += 10
            progress({"step": step, "loss": 1.0})
    shown = capsys.readouterr().out.splitlines()[-1]
    assert "resumed at step 40" in shown and "step 44/100 (44%)" in shown
    assert "9:20 left" in shown, "56 steps of 10 seconds"
    assert ">resumed at step 40<" in curve(progress.points, note=progress.note)


def test_a_new_run_and_a_task_that_is_scored_resume_nothing(capsys):
    with Progress(10, live=False, clock=Clock()) as progress:
        progress({"step": 1, "loss": 1.0})
    with Progress(10, live=False, clock=Clock()) as progress:
        progress({"step": 4, "total_steps": 10})
    assert "resumed" not in capsys.readouterr().out


def test_a_rewind_takes_its_steps_out_of_the_curve(capsys):
    with Progress(10, live=False, clock=Clock()) as progress:
        for step, loss in ((1, 4.0), (2, 3.0), (3, 9.0), (4, 99.0), (3, 2.5), (4, 2.0)):
            progress({"step": step, "loss": loss})
    assert progress.points == [(1, 4.0), (2, 3.0), (3, 2.5), (4, 2.0)]
    assert "rewound to step 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "seen"),
    [
        (["/home/me/mmkit/.venv/bin/python", "/home/me/mmkit/.venv/bin/jupyter-lab", "--port=8889"], True),
        (["python", "-m", "papermill", "in.ipynb"], False),
        (["/home/me/mmkit/.venv/bin/python", "/home/me/mmkit/.venv/bin/papermill", "in.ipynb"], False),
        (["python", "/usr/bin/jupyter-nbconvert", "--execute", "in.ipynb"], False),
    ],
)
def test_the_curve_is_live_under_jupyterlab_whatever_its_folder_is_called(monkeypatch, command, seen):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    monkeypatch.setenv("JPY_SESSION_NAME", "02_pretrain.ipynb")
    monkeypatch.delenv("MMKIT_HEADLESS", raising=False)
    monkeypatch.setattr(psutil.Process, "cmdline", lambda self: command)
    assert watched() is seen


def test_the_live_picture_updates_one_display(monkeypatch):
    import IPython.display as ipython

    shown, updates = [], []

    class Handle:
        """Stands for the display of a notebook."""

        def update(self, picture):
            """Collects what would be redrawn."""
            updates.append(picture.data)

    monkeypatch.setattr(ipython, "display", lambda picture, display_id: shown.append(picture.data) or Handle())
    clock = Clock()
    with Progress(100, live=True, clock=clock) as progress:
        for step in range(1, 101):
            clock.now += 0.5
            progress({"step": step, "loss": 1.0})
    assert len(shown) == 1 and len(updates) <= 51 and "100/100 (100%)" in updates[-1]
