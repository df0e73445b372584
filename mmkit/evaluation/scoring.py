"""``mmkit eval`` and the 04 notebook: the newest export of a run, its tasks, one results folder, and the
demo's headline numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mmkit.config import ClipConfig, ConfigError, ModelConfig, RunConfig
from mmkit.errors import InputError
from mmkit.evaluation.documents import listed, picture_faults
from mmkit.evaluation.published import published_score
from mmkit.evaluation.runner import Progress, Result, compared, evaluate, read_results, write_results
from mmkit.evaluation.task import Task, find
from mmkit.evaluation.tasks.pack_documents import is_made, not_made
from mmkit.evaluation.zero_shot import Share
from mmkit.models.exports import check_parent, finished_export, how_to_train
from mmkit.sharding.backend import COMPUTE_DTYPE, Backend, create
from mmkit.storage import Store, fetched

log = logging.getLogger(__name__)


def evaluate_run(
    run: RunConfig, *, share: Share = Share(), progress: Progress | None = None, checked: bool = False
) -> list[Result]:
    """Scores the run's export on every task of ``run.evaluation``, and adds each to results.json and
    samples.jsonl in its folder when it ends: what stops a later task, an interrupt or an error, leaves it
    there. Its backend is that of one process on one device (`launch.launch.for_this_machine`).

    Before weights are read: ConfigError naming the command that makes a missing export, or the nearest task
    of an unknown one; InputError where documents cannot be used (`check_documents`; ``checked`` where the
    caller has done that) or the folder's results.json is damaged.
    """
    check_tasks(run)
    if not checked:
        check_documents(run)
    export = export_of(run)
    stored = read_results(run.folder)["results"]
    backend = create(run.backend, run.train.precision)
    where = {"device": backend.device.type, "precision": backend.precision}
    results: list[Result] = []
    try:
        for result in evaluate_model(run, *opened(export, backend), backend, share=share, progress=progress):
            results.append(compared(result, stored))
            if share.rank == 0:
                write_results(run.folder, results[-1:], {"export": export, "preset": run.preset} | where)
    except (Exception, KeyboardInterrupt):
        if results:
            done = ", ".join(result.task for result in results)
            place = Store(run.folder).path("results.json")
            log.warning("stopped; what was scored before is in %s: %s", place, done)
        raise
    return results


def opened(export: str, backend: Backend) -> tuple[torch.nn.Module, ModelConfig, Any, list[Callable]]:
    """(model, its config, its tokenizer, its image transforms) of an export, the model on the device of
    ``backend`` and in the types that its precision needs there.
    """
    from mmkit.models.build import image_transforms, tokenizer
    from mmkit.models.pretrained import from_pretrained

    model, config = from_pretrained(export, backend.device, half=COMPUTE_DTYPE[backend.precision])
    log.info("%s is on %s, computing in %s", export, backend.device, backend.precision)
    words = fetched(export) / "tokenizer"
    made = tokenizer(config, words) if words.is_dir() else tokenizer(config)
    return model.eval(), config, made, image_transforms(config)


def evaluate_model(
    run: RunConfig,
    model,
    config,
    tokenizer,
    transforms,
    backend: Backend,
    *,
    share: Share = Share(),
    progress: Progress | None = None,
) -> Iterator[Result]:
    """The same for a model at hand, which was put where ``backend`` is (`opened`): each task's result when it
    ends; nothing is written."""
    settings = run.evaluation
    if isinstance(config, ClipConfig):
        from mmkit.evaluation.clip_sets import results_of
        from mmkit.evaluation.tasks.clip_demo import Towers

        towers = Towers.of(model, tokenizer, transforms, backend)
        yield from results_of(settings.tasks, towers, batch=settings.batch, share=share, limit=settings.limit)
        return
    from mmkit.evaluation.answering import VlmAnswerer
    from mmkit.evaluation.tasks.table import TASKS

    answer = VlmAnswerer(model, config, tokenizer, transforms, backend)
    for name in settings.tasks:
        task = find(name, TASKS)
        if settings.max_new_tokens is not None:
            task = dataclasses.replace(
                task, decode=dataclasses.replace(task.decode, max_new_tokens=settings.max_new_tokens)
            )
        result = evaluate(
            task,
            answer,
            batch=settings.batch,
            limit=settings.limit,
            share=share,
            seed=run.seed,
            progress=progress,
        )
        known = published_score(run.preset, name, result.unit)
        beside = (
            {} if known is None else {"published": {"metrics": {result.main_metric: known}, "groups": {}}}
        )
        yield dataclasses.replace(result, controls=result.controls | beside)


def check_documents(run: RunConfig) -> list[dict[str, Any]]:
    """Looks at every document that ``run`` asks: complete sets, their fields, and each picture decoded. One
    row a task.

    A pack of the offline data that is not made yet is not made for it. InputError with the faults of all
    tasks; ConfigError for documents that are not here, which a dry run has as a row.
    """
    check_tasks(run)
    if isinstance(run.model, ClipConfig):
        from mmkit.evaluation.clip_sets import look

        looks = look(run.evaluation.tasks, run.evaluation.limit)
    else:
        from mmkit.evaluation.tasks.table import TASKS

        limit = run.evaluation.limit
        looks = {name: functools.partial(_look, TASKS[name], limit) for name in run.evaluation.tasks}
    rows, faults = [], []
    for name, look_at in looks.items():
        try:
            rows.append({"task": name} | {"state": "ok"} | look_at())
        except ConfigError as error:
            if not run.dry_run:
                raise
            nothing = {"documents": 0, "asked": 0, "pictures": 0}
            rows.append({"task": name, "state": f"not here: {error}"} | nothing)
        except InputError as error:
            faults.append(str(error))
    if faults:
        raise InputError("\n".join(faults))
    return rows


def _look(task: Task, limit: int | None) -> dict[str, Any]:
    """How many documents a task has, how many of them are asked and about how many pictures; InputError where
    one cannot be used."""
    task.available()
    if task.pack and not is_made(task.pack):
        return not_made(task.pack)
    everything = task.checked_documents()
    asked = everything if limit is None else task.checked_documents(limit)
    pictures = {ref.identity: ref for example in asked for ref in task.visuals(example)}
    if wrong := picture_faults(pictures.values()):
        raise InputError(f"task {task.name}: {listed(wrong, len(pictures), 'pictures')}")
    return {"documents": len(everything), "asked": len(asked), "pictures": len(pictures)}


def check_tasks(run: RunConfig) -> None:
    """ConfigError for a run without tasks, with one that is not in the table of its kind of model or is named
    twice, or whose documents are not here (a dry run has those in `check_documents`). Nothing is opened."""
    from mmkit.evaluation.clip_sets import check_names
    from mmkit.evaluation.tasks.table import TASKS

    if not run.evaluation.tasks:
        raise ConfigError(f"evaluation.tasks of {run.preset!r} is empty; name at least one task")
    if len(set(run.evaluation.tasks)) < len(run.evaluation.tasks):
        names = ", ".join(run.evaluation.tasks)
        raise ConfigError(f"evaluation.tasks names a task twice: {names}; leave one out")
    if isinstance(run.model, ClipConfig):
        return check_names(run.evaluation.tasks, present=not run.dry_run)
    for name in run.evaluation.tasks:
        task = find(name, TASKS)
        if not run.dry_run:
            task.available()


def export_of(run: RunConfig) -> str:
    """The export to score: ``start_from``, else the finetune stage's, else the pretrain stage's of the same
    preset and name.

    ConfigError where there is none, where the stage to score was begun and has not ended (an earlier stage is no
    stand-in for it), and where the stage before it was trained anew since.
    """
    if run.start_from:
        folders = {run.start_from.rstrip("/"): "it is what start_from names; let that run end first"}
    else:
        stages = ("finetune", "pretrain")
        go_on = {stage: how_to_train(run, stage, "finish it with") for stage in stages}
        folders = {f"{run.root.rstrip('/')}/{run.preset}/{stage}/{run.name}": go_on[stage] for stage in stages}
    for folder, what_to_do in folders.items():
        if found := finished_export(folder, what_to_do):
            check_parent(folder, found)
            return found
    stage = "pretrain" if isinstance(run.model, ClipConfig) else "finetune"
    places = " or ".join(Store(each).path() for each in folders)
    raise ConfigError(f"no export to score in {places}; {how_to_train(run, stage, 'make one with')}")


HEADLINES: Mapping[str, tuple[str, ...]] = {
    "easy_vqa_exact_match": ("easy_vqa", "metrics", "exact_match"),
    "easy_vqa_shuffled": ("easy_vqa", "controls", "shuffled", "metrics", "exact_match"),
    "easy_vqa_shape": ("easy_vqa", "groups", "type", "shape", "exact_match"),
    "easy_vqa_color": ("easy_vqa", "groups", "type", "colour", "exact_match"),
    "easy_vqa_yes_no": ("easy_vqa", "groups", "type", "yes-no", "exact_match"),
    "easy_vqa_prior": ("easy_vqa", "controls", "prior", "metrics", "exact_match"),
    "easy_vqa_majority": ("easy_vqa", "controls", "majority", "metrics", "exact_match"),
    "charts_exact_match": ("charts", "metrics", "exact_match"),
    "charts_shuffled": ("charts", "controls", "shuffled", "metrics", "exact_match"),
    "regions_refer": ("regions_refer", "metrics", "exact_match"),
    "regions_ground_iou": ("regions_ground", "metrics", "iou"),
    "clip_recall_at_5": ("clip_retrieval", "metrics", "image_to_text_R@5"),
    "clip_chance_at_5": ("clip_retrieval", "controls", "chance", "metrics", "image_to_text_R@5"),
    "clip_zero_shot": ("clip_zero_shot", "metrics", "acc1"),
    "clip_majority": ("clip_zero_shot", "controls", "majority", "metrics", "acc1"),
}


def headline(results: Sequence[Result]) -> dict[str, float]:
    """The numbers that ``make demo`` collects, as far as these results hold them, and every other task's
    score named with its unit.
    """
    by_task = {result.task: vars(result) for result in results}
    found = {name: _at(by_task, path) for name, path in HEADLINES.items()}
    named = {path[0] for path in HEADLINES.values()}
    others = {
        f"{result.task}_{result.main_metric}"
        + ("" if result.unit == "fraction" else f"_{result.unit}"): result.score
        for result in results
        if result.task not in named
    }
    return {name: value for name, value in (found | others).items() if value is not None}


def _at(tree: Any, path: Sequence[str]) -> float | None:
    for part in path:
        if not isinstance(tree, Mapping) or part not in tree:
            return None
        tree = tree[part]
    return tree
