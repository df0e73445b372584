"""Schedules at their corners, statelessness, plateau."""

import math

import pytest

from mmkit.config import ConfigError, OptimizerConfig
from mmkit.training.schedule import Plateau, Schedule, factor


def at(step, **settings):
    return factor(step, 100, OptimizerConfig(**{"warmup": 10, **settings}))


def test_warmup_rises_by_one_step_and_reaches_one_at_its_last():
    assert at(0) == 0.1 and at(9) == 1.0
    assert factor(0, 100, OptimizerConfig(warmup=0.1)) == 0.1  # a share of all steps
    assert factor(0, 100, OptimizerConfig(warmup=0)) == 1.0


def test_cosine_is_open_clips_formula():
    assert at(10) == 1.0
    assert at(99) == pytest.approx(0.5 * (1 + math.cos(math.pi * 89 / 90)))
    assert at(55) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("settings", "total", "words"),
    [
        ({"warmup": 11}, 10, "warmup = 11 (11 steps) is more than the run's 10 steps"),
        ({"schedule": "const-cooldown", "warmup": 2, "cooldown": 9}, 10, "warmup = 2 (2 steps) and train.optimizer.cooldown = 9 (9) is more"),
    ],
)
def test_a_peak_that_is_never_reached_is_refused(settings, total, words):
    with pytest.raises(ConfigError) as error:
        Schedule(OptimizerConfig(**settings), total)
    assert words in str(error.value)
    Schedule(OptimizerConfig(**settings), total + 1)
    Schedule(OptimizerConfig(**settings | {"schedule": "cosine"}), 11)


def test_linear_constant_and_cooldown():
    assert at(55, schedule="linear") == pytest.approx(0.5) and at(99, schedule="linear") == pytest.approx(1 / 90)
    assert at(99, schedule="constant") == 1.0
    assert at(79, schedule="const-cooldown", cooldown=0.2) == 1.0
    assert at(90, schedule="const-cooldown", cooldown=0.2) == pytest.approx(0.5)
    assert at(99, schedule="const-cooldown", cooldown=20) == pytest.approx(1 / 20)


def test_plateau_halves_after_patience_and_an_improvement_resets_it():
    watch = Plateau(patience=1)
    for value in (1.0, 1.0, 0.5, 0.6, 0.6):
        watch.observe(value)
    assert watch.scale == 0.5 and watch.best == 0.5
    watch.observe(0.6)
    assert watch.scale == 0.5


RISING, STOPPED = (0.2, 0.3, 0.4, 0.5), (0.5, 0.5, 0.4, 0.5)


@pytest.mark.parametrize(("mode", "values", "scale"), [("max", RISING, 1.0), ("max", STOPPED, 0.5), ("min", RISING, 0.5)])
def test_plateau_cuts_on_a_recall_that_stops_rising_and_not_on_one_that_rises(mode, values, scale):
    watch = Plateau()
    for value in values:
        watch.observe(value, mode)
    assert watch.scale == scale and watch.best == (min if mode == "min" else max)(values)


def test_a_value_that_is_not_finite_is_no_improvement():
    watch = Plateau(patience=1)
    for value in (math.nan, 3.0, math.nan, -math.inf):
        watch.observe(value)
    assert (watch.best, watch.scale) == (3.0, 0.5)


def test_a_best_value_of_another_metric_is_forgotten_and_the_cuts_are_kept():
    config = OptimizerConfig(schedule="plateau", warmup=0)
    schedule = Schedule(config, 10)
    for _ in range(4):
        schedule.observe({"eval_loss": 1.0, "eval_recall": 0.5})
    other = Schedule(config, 10, watched=("eval_recall", "max"))
    other.load_state_dict(schedule.state_dict())
    assert (other.plateau.best, other.plateau.bad, other.plateau.scale) == (None, 0, 0.5)
    with pytest.raises(ConfigError, match="'eval_recall' is not measured; a line has eval_loss"):
        other.observe({"eval_loss": 1.0})


def test_plateau_state_survives_a_resume_and_other_schedules_ignore_validation():
    groups = [{"base_lr": 0.1}, {"base_lr": 0.01}]
    schedule = Schedule(OptimizerConfig(schedule="plateau", warmup=0), 10)
    for _ in range(4):
        schedule.observe({"eval_loss": 1.0})
    assert schedule.rates(groups, 5) == [0.05, 0.005]
    resumed = Schedule(OptimizerConfig(schedule="plateau", warmup=0), 10)
    resumed.load_state_dict(schedule.state_dict())
    assert resumed.rates(groups, 5) == schedule.rates(groups, 5)
    other = Schedule(OptimizerConfig(schedule="constant", warmup=0), 10)
    for _ in range(9):
        other.observe({"eval_loss": 1.0})
    assert other.rates(groups, 5) == [0.1, 0.01]


def test_a_rewinds_factor_multiplies_every_rate():
    assert Schedule(OptimizerConfig(schedule="constant", warmup=0), 10, lr_factor=0.5).rates([{"base_lr": 1.0}], 0) == [0.5]
