"""The ViT-L/14 story on a tiny model: a spike, a lost loss, and a run that went back and ends near the clean one."""

from __future__ import annotations

import json
import math
from pathlib import Path

from mmkit.config import changed, load
from mmkit.figures.stability import CLIPPED, GAIN, LAYER, PRESET, SETTINGS, drawn, stability_story
from mmkit.training.rehearsal import rehearse
from tests.training.tiny_clip import clip_run, shards


def test_the_guarded_run_ends_within_noise_of_the_clean_one_and_its_decision_is_on_record(tmp_path, monkeypatch):
    monkeypatch.setenv("MMKIT_CACHE", str(tmp_path / "cache"))
    run = clip_run(tmp_path, shards(tmp_path / "shards"), steps=40)
    run = changed(run, train__stability__threshold=6, train__optimizer__lr=1e-3)
    story = rehearse(run, at_step=24, gain=GAIN, layer=LAYER, clipped=4)
    alone, guarded = ([line["loss"] for line in story.lines[name]] for name in ("unguarded", "strained"))
    assert story.unguarded.reason == "non-finite loss" and math.isnan(alone[-1]) and len(alone) == 29
    assert max(alone[24:28]) > max(alone[16:24]) + 0.1  # it rises before it is gone
    assert story.strained.reason == "done" and len(guarded) == 40 and all(map(math.isfinite, guarded))
    assert abs(story.gap) < 2 * story.noise + 0.05
    (path,) = sorted(Path(story.strained.folder, "stability").iterdir())
    record = json.loads(path.read_text())
    assert record["decision"] == story.events[0]["decision"] and record["decision"]["action"] == "rewind"
    assert record["decision"]["precision"] == "fp32" and record["decision"]["rewind_to"] >= 24 and record["decision"]["keys"]
    picture = drawn(story)
    assert set(picture.table["run"]) == {"clean, fp32", "fp16, left to itself", "fp16, guarded"}
    assert len(picture.table) == 40 + 29 + 40 and f"{story.gap:+.3f}" in picture.figure.axes[0].get_title()
    assert Path(picture.save(tmp_path / "figures")).stat().st_size > 10_000


def test_the_story_is_left_out_at_zero_steps_and_its_settings_are_settings(tmp_path):
    run = load("8b-debug", "finetune", {"root": str(tmp_path)})
    assert stability_story(run, 0) is None and not any(tmp_path.iterdir())
    twin = load(PRESET, "pretrain", SETTINGS | {"train.steps": 80})
    assert twin.train.steps == 80 > 48 + CLIPPED and twin.accumulation == 1


def test_a_contrastive_model_tells_the_story_itself(tmp_path, monkeypatch):
    told = {}
    monkeypatch.setattr("mmkit.figures.stability.rehearse", lambda run, **how: told.update(run=run, **how))
    monkeypatch.setattr("mmkit.figures.stability.drawn", lambda story: "drawn")
    for model, preset, layer in (("clip-tiny", "clip-tiny", ""), ("8b-debug", PRESET, LAYER)):
        assert stability_story(load(model, "finetune", {"root": str(tmp_path)}), 60) == "drawn"
        assert told["run"].backend.kind == "single" and told["run"].resolved
        assert (told["run"].preset, told["run"].train.steps, told["layer"], told["at_step"]) == (preset, 60, layer, 36)
