"""The stability guard: what counts as trouble, what is decided, and that every process decides the same."""

import json
import math

import pytest
import torch
from torch import nn

from mmkit.config import StabilityConfig
from mmkit.training.stability import Decision, StabilityGuard, Strain, activation_statistics, events
from tests.training.processes import run_processes
from tests.training.tiny_clip import shards


def guard_of(tmp_path=None, **settings):
    return StabilityGuard(StabilityConfig(**{"window": 8, **settings}), str(tmp_path) if tmp_path else None)


def observe_all(guard, losses, **more):
    return [guard.observe(step, loss, keys=[f"key-{step}"], **more) for step, loss in enumerate(losses, 1)]


def test_a_spike_names_its_step_batch_and_the_last_good_step():
    decision = observe_all(guard_of(action="rewind"), [1, 1, 1, 9])[-1]
    assert decision == Decision("rewind", 4, "loss spike", decision.message, ("key-4",), rewind_to=3)
    assert "rewind 1 of 3" in decision.message


def test_noise_and_falling_losses_are_no_spikes():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(500, generator=generator)
    losses = [8 * math.exp(-i / 100) + 0.3 + 0.1 * float(noise[i]) for i in range(500)]
    assert not any(observe_all(guard_of(window=64), losses))
    tiny = [0.001 + 0.0005 * abs(float(n)) for n in noise]
    assert not any(observe_all(guard_of(window=64), tiny))


def test_a_rise_to_a_plateau_is_found_at_its_beginning():
    losses = [2.0 + 0.02 * (i % 5) for i in range(40)] + [min(2 + i, 11.0) for i in range(1, 20)]
    found = [decision.step for decision in observe_all(guard_of(window=32), losses) if decision]
    assert found[0] == 41


def test_a_spike_does_not_raise_the_limit_for_the_next():
    guard = guard_of(action="skip", max_skipped=2)
    decisions = observe_all(guard, [1, 1, 1, 1, 9, 9, 9])
    assert [d.action for d in decisions[4:]] == ["skip", "skip", "stop"]
    assert "after 2 skips" in decisions[-1].message


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_non_finite_loss_is_never_passed_over(loss):
    assert observe_all(guard_of(), [loss])[-1].cause == "non-finite loss"
    stopped = observe_all(guard_of(action="stop"), [1, 1, loss])[-1]
    assert stopped.action == "stop" and "lower the learning rate" in stopped.message


def test_updates_left_out_in_a_row_are_an_overflow():
    guard = guard_of(max_skipped=4)
    assert not any(observe_all(guard, [1.0] * 4, skipped=True))
    assert guard.observe(5, 1.0, skipped=False).action == "continue" and guard.n_skipped == 0
    decisions = [guard.observe(6 + i, 1.0, skipped=True) for i in range(5)]
    assert [d.action for d in decisions] == ["continue"] * 4 + ["stop"]
    assert decisions[-1].cause == "overflow" and guard.total_skipped == 9


def test_a_scaler_that_keeps_halving_is_found_and_one_that_recovers_is_not():
    guard = guard_of()
    falling = [guard.observe(i, 1.0, scaler=65536 / 2**i) for i in range(8)]
    assert [bool(d) for d in falling] == [False] * 7 + [True] and falling[-1].cause == "loss scaler collapse"
    guard = guard_of()
    assert not any(guard.observe(i, 1.0, scaler=[4, 2, 4, 2][i % 4]) for i in range(40))
    guard = guard_of(window=32)  # the search for a scale at the beginning, then steady
    assert not any(guard.observe(i, 1.0, scaler=65536 / 2 ** min(i, 8), skipped=i < 8) for i in range(100))


