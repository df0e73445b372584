"""Progress lines stay few when nobody watches and the live picture stays small."""

from __future__ import annotations

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
    assert drawn.count("<circle") == 1 and '<circle cx="550.0" cy="70.0"' in drawn


def test_the_curve_is_thinned_and_the_bar_is_bounded():
    assert curve([(1, 1.0)]) == ""
    drawn = curve([(step, 1.0 / step) for step in range(1, 5001)])
    assert drawn.count(",") <= 402 and "step 1<" in drawn
    assert "width:240px;height:10px;background:#1f77b4" in bar(3.0)


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
