"""The command line: quick help on every command, one message and exit code 2 for a user's error, the same runs as notebooks."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from mmkit import cli
from mmkit.config import ConfigError, RunConfig, load, to_yaml
from mmkit.listing import settings
from mmkit.values import names_of

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ["", "doctor", "plan", "data", "data demo", "data check", "data shards", "train", "eval", "launch", "convert"]
COMMANDS += ["settings", "list", "get", "figures", "notebook", "notebook run", "notebook demo"]
HEAVY = (
    "import sys; from mmkit import cli; cli.build_parser(); print([m for m in ('torch', 'transformers', 'IPython') if m in sys.modules])"
)


def options(*words: str):
    return cli.build_parser().parse_args(list(words))


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_explains_itself(words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*words.split(), "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and "usage: mmkit" in shown
    examples = [line.removeprefix("example: ") for line in shown.splitlines() if line.startswith("example: ")]
    assert len(examples) == (words not in ("", "data", "notebook")), "one example of each command"
    for example in examples:
        program, *rest = shlex.split(example)
        assert program == "mmkit" and example.startswith(f"mmkit {words}") and hasattr(options(*rest), "run_command")


def test_help_imports_nothing_heavy():
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", HEAVY], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]" and time.monotonic() - started < 10


def test_the_version_is_the_installed_one(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.strip() == f"mmkit {importlib.metadata.version('mmkit')}"


def test_every_setting_is_listed_with_its_meaning():
    rows = settings()
    names = [row["setting"] for row in rows]
    assert set(names_of(RunConfig)) <= set(names) and {"data.sources[].images", "model.encoders[].side"} <= set(names)
    assert [row["setting"] for row in rows if not row["meaning"] or not row["type"]] == []


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["settings", "warmup"], "train.optimizer.warmup  number  0.03     below 1: share of all steps; else steps"),
        (["settings", "image_fit"], "pad | square | stretch"),
        (["settings", "rank", "--model", "tiny", "--stage", "finetune"], "16"),
        (["list", "models"], "ferret-7b-qlora-debug"),
        (["list", "tasks"], "easy_vqa"),
        (["list", "tasks"], "imagenet1k"),
        (["list", "templates"], "USER: QUESTION ASSISTANT: ANSWER</s>"),
        (["list", "encoders"], "clip-l-336"),
        (["list", "packs"], "clip_pairs"),
        (["list", "backends"], "backend.zero_stage=3"),
        (["list", "figures"], "cambrian_benchmarks"),
    ],
)
def test_what_there_is_to_choose_from_is_shown(words, shown, capsys):
    assert cli.main(words) == 0 and shown in capsys.readouterr().out


def test_a_word_that_no_setting_has_is_answered_with_ours(capsys):
    assert cli.main(["settings", "learning_rat"]) == 2 and "no setting has 'learning_rat'" in capsys.readouterr().err
    assert cli.main(["settings", "lora_r"]) == 2 and "it is 'train.lora.rank' here" in capsys.readouterr().err


def test_own_presets_are_listed_with_their_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "params").mkdir()
    (tmp_path / "params" / "mine.yaml").write_text("# My model. It is small.\nbase: tiny\n")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["list", "models"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("mine "))
    assert str(tmp_path / "params" / "mine.yaml") in line and line.endswith("My model")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with data at its root; the shell is in a folder of it."""
    for folder in ("notebooks", "data", "sub"):
        (tmp_path / folder).mkdir()
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "data" / "at_root.jsonl").write_text("")
    (tmp_path / "sub" / "here.jsonl").write_text("")
    (tmp_path / "sub" / "own.yaml").write_text("lr: 1")
    monkeypatch.chdir(tmp_path / "sub")
    return tmp_path


@pytest.mark.parametrize("typed", ["data/at_root.jsonl", "here.jsonl", "../sub/here.jsonl", "none.jsonl"])
def test_relative_paths_start_at_the_checkouts_root_and_files_that_a_shell_completes_where_it_is(checkout, capsys, typed):
    assert cli.main(["data", "check", typed]) == 2
    told = capsys.readouterr()
    place = {"none.jsonl": checkout / "none.jsonl", "data/at_root.jsonl": checkout / typed}.get(typed, checkout / "sub" / "here.jsonl")
    problem = "does not exist" if typed == "none.jsonl" else "is empty"
    assert f"{place} {problem}" in told.out + told.err or (problem == "is empty" and f"{typed} is empty" in told.out + told.err)
    assert Path.cwd() == checkout


