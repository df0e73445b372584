"""A DeepSpeed folder can be gone on from: the same weights, moments and step."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmkit.config import ConfigError
from mmkit.training.assemble import assemble
from mmkit.training.checkpoint import CheckpointError
from mmkit.training.loop import train
from mmkit.training.run_folder import restore
from tests.training.tiny_run import tiny_run

pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Folders that DeepSpeed wrote with two processes."""
    folder, here = tmp_path_factory.mktemp("deepspeed"), Path(__file__).parent
    tiny_run(folder)
    environment = os.environ | {"PYTHONPATH": f"{here.parents[1]}:{here}", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(here / "deepspeed_writer.py")]
    done = subprocess.run([*command, str(folder)], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_weights_moments_and_step_are_deepspeeds_own(written, stage):
    folder, path = written, str(written / f"zero{stage}")
    held = torch.load(f"{path}.pt", weights_only=True)
    state = assemble(tiny_run(folder, name="probe"))
    restore(state, path)
    assert state.step == 3 and state.backend.extra_state()["optimizer_step"] == 3
    got = dict(state.backend.export_state())
    assert got.keys() == held.keys()
    for name, entry in held.items():
        for kind, tensor in entry.items():
            assert torch.allclose(got[name][kind], tensor, rtol=1e-6, atol=1e-9), (name, kind)
    result = train(tiny_run(folder, name=f"on{stage}", steps=4, resume=path))
    assert result.reason == "done" and result.steps == 4 and result.last["step"] == 4


@pytest.mark.slow
def test_a_run_that_trains_something_else_refuses_the_folder(written):
    folder, path = written, str(written / "zero2")
    with pytest.raises(CheckpointError, match="lacks .* trained parameters of this run, first 'language"):
        train(tiny_run(folder, name="other", trainable=["connector", "samplers", "language"], resume=path))


def test_a_folder_without_optimizer_files_is_no_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match="is no complete checkpoint .* or a DeepSpeed checkpoint"):
        train(tiny_run(tmp_path, resume=str(tmp_path)))
