"""Whole runs of a tiny model: what is written, resuming, interrupts, stages, the guard."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import yaml

from mmkit.config import ConfigError, changed
from mmkit.models import pretrained
from mmkit.models.pretrained import from_pretrained
from mmkit.sharding import environment
from mmkit.storage import Store
from mmkit.training import assemble, loop, loss
from mmkit.training.checkpoint import Checkpoint, CheckpointError
from mmkit.training.loop import train
from mmkit.training.run_folder import save_checkpoint
from tests.training.tiny_run import MODEL, tiny_run

LORA = {"rank": 2, "alpha": 4, "dropout": 0.1, "targets": ["q_proj", "v_proj"]}


def lines(run):
    return [json.loads(line) for line in Path(run.folder, "metrics.jsonl").read_text().splitlines()]


def numbers(rows):
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in rows]


def steps_of(run):
    return sorted(int(path.name[5:]) for path in Path(run.folder, "checkpoints").iterdir())


def trained_tensors(run):
    read = Checkpoint(str(sorted(Path(run.folder, "checkpoints").iterdir())[-1]))
    return {name: read.get(name) for name in read.names()}


def assert_same_state(one, other):
    a, b = trained_tensors(one), trained_tensors(other)
    assert a.keys() == b.keys() and a
    for name in a:
        for kind in a[name]:
            assert torch.equal(a[name][kind], b[name][kind]), (name, kind)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Four steps with dropout in one go, and what came of them."""
    folder = tmp_path_factory.mktemp("unbroken")
    run = tiny_run(folder, lora=LORA, trainable=["connector"])
    shown = []
    return run, train(run, on_log=shown.append), shown