def test_settings_start_at_the_checkouts_root_in_every_folder_of_it(checkout, capsys):
    sources = "data.sources=[{name: s, format: llava, path: data/none.jsonl}]"
    assert cli.main(["data", "check", "--model", "8b-debug", "--set", sources]) == 2
    assert f"data file {checkout}/data/none.jsonl does not exist" in capsys.readouterr().out
    os.chdir(checkout / "sub")
    assert cli.main(["notebook", "run", "03_none", "-f", "own.yaml"]) == 2
    assert f"no notebook {checkout}/03_none; notebooks lie in {checkout}/notebooks" in capsys.readouterr().err


def test_without_a_command_the_help_is_shown_and_the_code_is_2(capsys):
    assert cli.main([]) == 2 and "commands" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--model", "13c"], "did you mean '13b'"),
        (["train", "--model", "8b-debug", "--stage", "finetun"], "did you mean 'finetune'"),
        (["train", "--model", "8b-debug", "--set", "lrr=1"], "did you mean 'lr'"),
        (["train", "--model", "8b-debug", "--set", "lr"], "key=value"),
        (["train", "--model", "8b-debug", "--set", "lr=fast"], "lr = 'fast'"),
        (["train", "--model", "8b-debug", "--backend", "zero4"], "did you mean 'zero"),
        (["train", "--model", "8b-debug", "--config", "x.yaml"], "leave out --model"),
        (["plan", "--model", "8b-debug", "--machine", "a100"], "did you mean 'a100-"),
        (["train", "--mod", "8b-debug"], "no option --mod; did you mean --model?"),
        (["eval", "--model", "8b-debug", "--limi", "5"], "no option --limi; did you mean --limit?"),
        (["train", "--model", "8b-debug", "--dry_run"], "did you mean --dry-run?"),
        (["notebook", "run", "03_finetune", "--auto", "3"], "did you mean --autosave?"),
        (["get", "13c"], "did you mean '13b'"),
        (["figures", "cambrian_benchmark"], "did you mean 'cambrian_benchmarks'"),
        (["notebook", "run", "03_finetun"], "03_finetune.ipynb"),
        (["notebook", "run", "03_finetune", "-p", "lrr", "1e-4"], "did you mean 'lr'"),
        (["launch", "--target", "tpu", "--model", "8b", "--option", "acelerator=v4-8"], "did you mean 'accelerator'"),
        (["launch", "--target", "tpu", "--model", "8b", "--option", "accelerator=v9-8"], "accelerator = 'v9-8'"),
        (["eval", "--model", "8b-debug", "--run-dir", "/nonexistent"], "mmkit train --model 8b-debug --stage finetune"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_users_error_is_one_message_and_code_2(words, message, capsys):
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("mmkit: error: ") and message in error and "Traceback" not in error


def test_options_become_the_run_they_describe(tmp_path):
    words = ["train", "--model", "8b-debug", "--stage", "finetune", "--backend", "zero1", "--processes", "2", "--steps", "3"]
    run = cli.run_of(
        options(*words, "--run-dir", str(tmp_path), "--name", "x", "--resume", "never", "--set", "lr=1e-4", "seed=7", "bits=16")
    )
    assert (run.backend.kind, run.backend.zero_stage, run.backend.processes) == ("deepspeed", 1, 2)
    assert (run.train.steps, run.train.optimizer.lr, run.seed, run.resume) == (3, 1e-4, 7, "never")
    assert run.folder == f"{tmp_path}/8b-debug/finetune/x"


def test_a_saved_config_gives_the_same_run_and_can_be_changed(tmp_path):
    first = load("ferret-7b-debug", "finetune", {"lr": 1e-4, "root": str(tmp_path)})
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(first))
    assert cli.run_of(options("train", "--config", str(path))) == first
    assert cli.run_of(options("train", "--config", str(path), "--steps", "9")).train.steps == 9


def test_eval_is_always_the_eval_stage():
    assert cli.run_of(options("eval", "--model", "8b-debug")).stage == "eval"