def test_halvings_of_the_scaler_between_two_log_steps_are_counted_each():
    guard = guard_of()  # four steps a log line, all read at its end: 65536 before, 32768, 4096 and 2048 after
    seen = [guard.observe(i, 1.0, scaler=[65536, 32768, 4096, 2048][i // 4]) for i in range(16)]
    assert seen[-1].action == "continue"  # three falls within half a window are no collapse
    guard = guard_of()
    seen = [guard.observe(i, 1.0, scaler=[65536, 65536 // 2**4, 65536 // 2**9][i // 4]) for i in range(12)]
    assert [bool(decision) for decision in seen[:8]] == [False] * 8 and seen[8].cause == "loss scaler collapse"


def test_without_a_checkpoint_to_go_back_to_a_rewind_is_a_stop_and_is_not_counted():
    asked = []
    guard = guard_of(action="rewind", rewind_precision="fp32", rewind_lr_factor=0.5)
    guard.can_go_back = lambda step: bool(asked.append(step))
    decision = observe_all(guard, [1, 1, 1, float("nan")])[-1]
    assert decision.action == "stop" and asked == [3] and "no checkpoint of step 3 or earlier" in decision.message
    assert (guard.n_rewinds, guard.lr_factor, guard.precision, guard.last_event) == (0, 1.0, None, None)


def test_rewinds_change_precision_and_rate_then_go_further_back_then_stop():
    guard = guard_of(action="rewind", rewind_precision="fp32", rewind_lr_factor=0.5, max_rewinds=2)
    first = observe_all(guard, [1, 1, 1, 1, 1, float("nan")])[-1]
    assert (first.rewind_to, first.precision, first.lr_factor) == (5, "fp32", 0.5)
    guard.rewound(4)
    assert [step for step, _ in guard.losses] == [1, 2, 3, 4]
    assert not guard.observe(5, 1.0)
    second = guard.observe(6, 50.0)
    assert (second.action, second.rewind_to, second.lr_factor) == ("rewind", 3, 0.25)
    guard.rewound(2)
    third = guard.observe(3, float("inf"))
    assert third.action == "stop" and "after 2 rewinds" in third.message


def test_the_event_file_holds_the_decision_the_last_steps_and_the_activations(tmp_path):
    guard = guard_of(tmp_path, action="rewind")
    decision = observe_all(guard, [1, 1, 1, float("nan")], grad_norm=torch.tensor(2.5), max_logit=float("inf"))[-1]
    path = guard.write(decision, [{"block": "a", "max": 3.0}], checkpoint=2)
    event = json.loads(open(path).read())
    assert event["decision"]["cause"] == "non-finite loss" and event["decision"]["keys"] == ["key-4"]
    assert [row["step"] for row in event["last_steps"]] == [1, 2, 3, 4]
    assert event["last_steps"][-1] == {"step": 4, "loss": "nan", "skipped": False, "keys": ["key-4"], "grad_norm": 2.5, "max_logit": "inf"}
    assert event["activations"] == [{"process": 0, "block": "a", "max": 3.0}] and event["checkpoint"] == 2
    assert events(str(tmp_path)) == [event]
    assert StabilityGuard(StabilityConfig(), str(tmp_path), is_main=False).write(decision) is None


def test_the_ring_is_bounded():
    guard = guard_of(window=8)
    observe_all(guard, [1.0] * 50)
    assert len(guard.ring) == len(guard.losses) == 8


def test_a_resumed_guard_decides_as_the_first_would():
    first = guard_of(action="rewind")
    observe_all(first, [1, 1.1, 0.9, 1, 1.05])
    second = guard_of(action="rewind")
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.limit == first.limit < math.inf
    assert second.observe(6, 30.0) == first.observe(6, 30.0)


def test_activation_statistics_find_the_block_that_overflows():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3)))
    with torch.no_grad():
        model[1].linear2.weight[0, 0] = float("inf")
    rows = activation_statistics(model, ("TransformerEncoderLayer",), lambda: model(torch.randn(2, 4, 8)))
    assert [row["block"] for row in rows] == ["0", "1", "2"]
    assert rows[0]["not_finite"] == 0 and rows[0]["rms"] == pytest.approx(1, abs=0.1) and rows[0]["max"] < 5
    assert rows[1]["not_finite"] > 0 and json.dumps(rows)
    assert not model[0]._forward_hooks


def test_a_strained_layer_overflows_in_half_precision_only():
    def losses(dtype, gain):
        torch.manual_seed(0)
        layer = nn.Linear(8, 8)
        strain = Strain(layer, gain, after=2)
        out = []
        for _ in range(4):
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                out.append(layer(torch.ones(1, 8)).float().square().mean().item())
        strain.remove()
        assert layer(torch.ones(1, 8)).isfinite().all()
        return out

    half, brain, full = (losses(dtype, 2.0**18) for dtype in (torch.float16, torch.bfloat16, torch.float32))
    assert all(map(math.isfinite, half[:2])) and not any(map(math.isfinite, half[2:]))
    assert all(map(math.isfinite, brain + full)) and full[0] == pytest.approx(full[3], rel=1e-5)


def test_a_non_finite_loss_on_one_of_two_processes_stops_both():
    outputs = run_processes("stability_case.py", [], world=2)
    reports = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    assert [report["steps"] for report in reports] == [3, 3]
    assert [report["action"] for report in reports] == ["stop", "stop"]
    assert reports[1]["cause"] == "non-finite loss" and reports[0]["cause"] == "another process stopped here"


@pytest.mark.slow
@pytest.mark.parametrize("kind, strategy, stage", [("torch", "fsdp", 0), ("deepspeed", "ddp", 3), ("xla", "ddp", 0)])
def test_a_run_on_two_devices_goes_back_as_one(tmp_path, kind, strategy, stage):
    """A sample that is NaN on one device only, at the sixth window: back to step 4, on in fp32, no window read twice or left out."""
    data = shards(tmp_path / "shards")
    world = {"xla_devices": 2} if kind == "xla" else {"world": 2}
    outputs = run_processes("rewind_case.py", [tmp_path, data, kind, strategy, stage], **world)
    reports = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    for report in reports:
        assert (report["reason"], report["steps"], report["precisions"]) == ("done", 6, ["bf16", "fp32"])
        assert report["sum"] == pytest.approx(reports[0]["sum"], rel=1e-6)
    windows = [sum(parts, []) for parts in zip(*(report["windows"] for report in reports), strict=True)]
    assert len(windows) == 8  # 6 steps, and steps 5 and 6 of the first try
    for epoch in (windows[:4], windows[4:]):
        assert sorted(sum(epoch, [])) == [f"{i:04d}" for i in range(48)]
    folder = reports[0]["folder"]
    (event,) = events(folder)
    decision = event["decision"]
    assert (decision["step"], decision["rewind_to"], decision["precision"]) == (6, 5, "fp32")
    assert decision["keys"] == windows[5] and event["keys_of_processes"] == [report["windows"][5] for report in reports]
    assert [row["step"] for row in event["last_steps"]] == list(range(1, 7)) and event["last_steps"][-1]["loss"] == "nan"
    assert {row["process"] for row in event["activations"] if row["not_finite"]} == {len(reports) - 1}
    rows = [json.loads(line) for line in open(f"{folder}/metrics.jsonl")]
    assert [row["step"] for row in rows] == list(range(1, 7)) and all(isinstance(row["loss"], float) for row in rows)
    record = json.load(open(f"{folder}/environment.json"))
    assert [(change["step"], change["precision"]) for change in record["precisions"]] == [(0, "bf16"), (4, "fp32")]