def test_a_run_leaves_its_config_environment_metrics_checkpoint_and_export(unbroken):
    run, result, shown = unbroken
    folder = Path(run.folder)
    assert result.reason == "done" and not result.stopped and result.steps == 4 and result.folder == run.folder
    rows = lines(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and rows == json.loads(json.dumps(shown)) and result.last == shown[-1]
    needed = {"step", "loss", "grad_norm", "lr", "lrs", "targets", "samples", "tokens", "seconds", "data_seconds", "fill", "skipped", "compiles"}
    assert needed <= set(rows[0])
    assert rows[0]["reached_connector"] == rows[0]["reached_language"] == 1 and not any("reached" in name for name in rows[1])
    assert sum(row["samples"] for row in rows) == 16 and rows[-1]["total_samples"] == 16
    assert yaml.safe_load((folder / "config.yaml").read_text())["train"]["lora"]["rank"] == 2
    facts = json.loads((folder / "environment.json").read_text())
    assert torch.__version__.startswith(facts["versions"]["torch"]) and facts["tables"]["adapters"] and facts["data"]["fingerprint"]
    assert steps_of(run) == [4] and (folder / "export" / "adapter" / "adapter_model.safetensors").is_file()


def test_the_adapter_on_the_disk_is_the_one_that_was_trained(unbroken):
    run, result, _ = unbroken
    disk = safetensors.torch.load_file(Path(result.export, "adapter", "adapter_model.safetensors"))
    trained = {name: entry["param"] for name, entry in trained_tensors(run).items() if ".lora_" in name}
    assert len(disk) == len(trained) == 2 * 2 * 2
    for name, tensor in trained.items():
        assert torch.equal(disk["base_model.model." + name.replace(".default", "")], tensor) and tensor.any()


@pytest.mark.parametrize("background", [False, True])
def test_two_steps_and_two_more_equal_four_to_the_bit(unbroken, tmp_path, background):
    run = tiny_run(tmp_path, lora=LORA, trainable=["connector"], checkpoint={"save_every": 2, "background": background})
    again = []

    def stop_after_two(row):
        again.append(row)
        if row["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    first = train(run, on_log=stop_after_two)
    assert first.reason == "interrupted" and first.stopped and "resume=auto" in first.hint and first.steps in (2, 3)
    second = train(run)
    assert second.reason == "done"
    assert numbers(lines(run)) == numbers(lines(unbroken[0]))
    assert_same_state(run, unbroken[0])


def test_a_finished_run_is_not_trained_again(unbroken):
    run, first, _ = unbroken
    before = lines(run)
    again = train(run)
    assert again.reason == "already done" and again.steps == 4 and again.export == first.export and lines(run) == before


def test_resume_never_starts_anew_and_keeps_the_earlier_checkpoints_aside(tmp_path):
    run = tiny_run(tmp_path, steps=2)
    train(run)
    train(tiny_run(tmp_path, steps=1, resume="never"))
    assert [row["step"] for row in lines(run)] == [1] and steps_of(run) == [1]
    assert (Path(run.folder) / "checkpoints.before-1" / "step-00000002" / "manifest.json").is_file()


def test_resume_from_a_path_goes_on_from_there_and_drops_later_lines(tmp_path):
    run = tiny_run(tmp_path, steps=3, checkpoint={"save_every": 1})
    train(run)
    assert [row.get("save_seconds", 0) > 0 for row in lines(run)] == [False, True, True]  # how long the step waited for the save before it
    whole = numbers(lines(run))
    train(tiny_run(tmp_path, steps=3, resume=f"{run.folder}/checkpoints/step-00000001"))
    assert numbers(lines(run)) == whole
    with pytest.raises(ConfigError, match="is no complete checkpoint"):
        train(tiny_run(tmp_path, steps=3, resume=str(tmp_path / "nothing")))


@pytest.mark.parametrize("other", [{"alpha": 400}, {"use_rslora": True}])
def test_adapters_of_other_settings_are_not_taken_over_though_their_tensors_fit(unbroken, tmp_path, other):
    path = f"{unbroken[0].folder}/checkpoints/step-00000004"
    same = {"trainable": ["connector"], "steps": 5, "resume": path}
    with pytest.raises(ConfigError, match=f"was trained with train.lora.{next(iter(other))} = .*; use the same, or resume=never"):
        train(tiny_run(tmp_path, lora=LORA | other, **same))
    assert train(tiny_run(tmp_path, lora=LORA | {"dropout": 0.0}, **same)).steps == 5


def test_other_settings_in_the_same_folder_are_refused_by_name(tmp_path):
    train(tiny_run(tmp_path, steps=1))
    with pytest.raises(ConfigError, match=r"train.global_batch = 4, this one has 8: give it another name .* or start anew"):
        train(tiny_run(tmp_path, steps=2, global_batch=8))
    wider = json.loads(json.dumps(MODEL))
    wider["connector"]["width"] = 32
    with pytest.raises(ConfigError, match=r"model.connector.width = 16, this one has 32"):
        train(tiny_run(tmp_path, steps=2, model=wider))


def test_rows_made_otherwise_are_gone_on_with_from_an_epoch_s_beginning_where_asked(tmp_path):
    first = tiny_run(tmp_path, steps=5, checkpoint={"save_every": 5})
    train(first)
    packed = changed(tiny_run(tmp_path, steps=8), data__pack=True)
    with pytest.raises(ConfigError, match=r"data.pack = False, this one has True: .* name the checkpoint"):
        train(packed)
    train(changed(packed, resume="step-5"))
    (entry,) = json.loads(Path(first.folder, "environment.json").read_text())["history"]
    assert (entry["step"], entry["data"]["epoch"], entry["samples_read_again"], entry["samples_left_out"]) == (5, 2, 0, 4)  # 20 of 12 a time
    assert [row["step"] for row in lines(first)] == list(range(1, 9))


def test_a_run_of_an_older_version_without_some_settings_is_gone_on_with(tmp_path):
    run = tiny_run(tmp_path, steps=1)
    train(run)
    file = Path(run.folder, "config.yaml")
    tree = yaml.safe_load(file.read_text())
    del tree["model"]["encoders"][0]["weights"], tree["model"]["image_fit"], tree["train"]["bits"]
    tree["model"]["encoders"][0]["weights"] = "random"
    file.write_text(yaml.safe_dump(tree))
    assert train(tiny_run(tmp_path, steps=2)).steps == 2


def test_a_damaged_checkpoint_is_refused_and_named(tmp_path):
    run = tiny_run(tmp_path, steps=1)
    train(run)
    file = Path(run.folder, "checkpoints", "step-00000001", "rank-00000-00000.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=r"rank-00000-00000.safetensors is damaged"):
        train(tiny_run(tmp_path, steps=2))


def test_accumulation_changes_neither_losses_nor_weights(tmp_path):
    rows = []
    for device_batch in (4, 2, 1):
        run = tiny_run(tmp_path / str(device_batch), steps=3, device_batch=device_batch)
        train(run)
        rows.append([(row["loss"], row["grad_norm"], row["targets"]) for row in lines(run)])
    for other in rows[1:]:
        for (loss_a, norm_a, n_a), (loss_b, norm_b, n_b) in zip(rows[0], other, strict=True):
            assert loss_a == pytest.approx(loss_b, rel=1e-5) and norm_a == pytest.approx(norm_b, rel=1e-4) and n_a == n_b


def test_chunked_loss_and_recomputed_blocks_change_nothing(tmp_path):
    plain, saving = tiny_run(tmp_path / "a", steps=3), tiny_run(tmp_path / "b", steps=3, loss_chunk=8, checkpoint_blocks=True)
    train(plain)
    train(saving)
    for a, b in zip(lines(plain), lines(saving), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6) and a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)


def test_log_every_writes_the_same_line_for_every_step(tmp_path):
    each, seldom = tiny_run(tmp_path / "a", steps=5), tiny_run(tmp_path / "b", steps=5, log_every=3)
    train(each)
    train(seldom)
    assert numbers(lines(each)) == numbers(lines(seldom))


def test_finetune_starts_from_the_pretrain_export(tmp_path):
    pretrain = tiny_run(tmp_path, steps=2)
    with pytest.raises(ConfigError, match=r"does not exist; make it with: mmkit train --model test --stage pretrain"):
        train(tiny_run(tmp_path, stage="finetune"))
    before = train(pretrain)
    finetune = tiny_run(tmp_path, stage="finetune", steps=1, trainable=["language"], optimizer={"lr": 1e-9, "warmup": 0})
    after = train(finetune)
    start, end = (safetensors.torch.load_file(Path(result.export, "model.safetensors")) for result in (before, after))
    assert start.keys() == end.keys()
    assert torch.equal(start["connector.queries"], end["connector.queries"])
    assert torch.allclose(start["language.lm_head.weight"], end["language.lm_head.weight"], atol=1e-7)
    assert json.loads(Path(after.export, "training.json").read_text())["started_from"] == before.export


def test_a_quantised_finetune_exports_its_adapter_over_the_unquantised_weights(tmp_path):
    pytest.importorskip("bitsandbytes")
    start = train(tiny_run(tmp_path, steps=1)).export
    lora = LORA | {"dropout": 0.0}
    settings = {"stage": "finetune", "bits": 4, "lora": lora, "trainable": ["connector"], "optimizer": {"lr": 1e-2, "warmup": 0}}
    run = tiny_run(tmp_path, steps=2, **settings)
    result = train(run)
    before = safetensors.torch.load_file(Path(start, "model.safetensors"))
    after = safetensors.torch.load_file(Path(result.export, "model.safetensors"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before if name.startswith("language"))
    model, _ = from_pretrained(result.export)
    loaded = dict(model.named_parameters())
    for name, entry in trained_tensors(run).items():
        assert torch.equal(loaded[name], entry["param"]), name
    again = train(tiny_run(tmp_path, steps=3, **settings))
    assert again.reason == "done" and [row["step"] for row in lines(run)] == [1, 2, 3]


def test_an_export_that_holds_the_start_instead_of_what_was_trained_is_an_error(tmp_path, monkeypatch):
    start = {}
    real_assemble, real_save = assemble.assemble, pretrained.save_pretrained

    def remembering(run):
        state = real_assemble(run)
        start.update({name: p.detach().clone() for name, p in state.model.named_parameters()})
        return state

    def of_the_start(model, folder, config, tokenizer, state, main):
        return real_save(model, folder, config, tokenizer, [(name, start.get(name, tensor)) for name, tensor in state], main)

    monkeypatch.setattr(loop, "assemble", remembering)
    monkeypatch.setattr(pretrained, "save_pretrained", of_the_start)
    with pytest.raises(ValueError, match=r"does not hold what was trained: \d+ of \d+ tensors differ, first 'connector"):
        train(tiny_run(tmp_path, steps=2))


def test_steps_that_change_nothing_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: None)
    with pytest.raises(ValueError, match="2 steps changed nothing"):
        train(tiny_run(tmp_path, steps=2))


def test_finetune_refuses_an_export_of_another_model(tmp_path):
    export = train(tiny_run(tmp_path, steps=1)).export
    wider = json.loads(json.dumps(MODEL))
    wider["connector"]["width"] = 32
    with pytest.raises(ConfigError, match="model.connector"):
        train(tiny_run(tmp_path, stage="finetune", start_from=export, model=wider))


def test_settings_that_cannot_work_are_refused_before_anything_is_written(tmp_path):
    for settings, message in (
        ({"stage": "eval"}, "trains nothing"),
        ({"trainable": ["language"], "lora": LORA}, "'language' is in train.trainable and in train.lora.components"),
        ({"bits": 4}, "train.bits 4 freezes the language model"),
        ({"trainable": []}, r"train.trainable \[\] trains nothing in this model; its components are"),
        ({"trainable": ["regions"]}, "train.trainable names regions, which this model lacks; its components are"),
        ({"data": {}}, "data.sources of 'test' stage 'pretrain' is empty"),
    ):
        run = tiny_run(tmp_path, **settings)
        with pytest.raises(ConfigError, match=message):
            train(run)
        assert not Path(run.folder).exists()


def test_a_trained_tensor_without_a_gradient_is_an_error_unless_allowed(tmp_path, monkeypatch):
    real = assemble.build_model

    def with_an_unused_weight(run):
        model, *rest = real(run)
        model.connector.forgotten = torch.nn.Parameter(torch.zeros(3))
        return model, *rest

    monkeypatch.setattr(assemble, "build_model", with_an_unused_weight)
    with pytest.raises(ValueError, match=r"1 of \d+ trained tensors got no gradient in the first step: connector\.forgotten\."):
        train(tiny_run(tmp_path / "a", steps=1))
    assert next(assemble.assemble(tiny_run(tmp_path / "c", steps=1, allow_no_grad=["forgotten"])).loader).n_targets


def test_evaluation_enters_the_lines_and_the_best_checkpoint_is_kept(tmp_path):
    values = iter([3.0, 1.0, 2.0, 2.5])
    run = tiny_run(tmp_path, eval_every=1, checkpoint={"best_metric": "eval_error", "keep_last": 1})
    saved = []
    train(run, on_eval=lambda state: {"error": next(values)}, on_save=saved.append)
    assert [row["eval_error"] for row in lines(run)] == [3.0, 1.0, 2.0, 2.5]
    assert saved == [1, 2, 4] and steps_of(run) == [2, 4]


def test_a_plateau_lowers_the_rate_and_a_resume_remembers_it(tmp_path):
    best = {"save_every": 1, "best_metric": "eval_recall", "best_mode": "max"}
    plateau = {"optimizer": {"lr": 1e-3, "warmup": 0, "schedule": "plateau"}, "eval_every": 1, "checkpoint": best}
    recalls = iter([0.1, 0.2, 0.3, 0.3, 0.2, 0.3, 0.25, 0.2, 0.3])
    run = tiny_run(tmp_path, steps=5, **plateau)
    train(run, on_eval=lambda state: {"recall": next(recalls)})
    train(tiny_run(tmp_path, steps=9, **plateau), on_eval=lambda state: {"recall": next(recalls)})
    assert [row["lr"] for row in lines(run)] == [1e-3] * 6 + [5e-4] * 3  # the first two of three bad ones were before the resume
    assert 3 in steps_of(run)


def poison(monkeypatch, at, factor):
    """Multiplies the loss of the n-th forward by ``factor``."""
    calls = []
    real = loss.chunk_loss

    def chunk_loss(*args):
        calls.append(1)
        value, correct = real(*args)
        return (value * factor if len(calls) in at else value), correct

    monkeypatch.setattr(loss, "chunk_loss", chunk_loss)


def test_a_non_finite_loss_stops_the_run_with_its_keys_and_the_last_good_checkpoint(tmp_path, monkeypatch):
    poison(monkeypatch, {5}, float("nan"))
    run = tiny_run(tmp_path, checkpoint={"save_every": 1})
    result = train(run)
    assert result.reason == "non-finite loss" and result.stopped and steps_of(run) == [1, 2] and result.export is None
    rows = lines(run)
    assert rows[-1]["loss"] == "nan" and rows[-1]["skipped"] is True
    event = json.loads(next(Path(run.folder, "stability").iterdir()).read_text())
    assert event["decision"]["step"] == 3 and any(key.startswith("r") for key in event["decision"]["keys"])


def test_a_rewind_goes_back_and_on_with_new_data_at_a_lower_rate(tmp_path, monkeypatch):
    poison(monkeypatch, {7}, float("nan"))
    stability = {"action": "rewind", "rewind_lr_factor": 0.5, "window": 4}
    run = tiny_run(tmp_path, steps=6, checkpoint={"save_every": 2}, stability=stability, optimizer={"lr": 1e-3, "warmup": 0, "schedule": "constant"})
    result = train(run)
    assert result.reason == "done" and result.steps == 6
    assert [(row["step"], row["lr"]) for row in lines(run)] == [(1, 1e-3), (2, 1e-3), (3, 5e-4), (4, 5e-4), (5, 5e-4), (6, 5e-4)]


def test_skip_leaves_a_spikes_update_out_and_goes_on(tmp_path, monkeypatch):
    poison(monkeypatch, {15}, 1000.0)
    run = tiny_run(tmp_path, steps=10, device_batch=4, stability={"action": "skip", "window": 8}, checkpoint={"save_every": 1, "keep_last": 99})
    poison(monkeypatch, {8}, 1000.0)
    result = train(run)
    assert result.reason == "done" and [row["skipped"] for row in lines(run)] == [False] * 7 + [True] + [False] * 2
    before, after = (Checkpoint(f"{run.folder}/checkpoints/step-{step:08d}").get("connector.queries") for step in (6, 7))
    assert not torch.equal(before["param"], after["param"])


def test_the_counts_of_a_step_are_exact_however_large(tmp_path, monkeypatch):
    take, big = loop.take_window, 2**24 + 1
    large = {"n_targets": big, "n_samples": big + 2, "n_tokens": big + 4, "n_positions": big + 6}
    monkeypatch.setattr(loop, "take_window", lambda state: [dataclasses.replace(batch, **large) for batch in take(state)])
    train(run := tiny_run(tmp_path, steps=2))
    rows = lines(run)
    assert [(row["targets"], row["samples"], row["tokens"]) for row in rows] == [(2 * big, 2 * big + 4, 2 * big + 8)] * 2
    assert (rows[-1]["total_samples"], rows[-1]["total_tokens"]) == (4 * big + 8, 4 * big + 16)


def test_a_loss_at_chance_with_a_vanished_gradient_is_told_once(tmp_path, caplog):
    """Random frozen weights of the language model: its connector learns nothing."""
    run = tiny_run(tmp_path, steps=9)
    result = train(run)
    told = [record.getMessage() for record in caplog.records if "at chance" in record.getMessage()]
    assert told == [result.hint] and "guessing among 320 tokens" in told[0] and "model.language.source" in told[0]
    assert [row.get("note") for row in lines(run)] == [None] * 4 + told + [None] * 4
    learning = tiny_run(tmp_path / "learning", steps=9, trainable=["connector", "samplers", "language"])
    assert train(learning).hint == "" and not any("note" in row for row in lines(learning))


def test_precision_may_change_at_a_resume_and_is_recorded(tmp_path):
    train(tiny_run(tmp_path, steps=2))
    run = tiny_run(tmp_path, steps=3, precision="bf16")
    train(run)
    read = Checkpoint(f"{run.folder}/checkpoints/step-00000003")
    assert read.state["precisions"] == [{"step": 0, "precision": "fp32"}, {"step": 2, "precision": "bf16"}]
    assert len(lines(run)) == 3


def test_other_frozen_weights_under_a_checkpoint_are_refused(tmp_path):
    train(tiny_run(tmp_path, steps=1))
    with pytest.raises(CheckpointError, match="was trained on other frozen weights"):
        train(tiny_run(tmp_path, steps=2, seed=1, resume="step-1"))  # they are drawn from the seed


def test_a_disk_that_fills_lets_the_run_go_on_when_configured(tmp_path, monkeypatch):
    run = tiny_run(tmp_path, steps=3, checkpoint={"save_every": 1, "on_disk_full": "continue"})
    tried = []

    def full_at_two(state, metrics=None):
        if state.step == 2:
            monkeypatch.setattr(state.checkpoints.store, "write", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        elif hasattr(state.checkpoints.store.write, "__name__") and state.checkpoints.store.write.__name__ == "<lambda>":
            monkeypatch.undo()
        tried.append(state.step)
        return save_checkpoint(state, metrics)

    monkeypatch.setattr("mmkit.training.notes.save_checkpoint", full_at_two)
    assert train(run).reason == "done" and tried == [1, 2, 3] and steps_of(run) == [1, 3]


@pytest.mark.parametrize("background", [False, True])
def test_a_last_checkpoint_that_the_disk_did_not_take_is_not_told_as_saved(tmp_path, monkeypatch, background):
    saved, write = [], Store.write
    run = tiny_run(tmp_path, steps=4, checkpoint={"save_every": 2, "background": background, "on_disk_full": "continue"})

    def full(self, name, data):
        if name.startswith("step-00000004"):
            raise OSError(28, "No space left on device")
        write(self, name, data)

    monkeypatch.setattr(Store, "write", full)
    result = train(run, on_save=saved.append)
    assert saved == steps_of(run) == [2] and "checkpoint of step 4 could not be written" in result.hint


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_fails_for_another_reason_than_the_disk_ends_the_run_and_is_not_told_as_saved(tmp_path, monkeypatch, background):
    saved = []
    run = tiny_run(tmp_path, steps=4, checkpoint={"save_every": 1, "background": background, "on_disk_full": "continue"})
    monkeypatch.setattr(safetensors.torch, "save", lambda tensors: (_ for _ in ()).throw(TypeError("no such type")))
    with pytest.raises(RuntimeError, match="checkpoint of step 1 could not be written .*no such type"):
        train(run, on_save=saved.append)
    assert saved == [] and steps_of(run) == []


def test_a_terminated_process_saves_and_ends_with_exit_code_0(tmp_path):
    run, root = tiny_run(tmp_path, steps=10_000), Path(loop.__file__).parents[2]
    code = (
        f"import sys; sys.path[:0] = {[str(root), str(Path(__file__).parent)]}; from pathlib import Path\n"
        "from tiny_run import tiny_run; from mmkit.training.loop import train\n"
        f"result = train(tiny_run(Path({str(tmp_path)!r}), steps=10_000), on_log=lambda row: print(row['step'], flush=True)); print(result.hint)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        for line in child.stdout:
            if line.strip() == "2":
                child.send_signal(signal.SIGUSR1)
        assert child.wait(60) == 0
    finally:
        child.kill()
    assert "goes on from there" in line
    assert steps_of(run)[-1] == lines(run)[-1]["step"] >= 2


def test_a_new_program_after_warm_up_is_told_but_not_one_of_a_save(tmp_path, monkeypatch, caplog):
    """A device that compiles with its first step, with its fifth, and (several hosts gathering a checkpoint) while it saves after step 3."""
    compiled = []
    monkeypatch.setattr("mmkit.sharding.single.SingleBackend.compiles", lambda self: len(compiled))
    monkeypatch.setattr("mmkit.training.notes.save_checkpoint", lambda *_: compiled.append("gather") or True)
    step = loop.one_step

    def compiling(state):
        compiled.extend(["step"] * (state.step in (0, 4)))
        return step(state)

    monkeypatch.setattr(loop, "one_step", compiling)
    run = tiny_run(tmp_path, steps=6, checkpoint={"save_every": 3})
    train(run)
    assert [row["compiles"] for row in lines(run)] == [1, 1, 1, 2, 3, 3]
    told = [record.getMessage() for record in caplog.records if "compiled again" in record.getMessage()]
    assert told == ["step 5: the device compiled again (3 programs): a batch had a new shape"]


def test_the_share_of_each_source_is_told_at_the_end(tmp_path, caplog):
    caplog.set_level("INFO")
    one = tiny_run(tmp_path).data.sources[0]
    train(changed(tiny_run(tmp_path, steps=5), data__sources=(one.model_copy(update={"weight": 0.75}), one.model_copy(update={"name": "other"})),
                  data__samples_per_epoch=20))  # fmt: skip
    told = [record.getMessage()[11:] for record in caplog.records if "% of the samples were of source" in record.getMessage()]
    assert told == ["75.00% of the samples were of source made (15, wished 75.00%)", "25.00% of the samples were of source other (5, wished 25.00%)"]


TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
SRUN = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}  # a batch script with -n 4
ALONE = ({}, SCRIPT, {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, {"WORLD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}, {"LOCAL_RANK": "0"})


@pytest.mark.parametrize(("there", "refused"), [(TORCHRUN, True), (SRUN, True), *((there, False) for there in ALONE)])
def test_another_number_of_processes_than_the_batch_is_divided_by_is_refused(tmp_path, monkeypatch, there, refused):
    for name, value in there.items():
        monkeypatch.setenv(name, value)
    run = tiny_run(tmp_path, steps=1)
    if refused:
        with pytest.raises(ConfigError, match=r"global_batch 4 = device_batch 2 x accumulation 2 x 1 devices .* 2 devices share a step here"):
            train(run)
    else:
        environment.check_devices(run, devices=1)