def test_a_dry_run_of_a_model_too_large_ends_well_and_a_real_one_says_why(capsys, tmp_path):
    assert cli.main(["train", "--model", "llava-7b", "--stage", "finetune", "--dry-run", "--run-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "hidden states" in shown and "language" in shown and "not here" in shown
    assert cli.main(["train", "--model", "llava-7b", "--stage", "finetune", "--run-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "does not fit this machine" in error and "dry_run True" in error
    assert not list(tmp_path.iterdir())


def test_plan_on_named_devices_says_time_and_cost(capsys):
    line = ["plan", "--model", "8b-debug", "--backend", "xla", "--machine", "v4-8", "--samples", "1000", "--price", "3"]
    assert cli.main(line) == 0
    assert "TPU v4" in capsys.readouterr().out


def test_slurm_scripts_and_tpu_commands_can_be_shown(capsys):
    assert (
        cli.main(["launch", "--slurm", "--model", "8b-debug", "--backend", "ddp", "--option", "nodes=1", "tasks_per_node=2", "--show"]) == 0
    )
    assert "#SBATCH --nodes=1" in capsys.readouterr().out
    assert cli.main(["launch", "--tpu", "--model", "8b", "--run-dir", "gs://bucket/runs", "--option", "accelerator=v4-32", "--show"]) == 0
    assert "gcloud compute tpus tpu-vm create" in capsys.readouterr().out


def test_figures_are_listed_and_drawn(capsys, tmp_path):
    assert cli.main(["figures", "--list"]) == 0
    names = capsys.readouterr().out.split()
    assert "cambrian_benchmarks" in names
    assert cli.main(["figures", "cambrian_benchmarks", "--out", str(tmp_path)]) == 0
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".csv"}


@pytest.fixture
def pairs(tmp_path, monkeypatch):
    """A folder with a picture and tables of pairs: sound, without a caption, without a picture."""
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (4, 4)).save("a.png")
    for name, row in (("good", "a.png,a kite"), ("empty", "a.png,"), ("missing", "no.png,a boat")):
        Path(f"{name}.csv").write_text(f"image,title\na.png,a boat\n{row}\n")
    return tmp_path


@pytest.mark.parametrize(("name", "code"), [("good", 0), ("empty", 2), ("missing", 2)])
def test_a_file_of_pairs_is_checked_for_a_contrastive_model(pairs, capsys, name, code):
    assert cli.main(["data", "check", f"{name}.csv", "--format", "csv", "--model", "clip-tiny"]) == code
    assert ("ready to train" in capsys.readouterr().out) == (code == 0)


def test_the_exit_code_follows_the_share_the_run_allows_and_reports_hold_it(pairs, capsys):
    words = ["data", "check", "missing.csv", "--format", "csv", "--model", "clip-tiny", "--report", "out.json", "--set"]
    assert cli.main([*words, "data.max_bad_share=0.5"]) == 0 and not json.loads(Path("out.json").read_text())["would_fail"]
    assert cli.main([*words, "data.max_bad_share=0.4"]) == 2 and json.loads(Path("out.json").read_text())["share"] == 0.5
    capsys.readouterr()
    sources = "data.sources=[{name: s, format: csv, path: missing.csv}]"
    assert cli.main(["data", "check", "--model", "clip-tiny", "--report", "run.json", "--set", sources]) == 2
    assert "would stop" in capsys.readouterr().out and json.loads(Path("run.json").read_text())[0]["faults"] == {"missing image": 1}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["shards", "out", "--from", "missing.csv"], "no.png"),
        (["check", "good.csv", "--format", "csv", "--report", "nowhere/x.json"], "there is no folder nowhere"),
        (["shards", "out", "--from", "good.csv", "--filter", "n", "=<", "1"], "--filter"),
    ],
)
def test_files_that_are_not_there_are_one_message(pairs, capsys, words, message):
    assert cli.main(["data", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mmkit: error: ") and message in error and not Path("out/00000.tar").exists()


def test_shards_are_checked_by_captions_name_rules_and_decoded_pictures(pairs, capsys):
    from mmkit.data.tar_writer import ShardWriter

    for name, picture in (("good", Path("a.png").read_bytes()), ("broken", b"\x89PNG no picture")):
        with ShardWriter(name) as writer:
            for k in range(4):
                writer.write(f"{k}", {"png": picture, "caption": f"kite {k}", "json": {"punsafe": k / 4}})
    words = ["--caption", "caption", "--filter", "punsafe", "<", "0.5"]
    assert cli.main(["data", "shards", "good", *words]) == 0
    assert "4 samples found, 2 usable" in (shown := capsys.readouterr().out) and "left out: 2 filter punsafe < 0.5" in shown
    assert cli.main(["data", "shards", "good"]) == 2 and "wanted: one of jpg, png, jpeg, webp and txt" in capsys.readouterr().out
    assert cli.main(["data", "shards", "broken", *words]) == 2 and "2 undecodable image" in capsys.readouterr().out


def test_a_notebooks_parameters_take_any_value_as_papermill_does(monkeypatch):
    from mmkit.notebook import runner

    seen = []
    monkeypatch.setattr(runner, "run_notebook", lambda *args, **more: seen.append(args[2]) or runner.Outcome(0, Path("x"), 0.0))
    words = ["-p", "f", "-1e-5", "-p", "s=--flag", "--parameter", "t", "--flag=2", "-p", "k", "None", "-p", "d", '{1: "a=b"}', "-p", "e", ""]
    assert cli.main(["notebook", "run", "03_finetune", *words, "out.ipynb"]) == 0
    assert seen == [{"f": "-1e-5", "s": "--flag", "t": "--flag=2", "k": "None", "d": '{1: "a=b"}', "e": ""}]
    for wrong in (["-p"], ["-p", "f"], ["-p", "=3"]):
        with pytest.raises(SystemExit):
            cli.main(["notebook", "run", "03_finetune", *wrong])


def test_parameters_of_a_notebook_may_come_from_a_file(tmp_path):
    path = tmp_path / "values.yaml"
    path.write_text("model: 13b\nlr: 1e-4\nsettings: {train.global_batch: 64}\n")
    assert cli.read_values(str(path)) == {"model": "13b", "lr": 1e-4, "settings": {"train.global_batch": 64}}
    path.write_text("- a\n")
    with pytest.raises(ConfigError, match="one `name: value`"):
        cli.read_values(str(path))
    with pytest.raises(ConfigError, match="no parameter file"):
        cli.read_values(str(tmp_path / "none.yaml"))


def test_the_doctor_finds_this_environment_sound_and_names_what_is_missing(monkeypatch):
    from mmkit import doctor

    report = doctor.examine()
    assert not report.faults, report
    deepspeed = next(row for row in report.rows() if row["what"] == "deepspeed")
    assert "torch AdamW (no compiled ops)" in deepspeed["found"]
    json.dumps(report.rows())
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "0.0.1")
    broken = doctor.Report(tuple(doctor._packages()))
    assert broken.faults and all("pip install" in fault.remedy for fault in broken.faults if fault.what != "packages")
    assert "to put right" in str(broken)


@pytest.mark.slow
def test_an_installed_wheel_imports_whole_and_carries_its_presets(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(tmp_path / "source")]
    files = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=True
    ).stdout
    for name in files.split():
        if name.split("/")[0] in ("mmkit", "params", "pyproject.toml", "README.md") and (ROOT / name).is_file():
            target = tmp_path / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    subprocess.run(build, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    walk = (
        "import importlib, pkgutil, mmkit; from mmkit.config import load; from mmkit.presets import PARAMS; from mmkit.data.recipe import recipe;"
        "bad = [m.name for m in pkgutil.walk_packages(mmkit.__path__, 'mmkit.') if '.xla' not in m.name and '__main__' not in m.name"
        " and not importlib.import_module(m.name)]; load('13b'); recipe('cambrian_7m'); load('mine'); print(PARAMS)"
    )
    (tmp_path / "params").mkdir()
    (tmp_path / "params" / "mine.yaml").write_text("base: 13b\n")  # a user's, beside an installed wheel
    environment = {key: value for key, value in os.environ.items() if key != "MMKIT_PARAMS"} | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", walk], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith(str(tmp_path / "site" / "mmkit" / "params"))


def test_a_disk_that_refuses_is_one_line(monkeypatch, capsys):
    def full(options):
        raise OSError(28, "No space left on device", "runs/x")

    monkeypatch.setattr(cli, "_doctor", full)
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == "mmkit: error: [Errno 28] No space left on device: 'runs/x'\n"
    with pytest.raises(OSError, match="No space left"):
        cli.main(["doctor", "-v"])


@pytest.mark.parametrize("target", ["slurm", "tpu"])
def test_settings_that_cannot_train_are_refused_before_a_job_waits(target, capsys):
    words = ["launch", "--target", target, "--model", "8b-debug", "--dry-run", "--set", "bits=4"]
    assert cli.main(words) == 2
    assert "train.bits" in capsys.readouterr().err
