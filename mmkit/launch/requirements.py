"""What a run needs before it can start and this machine does not have: weights, tokenizers, packages, data
files; and `get`, which fetches.

Each missing thing is one `Requirement`: from where, how large, under which licence or behind which gate,
the command that gets it, and to where. The tables know what the published presets name; the hub is asked,
with a short timeout, for what they do not know. What has no download that a program may start says where
it comes from. How much disk a run fills is planned in `disk`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mmkit.config import ConfigError, RunConfig, SourceConfig, load
from mmkit.data.recipe import sources_of
from mmkit.errors import InputError
from mmkit.launch.disk import disk_of, disk_rows, free_bytes, gb, shown_free
from mmkit.launch.known import DATA, GRIT, PICTURES, WEIGHTS, Published
from mmkit.launch.plan import Plan
from mmkit.models.convert import files
from mmkit.models.encoders import source_of
from mmkit.models.exports import UnfinishedError, train_command
from mmkit.storage import Store, is_remote

HUB_TIMEOUT = 3.0  # seconds for one question to the hub; after one that was not answered no more are asked
UNKNOWN = "unknown: see its page"
STAGE_BEFORE = "the stage before"
CLIP_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")  # of a tag that names none


@dataclasses.dataclass(frozen=True)
class Requirement:
    """One thing that a run needs and that is not here."""

    what: str
    kind: str  # weights or data
    source: str  # repository, package, file or the command that makes it
    to: str  # where it is put
    known: Published
    command: str = ""  # what gets it; empty where only the user can
    fetch: Callable[[], Any] | None = dataclasses.field(default=None, compare=False)  # what `get` does

    def row(self) -> dict[str, Any]:
        """For a table."""
        licence = self.known.licence + (
            "; gated: accept it on its page, then `hf auth login`" if self.known.gated else ""
        )
        row = {
            "missing": self.what,
            "from": self.source,
            "size": "unknown" if self.known.size is None else gb(self.known.size),
        }
        row |= {
            "licence or gate": licence,
            "get it with": "; then: ".join(filter(None, (self.command, self.known.how))),
        }
        return row | {"to": self.to, "free there": shown_free(self.to)}


def told(found: Sequence[Requirement]) -> str:
    """A table of what is missing, and below it what is to be done by hand; empty where nothing is."""
    from mmkit.notebook.tables import text

    by_hand: dict[str, list[str]] = {}
    for need in found:
        if need.known.how:
            by_hand.setdefault(need.known.how, []).append(need.what)
    rows = [need.row() | {"get it with": need.command or "see below"} for need in found]
    notes = [f"  {', '.join(names)}: {how}" for how, names in by_hand.items()]
    return "\n".join(["missing here", text(rows), *notes]) if found else ""


def beside(plan: Plan) -> str:
    """What `mmkit plan` shows below the plan: the disk, and what is missing."""
    from mmkit.notebook.tables import text

    needs = missing(plan.run)
    return "\n\n".join(filter(None, (text(disk_rows(plan, needs)), told(needs))))


def missing(run: RunConfig, ask: bool = False) -> tuple[Requirement, ...]:
    """What ``run`` needs and this machine does not have, each thing once. Nothing is downloaded.

    The hub is asked for what the tables do not say, with ``ask`` for everything. Files behind a URL are
    not looked for: whether they are there is seen when they are opened.
    """
    command = _command(run)
    found = [*_weights(run, command), *_data(run, command)]
    once = {(need.kind, need.source, need.to): need for need in reversed(found)}
    out, reachable = [], True
    for need in reversed(once.values()):
        unsure = need.known.size is None or need.known.licence == UNKNOWN
        of_hub = need.fetch is not None and (need.known.repository or files.is_repository(need.source))
        if reachable and of_hub and (ask or unsure):
            known = _asked(need)
            reachable = known is not None
            need = dataclasses.replace(need, known=known or need.known)
        out.append(need)
    return tuple(out)


def _command(run: RunConfig) -> str:
    """The `mmkit get` of this run. With other sources than the preset has, name them there too."""
    stage = f" --stage {run.stage}" if run.stage != "pretrain" else ""
    try:
        plain = load(run.preset, run.stage)
        same = (plain.model, plain.data.sources) == (run.model, run.data.sources)
    except ConfigError:  # a saved config of a preset that is not here
        same = False
    return f"mmkit get {run.preset}{stage}" + ("" if same else " with the settings of this run")


# ---------------------------------------------------------------- weights


def _weights(run: RunConfig, command: str) -> Iterator[Requirement]:
    """Weights and tokenizers of the sources, or of what the export that the run starts from refers to."""
    from mmkit.evaluation.scoring import export_of
    from mmkit.training.weights import parent_export

    export = None
    try:
        export = export_of(run) if run.stage == "eval" else parent_export(run)
    except ConfigError as error:
        stage = "finetune" if run.stage == "eval" and run.model.kind == "vlm" else "pretrain"
        place = run.start_from or f"{run.root.rstrip('/')}/{run.preset}/{stage}/{run.name}/export"
        by_hand = run.start_from or isinstance(error, UnfinishedError)
        made, how = ("", str(error)) if by_hand else (train_command(run, stage), "")
        known = Published(None, "your own", how=how)
        yield Requirement("weights to start from", "weights", STAGE_BEFORE, place, known, made)
    content = json.loads(Store(export).read("config.json")) if export else None
    for what, source, whole in _parts(run, content):
        yield from _weight(what, source, whole, command)
    contrastive = run.train.contrastive
    models = {contrastive.distill_from: contrastive.distill_weights} if run.stage != "eval" else {}
    if run.model.kind == "clip" and not export:
        models[run.model.name] = run.model.weights
    for name, weights in models.items():
        if weights:
            yield from _open_clip(name, weights, command)


def _parts(run: RunConfig, content: dict[str, Any] | None) -> Iterator[tuple[str, str | None, bool]]:
    """(what, source, whether its weights are read or only its tokenizer) of each part.

    ``content`` is config.json of an export that the run starts from: what is frozen there lies in its
    source. A published checkpoint in its authors' layout holds its language model and no encoders.
    """
    model = run.model
    if model.kind == "clip":
        text = (model.architecture or {}).get("text_cfg", {})
        for name in () if content else model.tower_packs:
            yield f"tower {name}", f"pack:{name}", True
        yield "tokenizer", text.get("hf_tokenizer_name") or text.get("hf_model_name"), False
        return
    if content is not None and "references" in content:
        yield from ((unit, entry["source"], True) for unit, entry in content["references"].items())
    else:
        for encoder in model.encoders:
            # an hf: encoder is known by its config, which may be what is missing
            named = encoder.name.removeprefix("hf:") if encoder.name.startswith("hf:") else None
            yield f"encoder {encoder.name}", encoder.weights or named or source_of(encoder), True
    if content is None:
        yield "language model", model.language.source, True
    if content is None or run.stage != "eval":  # for scoring, an export brings its tokenizer along
        yield "tokenizer", model.language.tokenizer or model.language.source, False


def _weight(what: str, source: str | None, whole: bool, command: str) -> Iterator[Requirement]:
    from huggingface_hub import constants

    from mmkit.models import packs

    if source in (None, "random", "bytes") or is_remote(source) or Path(source).expanduser().exists():
        return
    if source.startswith("pack:"):
        name = source.removeprefix("pack:")
        try:
            packs.pack_path(name)
        except InputError as error:
            pack = packs.PACKS.get(name)
            known = Published(None, pack.licence if pack else UNKNOWN, how=str(error))
            yield Requirement(what, "weights", source, sys.prefix, known, pack.install if pack else "")
    elif not files.is_repository(source):
        known = Published(
            None,
            UNKNOWN,
            how=f"{source} is a path, and nothing is there: put the files there or name another",
        )
        yield Requirement(what, "weights", source, source, known)
    elif not _cached(source, whole):
        known = WEIGHTS.get(source, Published(None, UNKNOWN))
        known = known if whole else dataclasses.replace(known, size=None)
        fetch = functools.partial(_get_weights, source, whole)
        yield Requirement(what, "weights", source, constants.HF_HUB_CACHE, known, command, fetch)


def _cached(repository: str, whole: bool) -> bool:
    """Whether the hub cache holds what is read of a repository, complete."""
    try:
        folder = files.snapshot(repository, whole, local=True)
        if whole:
            return bool(files.weight_files(folder))
    except InputError:
        return False
    return any(folder.glob("*token*")) or (folder / "vocab.json").is_file()


def _get_weights(repository: str, whole: bool) -> None:
    folder = files.snapshot(repository, whole)
    if whole:
        files.weight_files(folder)


def _open_clip(name: str, weights: str, command: str) -> Iterator[Requirement]:
    """Weights of a contrastive model: a tag of open_clip, which fetches one file of it, or any other source."""
    import open_clip
    from huggingface_hub import constants, try_to_load_from_cache

    from mmkit.models.clip import download

    what, tag = f"weights of {name}", {}
    if not Path(weights).exists():
        tag = open_clip.get_pretrained_cfg(name, weights) or {}
    if not tag:
        yield from _weight(what, weights, True, command)
        return
    repository, _, file = tag.get("hf_hub", "").rpartition("/")
    if repository:
        names = (file, Path(file).with_suffix(".safetensors").name) if file else CLIP_FILES
        here = any(isinstance(try_to_load_from_cache(repository, each), str) for each in names)
        source, place = repository, constants.HF_HUB_CACHE
    else:
        source, place = tag["url"], str(Path("~/.cache/clip").expanduser() / tag["url"].rpartition("/")[2])
        here = Path(place).is_file()
    if not here:
        known, fetch = Published(None, UNKNOWN), functools.partial(download, tag, weights)
        yield Requirement(what, "weights", source, place, known, command, fetch)


# ---------------------------------------------------------------- data


def _data(run: RunConfig, command: str) -> Iterator[Requirement]:
    for source in (*sources_of(run.data), *run.data.validation) if run.stage != "eval" else ():
        looks = {"pack": _pack, "webdataset": _shards}
        yield from looks.get(source.format, _file)(source, command)
    for task in run.evaluation.tasks if run.stage == "eval" else ():
        from mmkit.evaluation.scoring import check_tasks

        one = run.model_copy(
            update={"evaluation": run.evaluation.model_copy(update={"tasks": (task,)}), "dry_run": False}
        )
        try:
            check_tasks(one)
        except ConfigError as error:
            folder = os.environ.get("MMKIT_EVAL_DATA", "data/eval")
            yield Requirement(
                f"task {task}", "data", task, folder, Published(None, "the benchmark's own", how=str(error))
            )


def _pack(source: SourceConfig, command: str) -> Iterator[Requirement]:
    """A pack of the offline data. It is made from installed packages, when it is first read at the latest."""
    from mmkit.data.demo import open_pack, pack_folder

    folder = pack_folder(source.path)
    if not (folder / "record.json").is_file():
        known = Published(None, "that of its packages; `mmkit data demo` lists them")
        what, made, command = f"data {source.name}", f"pack:{source.path}", f"mmkit data demo {source.path}"
        # opening a pack makes it, and says why where it cannot
        fetch = functools.partial(open_pack, source.path, source.split)
        yield Requirement(what, "data", made, str(folder), known, command, fetch)


def _shards(source: SourceConfig, command: str) -> Iterator[Requirement]:
    """Tar shards on a disk: the first one stands for all, as looking for 20,000 of them on a shared disk
    takes minutes."""
    from mmkit.data.tar_files import expand

    if is_remote(source.path) or source.path.startswith("pipe:"):
        return
    try:
        first, why = expand(source.path)[0], "{} is not here"
    except ConfigError as error:
        first, why = "", str(error)
    if Path(first).is_file() or is_remote(first):
        return
    folder = Path(source.path.partition("{")[0]) if "{" in source.path else Path(source.path).parent
    own = Published(
        None, UNKNOWN, how=f"{why.format(first)}: put your shards there, or name them in data.sources"
    )
    yield Requirement(f"data {source.name}", "data", source.path, str(folder), DATA.get(folder.name, own))


def _file(source: SourceConfig, command: str) -> Iterator[Requirement]:
    """The file of a source, and its folder of pictures."""
    if is_remote(source.path) or (source.format == "parquet" and files.is_repository(source.path)):
        return  # `datasets` finds and fetches the data sets of the hub by itself
    path = Path(source.path)
    listed = DATA.get(path.name)
    if not (path.exists() or any(path.parent.glob(path.name))):
        known = listed or Published(
            None, UNKNOWN, how=f"{path} is your own file: put it there, or name another in data.sources"
        )
        fetch = functools.partial(_get_file, known, path) if known.repository else None
        alone = dataclasses.replace(known, how="" if known.repository else known.how)
        name = f"{known.repository}/{known.file}" if known.repository else path.name
        yield Requirement(
            f"data {source.name}", "data", name, str(path), alone, command if fetch else "", fetch
        )
    if source.images is None or is_remote(source.images) or _has_pictures(Path(source.images)):
        return
    known, fetch, name = PICTURES.get(Path(source.images).name), None, source.images
    if listed and listed is not GRIT:
        known = dataclasses.replace(listed, size=None)
    if listed and listed.archives:
        name = f"{listed.repository}/{', '.join(listed.archives)}"
        fetch = functools.partial(_get_archives, listed, Path(source.images))
    known = known or Published(
        None, UNKNOWN, how=f"put the pictures that {path.name} names below {source.images}"
    )
    yield Requirement(
        f"pictures of {source.name}", "data", name, source.images, known, command if fetch else "", fetch
    )


def _has_pictures(folder: Path) -> bool:
    """Whether a folder holds more than archives that were fetched into it and are not unpacked."""
    packed = (".zip", ".tgz", ".gz")
    return folder.is_dir() and any(
        entry.is_dir() or not (entry.name.endswith(packed) or ".tar" in entry.name)
        for entry in folder.iterdir() if not entry.name.startswith(".")
    )  # fmt: skip


def _get_file(known: Published, path: Path) -> None:
    from huggingface_hub import hf_hub_download

    # Beside its place and not in the hub cache, where a second copy would stay.
    path.parent.mkdir(parents=True, exist_ok=True)
    got = _told(
        known.repository,
        lambda: hf_hub_download(known.repository, known.file, repo_type="dataset", local_dir=path.parent),
    )
    if Path(got) != path.absolute():
        os.replace(got, path)
        if not any(Path(got).parent.iterdir()):
            Path(got).parent.rmdir()


def _get_archives(known: Published, folder: Path) -> None:
    from huggingface_hub import snapshot_download

    options = {"repo_type": "dataset", "local_dir": folder, "allow_patterns": list(known.archives)}
    _told(known.repository, lambda: snapshot_download(known.repository, **options))


def _told(repository: str, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:  # the hub client raises a dozen unrelated classes; the cause is kept
        raise InputError(files.hub_problem(repository, error, "dataset")) from error


# ---------------------------------------------------------------- asking and fetching


def _asked(need: Requirement) -> Published | None:
    """What the hub says of a requirement; None where it does not answer. What it does not say stays as it was
    known."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import filter_repo_objects

    known = need.known
    repository, kind = (known.repository, "dataset") if known.repository else (need.source, "model")
    try:
        info = HfApi().repo_info(repository, repo_type=kind, files_metadata=True, timeout=HUB_TIMEOUT)
    except Exception as error:  # the hub client raises a dozen unrelated classes
        if getattr(error, "response", None) is None:
            return None
        return dataclasses.replace(known, how=files.hub_problem(repository, error, kind))
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    if kind == "dataset":
        patterns = [known.file] if need.source.endswith(known.file) else list(known.archives)
    elif need.what == "tokenizer":
        patterns = list(files.HUB_SMALL)
    else:
        safe = any(name.endswith(".safetensors") and "/" not in name for name in sizes)
        patterns = [*files.HUB_SMALL, *(["*.safetensors"] if safe else [f"*{end}" for end in files.PICKLED])]
    size = sum(sizes[name] for name in filter_repo_objects(list(sizes), allow_patterns=patterns))
    licence = getattr(info.card_data, "license", None) if known.licence == UNKNOWN else None
    return dataclasses.replace(
        known, size=size, licence=str(licence or known.licence), gated=bool(info.gated)
    )


