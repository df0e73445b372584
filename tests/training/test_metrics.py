"""Lines of metrics.jsonl: exact sums, whole lines, resumable, on any file system."""

import json
from pathlib import Path

import fsspec
import pytest
import torch

from mmkit.training.loop import train
from mmkit.training.metrics import MetricsFile, environment, row_of, totals
from tests.training.tiny_run import tiny_run


def test_sums_are_added_and_readings_averaged_over_micro_batches_and_processes():
    outs = [{"loss_sum": torch.tensor(6.0), "n_correct": 1, "scale": 2.0}, {"loss_sum": torch.tensor(2.0), "n_correct": 2, "scale": 4.0}]
    names, values = totals(outs, torch.device("cpu"))
    row = row_of({"step": 1, "names": names, "values": values * 2, "counts": torch.tensor([8.0, 4, 20, 40]), "keys": ["a"], "lr": 0.1})
    assert row == {"step": 1, "loss": 2.0, "lr": 0.1, "targets": 8, "samples": 4, "tokens": 20, "fill": 0.5, "accuracy": 0.75, "scale": 3.0}


def test_bf16_losses_are_summed_in_a_wider_number():
    outs = [{"loss_sum": torch.ones((), dtype=torch.bfloat16)} for _ in range(1000)]
    assert totals(outs, torch.device("cpu"))[1][0] == 1000


def test_counts_above_what_fp32_holds_are_exact():
    big = 2**24 + 1
    outs = [{"n_correct": torch.tensor(big), "n_empty": big}, {"n_correct": torch.tensor(2), "n_empty": 0}]
    names, values = totals(outs, torch.device("cpu"))
    counts = torch.tensor([2 * big, big, big, big])
    row = row_of({"names": names, "values": values, "counts": counts, "keys": []})
    assert row["empty"] == row["tokens"] == big and row["accuracy"] == (big + 2) / (2 * big)


def test_lines_that_a_full_disk_does_not_take_are_written_with_later_ones(tmp_path, caplog):
    file = MetricsFile(str(tmp_path))
    disk, room = file.file, [5]  # bytes

    class Full:
        def write(self, data):
            if room and room[0] == 0:
                raise OSError(28, "No space left on device")
            part = data[: room[0]] if room else data
            room[:] = [room[0] - len(part)] if room else []
            return disk.write(part)

        flush, close = disk.flush, disk.close

    file.file = Full()
    file.write({"step": 1})
    file.write({"step": 2})
    assert caplog.text.count("No space left on device") == 2
    room.clear()
    file.write({"step": 3})
    file.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_a_step_without_targets_has_loss_zero():
    names, values = totals([{"loss_sum": torch.tensor(0.0), "n_empty": 1}], torch.device("cpu"))
    row = row_of({"step": 1, "names": names, "values": values, "counts": torch.zeros(4), "keys": []})
    assert row["loss"] == 0 and row["empty"] == 1


@pytest.mark.parametrize("remote", [False, True])
def test_lines_are_whole_and_later_ones_are_dropped_at_a_resume(tmp_path, remote):
    folder = f"memory://metrics{tmp_path.name}" if remote else str(tmp_path / "run")
    file = MetricsFile(folder)
    for step in (1, 2, 3):
        file.write({"step": step, "loss": float("nan") if step == 2 else 1.0})
    file.close()
    with fsspec.open(f"{folder}/metrics.jsonl", "ab") as raw:
        raw.write(b'{"step": 4, "lo')
    MetricsFile(folder, last_step=2).close()
    with fsspec.open(f"{folder}/metrics.jsonl", "r") as raw:
        assert [json.loads(line) for line in raw] == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": "nan"}]


def test_a_line_is_on_the_disk_before_the_next_step(tmp_path):
    file = MetricsFile(str(tmp_path))
    file.write({"step": 1})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    file.close()


def curve(folder) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_shows_the_numbers_of_metrics_jsonl_also_after_a_resume_and_anew(tmp_path):
    for last, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        file = MetricsFile(str(tmp_path), last_step=last, tensorboard=True)
        for step in steps:
            file.write({"step": step, "loss": step + last / 8, "lr": 0.5, "note": "text"})
        file.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert curve(tmp_path) == {name: [(line["step"], line[name]) for line in lines] for name in ("loss", "lr")}
    assert [line["loss"] for line in lines] == [1, 2, 3.25, 4.25]
    file = MetricsFile(str(tmp_path), tensorboard=True)
    file.write({"step": 1, "loss": 9.0})
    file.close()
    assert curve(tmp_path) == {"loss": [(1, 9.0)]}


def test_a_run_with_tensorboard_shows_its_own_losses_and_one_without_writes_none(tmp_path):
    run = tiny_run(tmp_path, steps=2, tensorboard=True)
    train(run)
    folder = Path(run.folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    shown = curve(folder)["loss"]
    assert [step for step, _ in shown] == [1, 2] and [value for _, value in shown] == pytest.approx([line["loss"] for line in lines])
    other = tiny_run(tmp_path, name="other", steps=1)
    train(other)
    assert not (Path(other.folder) / "tensorboard").exists()


def test_environment_names_versions_and_hardware():
    facts = environment(data={"fingerprint": "x"})
    assert torch.__version__.startswith(facts["versions"]["torch"]) and facts["hardware"]["cpus"] >= 1 and facts["data"] == {"fingerprint": "x"}
    json.dumps(facts)
