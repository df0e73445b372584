"""Collections of CLIP tasks: complete, sourced, and with averages that recompute to the published ones."""

import pytest

from mmkit.errors import InputError
from mmkit.evaluation.clip_sets import class_names
from mmkit.evaluation.collections import (
    COLLECTIONS,
    average,
    members,
    tasks,
    templates,
    zero_shot_task,
)

PUBLISHED = {name: dict(task.laion2b) for name, task in tasks().items()}


def test_collections_have_their_published_sizes():
    sizes = {name: len(tasks_of) for name, tasks_of in COLLECTIONS.items()}
    assert sizes == {"vtab": 19, "vtab+": 36, "imagenet_robustness": 5, "retrieval": 3}
    assert all(len(set(tasks_of)) == len(tasks_of) and set(tasks_of) <= set(tasks()) for tasks_of in COLLECTIONS.values())


def test_averages_recompute_to_the_published_ones():
    assert average(PUBLISHED, "vtab") == pytest.approx(0.4439, abs=5e-5)
    assert average(PUBLISHED, "vtab+") == pytest.approx(0.5463, abs=5e-5)
    assert average(PUBLISHED, "imagenet_robustness") == pytest.approx(0.6755, abs=5e-5)
    assert PUBLISHED["imagenet1k"]["acc1"] == 0.752
    assert PUBLISHED["mscoco_captions"] == {"image_retrieval_recall@5": 0.7108, "text_retrieval_recall@5": 0.84}


def test_an_average_over_fewer_tasks_is_refused():
    with pytest.raises(ValueError, match="acc1 of 1 of 5 tasks is missing: objectnet"):
        average({name: value for name, value in PUBLISHED.items() if name != "objectnet"}, "imagenet_robustness")


def test_names_expand_once_and_unknown_ones_get_a_suggestion():
    assert members(["imagenet_robustness", "imagenetv2", "cars"])[-1] == "cars" and len(members(["imagenet_robustness", "imagenetv2"])) == 5
    with pytest.raises(ValueError, match="did you mean 'imagenet1k'"):
        members("imagenet1")


def test_every_classification_task_has_prompts_and_nothing_can_be_changed():
    for name in members("vtab+"):
        assert all("{c}" in template or callable(template) for template in map(_text, templates(name)))
    assert len(templates("imagenet-a")) == 80 and len(templates("vtab/cifar10")) == 18
    with pytest.raises(TypeError):
        tasks()["cars"].laion2b["acc1"] = 1.0
    with pytest.raises(TypeError):
        tasks()["new"] = None


def _text(template):
    return template("{c}") if callable(template) else template


def test_tasks_bring_their_names_or_ask_for_them():
    assert len(zero_shot_task("imagenetv2").names) == 1000
    assert zero_shot_task("voc2007_multilabel", ["cat", "dog"]).multi_label
    task = zero_shot_task("vtab/eurosat", ["forest"])
    assert task.prompts("forest")[0] == "a centered satellite photo of forest." and task.n_expected == 5400
    with pytest.raises(ValueError, match="0 class names"):
        zero_shot_task("cars")
    with pytest.raises(ValueError, match="benchmark_recall"):
        zero_shot_task("flickr30k")


def test_imagenets_own_list_has_two_names_twice(tmp_path):
    import open_clip

    for name in ("imagenet1k", "stl10"):
        (tmp_path / f"wds_{name}").mkdir()
        (tmp_path / f"wds_{name}" / "classnames.txt").write_text("\n".join(open_clip.IMAGENET_CLASSNAMES))
    assert class_names("imagenet1k", str(tmp_path)) == tuple(open_clip.IMAGENET_CLASSNAMES)
    with pytest.raises(InputError, match="are both 'missile'"):
        class_names("stl10", str(tmp_path))