def get(
    runs: Iterable[RunConfig],
    only: str | None = None,
    dry_run: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Fetches what ``runs`` need and this machine does not have, of ``only`` weights or data; ``dry_run``
    only says what that is.

    What is whole is not fetched again. One failure does not stop the others: InputError at the end names
    each. What only the user can get is told, and is no error; InputError before anything is fetched where
    a disk cannot hold it.
    """
    found = {
        (need.source, need.to): need
        for run in runs
        for need in missing(run, ask=True)
        if need.source != STAGE_BEFORE
    }
    wanted = [need for need in found.values() if only in (None, need.kind)]
    say(told(wanted) or "nothing is missing")
    if dry_run:
        return
    fetched = [need for need in wanted if need.fetch is not None]
    _check_room(fetched)
    problems = []
    for need in fetched:
        say(f"{need.what}: {need.source} -> {need.to}")
        try:
            need.fetch()
        except InputError as error:
            problems.append(f"{need.what}: {error}")
    if problems:
        raise InputError("\n".join([f"{len(problems)} of {len(fetched)} could not be fetched:", *problems]))
    if fetched:
        left = ", ".join(need.what for need in wanted if need.fetch is None)
        say(f"fetched {len(fetched)}; left to you: {left or 'nothing'}")


def _check_room(wanted: Sequence[Requirement]) -> None:
    """InputError where what is known of the sizes is more than the free space of a disk."""
    needs: dict[Any, list[Requirement]] = {}
    for need in wanted:
        needs.setdefault(disk_of(need.to), []).append(need)
    for group in needs.values():
        size, free = sum(need.known.size or 0 for need in group), free_bytes(group[0].to)
        if free is not None and size > free:
            where = (
                "set HF_HOME to a larger disk"
                if group[0].kind == "weights"
                else "name another path in data.sources"
            )
            raise InputError(
                f"{', '.join(need.what for need in group)} take {gb(size)}, "
                f"{group[0].to} has {gb(free)} free; {where}"
            )
