"""The model a stage starts from, and what of it is trained: source weights or the stage before, freezing, quantising, adapters.

Weights stay in their files until `Backend.prepare` places them one by one, so no process holds more than its share of a model that
is cut. Quantising and DoRA look at whole weights and need them before.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmkit.config import ConfigError, RunConfig, TrainConfig
from mmkit.errors import InputError
from mmkit.models.exports import finished_export, how_to_train
from mmkit.models.hollow import Stored, base_name, digest_of
from mmkit.models.vocabulary import added_tokens, row_tables, tables_of, train_rows_alone
from mmkit.sharding.backend import COMPUTE_DTYPE, Backend
from mmkit.storage import Store
from mmkit.training import adapters
from mmkit.training.gradients import check_allowed
from mmkit.training.optim import compiled, component_of

if TYPE_CHECKING:
    from mmkit.training.assemble import TrainState

log = logging.getLogger(__name__)


HASHERS = 4  # threads of a process that hash tensors


def build_model(run: RunConfig, export: str | None) -> tuple[nn.Module, dict[str, Stored], Any]:
    """The model this stage starts from (``export``, or where it is None its sources) with its weights still in files (`hollow`), where
    these are, and the model's file (COMPONENTS, SHARDING)."""
    from mmkit.models.pretrained import hollow

    model, stored = hollow(run.model, export)
    return model, stored, model_file(run)


def reader(stored: Mapping[str, Stored], prefix: str = "") -> Callable[[str], Tensor]:
    """Name -> whole CPU tensor, as `Backend.prepare` asks for it; ``prefix`` is what the names it asks for lack."""
    return lambda name: stored[base_name(prefix + name)].read()


def materialise(module: nn.Module, stored: Mapping[str, Stored], prefix: str = "") -> None:
    """Reads what of ``module`` is still in files. ``prefix`` stands before its names in ``stored``."""
    from mmkit.sharding.single import Filler

    Filler(torch.device("cpu"), reader(stored, prefix), "").fill(module)


def model_file(run: RunConfig) -> Any:
    """The file that holds the model's COMPONENTS and SHARDING."""
    from mmkit.models import clip, vlm

    return {"vlm": vlm, "clip": clip}[run.model.kind]


def starts_from_export(run: RunConfig) -> bool:
    """Whether a run starts from an export, made by the stage before or named, rather than from its sources."""
    return run.start_from != "source" and (run.start_from is not None or run.stage == "finetune")


def parent_export(run: RunConfig) -> str | None:
    """The export this run starts from: ``start_from``, or the pretrain stage of the same preset and name for a finetune stage.

    None where a run starts from its sources' weights (a pretrain stage, or ``start_from: source``). ConfigError, with what makes it, where
    it is missing, or where the run it belongs to is unfinished or at another step.
    """
    if not starts_from_export(run):
        return None
    if run.start_from is None:
        folder = f"{run.root.rstrip('/')}/{run.preset}/pretrain/{run.name}"
        makes, go_on = (how_to_train(run, "pretrain", verb) for verb in ("make it with", "finish it with"))
    else:
        folder, makes = run.start_from.rstrip("/"), "it is what start_from names; give a run folder with an export/, or an export"
        go_on = "it is what start_from names; let that run end first"
    if found := finished_export(folder, go_on):
        return found
    place = Store(folder).path("export")
    what_to_do = f"{makes} (or set start_from=source)"
    raise ConfigError(f"stage {run.stage!r} starts from {place}, which does not exist; {what_to_do}")


def check_exportable(run: RunConfig) -> None:
    """ConfigError for what would train to its end and could not be exported: an export holds quantised layers by reference to the weights
    that were quantised, so these must lie somewhere."""
    if run.stage == "eval" or run.train.bits == 16 or run.model.kind != "vlm":
        return
    if run.model.language.source != "random" or starts_from_export(run):
        return
    raise ConfigError(
        f"train.bits {run.train.bits} with model.language.source 'random' cannot be exported: the weights that are quantised lie in no file; "
        "train a stage with bits 16 and start from its export (start_from), or name a source"
    )


def check_patterns(train: TrainConfig) -> None:
    """ConfigError for a setting with a pattern that is no regular expression. What they match is seen when the model is built."""
    lora = train.lora
    patterns = {"lora.targets": lora.targets, "lora.modules_to_save": lora.modules_to_save} if lora else {}
    for setting, texts in (patterns | {"train.allow_no_grad": train.allow_no_grad}).items():
        for text in texts:
            compiled(setting, text)


def check_scope(model: nn.Module, train: TrainConfig, components) -> list[dict]:
    """The layers that get an adapter (`adapters.chosen`). ConfigError where settings name a component, layer or module that ``model`` lacks
    or that is not trained; it may be on the meta device."""
    present = list(dict.fromkeys(component_of(name, components) for name, _ in model.named_parameters()))
    if absent := [component for component in train.trainable if component not in present]:
        raise ConfigError(f"train.trainable names {', '.join(absent)}, which this model lacks; its components are {', '.join(present)}")
    trained, layers = set(train.trainable), []
    tables = tables_of(model) if train.new_tokens == "rows" else {}
    trained |= {component_of(f"{name}.weight", components) for name in tables}
    if train.lora:
        layers = adapters.targets_of(model, train.lora, components, getattr(model, "head", None))
        whole = adapters.modules_to_save(model, train.lora.modules_to_save, layers)
        trained |= {component_of(f"{name}.weight", components) for name in (*layers, *whole)}
        for name in tables:
            if any(f"{name}.".startswith(f"{other}.") for other in whole):
                told = "train.new_tokens 'rows' only its added rows: take one of them"
                raise ConfigError(f"lora.modules_to_save trains {name} whole, {told}")
    if not trained:
        raise ConfigError(f"train.trainable [] trains nothing in this model; its components are {', '.join(present)}")
    if idle := sorted(set(train.optimizer.lr_of) - trained):
        raise ConfigError(f"train.optimizer.lr_of names {idle[0]!r}, which is not trained; trained are {', '.join(sorted(trained))}")
    return adapters.chosen(layers, components)


def prepare_model(model: nn.Module, run: RunConfig, components, stored: Mapping[str, Stored]) -> dict[str, Any]:
    """Freezes, quantises and puts adapters as ``run.train`` says; returns tables for people. Nothing is wrapped yet."""
    train, tables = run.train, {}
    check_scope(model, train, components)
    if train.bits != 16 or (train.lora and train.lora.use_dora):
        materialise(model, stored)
    open_as_built = {name for name, p in model.named_parameters() if p.requires_grad}
    model.requires_grad_(False)
    head = getattr(model, "head", None)
    if train.bits != 16:
        adapters.quantise(model.language, train.bits, COMPUTE_DTYPE[train.precision] or torch.float32, skip=head)
    if train.lora:
        tables["adapters"] = adapters.inject(model, train.lora, components, head)
        log.info("adapters\n%s", adapters.table_text(tables["adapters"]))
    for name, parameter in model.named_parameters():
        locked = run.model.kind == "clip" and name not in open_as_built  # a locked tower stays locked
        if component_of(name, components) in train.trainable and not locked:
            parameter.requires_grad_(True)
            parameter.data = parameter.data.float()
    if hasattr(model, "lock"):
        model.lock()
    if run.model.kind == "vlm":
        ids, tables["added_tokens"] = added_rows(model, run)
        alone = train.new_tokens == "rows"
        vocabulary = tables_of(model)
        by_rows = [name for name, table in vocabulary.items() if alone or not table.weight.requires_grad]
        if alone:
            train_rows_alone(model, ids, reader(stored))
        # so that the adapter's folder carries them; a table that trains whole is in it as a module
        if train.lora and ids and by_rows:
            model.peft_config[adapters.ADAPTER].trainable_token_indices = dict.fromkeys(by_rows, ids)
    if run.model.kind == "vlm" and train.bits == 16 and COMPUTE_DTYPE[train.precision]:
        keep_half(model.language, stored)
    tables["components"] = component_table(model, components)
    opened = [row["component"] for row in tables["components"] if row["trainable"]]
    if not opened:
        raise ConfigError(f"train.trainable {list(train.trainable)} trains nothing in this model: all of it is locked")
    if run.data.cache_features and "encoders" in opened:
        raise ConfigError("data.cache_features keeps what frozen encoders give, but lora.modules_to_save names modules of encoders")
    check_allowed(train.allow_no_grad, (name for name, p in model.named_parameters() if p.requires_grad))
    return tables


def added_rows(model: nn.Module, run: RunConfig) -> tuple[list[int], list[dict]]:
    """Ids of the tokens that the run adds to the vocabulary, and for people one row a table: whether their
    rows train, where they are kept.

    ConfigError where rows are to train alone and there are none, or which are new is not known. ``model`` may
    be on the meta device.
    """
    train, language = run.train, run.model.language
    alone = train.new_tokens == "rows"
    try:
        ids = added_tokens(run.model)
    except (OSError, ValueError) as error:
        if alone:
            raise ConfigError(f"train.new_tokens 'rows': which rows are new is not known: {error}") from error
        # an export stands for itself, and its source may be gone
        log.info("whether tokens are added is not known: %s", error)
        return [], []
    if not ids:
        if alone:
            raise ConfigError(
                f"train.new_tokens 'rows', but no token is added to the {language.architecture['vocab_size']} of "
                f"{language.source!r}: raise model.language.architecture.vocab_size and name a "
                "model.language.tokenizer that has the new tokens, or take 'all'"
            )
        return [], []
    tables = tables_of(model)
    kept = adapters.modules_to_save(model, train.lora.modules_to_save, ()) if train.lora else []
    whole = {id(p) for name in kept for p in model.get_submodule(name).parameters()}
    trained = "language" in train.trainable or any(id(table.weight) in whole for table in tables.values())
    trains = "these rows alone" if alone else "the whole table" if trained else "nothing; new_tokens=rows would"
    places = "export/model*.safetensors" + (" and export/adapter" if train.lora else "")
    in_a_row = len(ids) > 1 and ids[-1] - ids[0] == len(ids) - 1
    shown = f"{ids[0]}-{ids[-1]}" if in_a_row else ", ".join(map(str, ids))
    row = {"added rows": len(ids), "ids": shown, "trains": trains, "kept in": places}
    return ids, [{"table": name} | row for name in tables]


def started_with(state: TrainState) -> dict[str, str]:
    """Name -> hash of the trained tensors this run began with, of those that a file holds: what is drawn follows from seed and version."""
    return {name: digest for name, digest in state.started_with.items() if base_name(name) in state.stored}


def adapter_record(run: RunConfig) -> dict[str, Any]:
    """What a checkpoint's trained tensors mean beside their shapes: they fit other settings of adapters too and would compute something
    else. Plain JSON; settings whose order says nothing are sorted."""
    lora = run.train.lora and run.train.lora.model_dump(mode="json")
    lora = lora and {name: sorted(value) if isinstance(value, list) else value for name, value in lora.items()}
    return {"lora": lora, "bits": run.train.bits, "trainable": sorted(run.train.trainable)}


def keep_half(language: nn.Module, stored: Mapping[str, Stored]) -> None:
    """Frozen linear weights whose file is in half precision stay so: autocast makes the same numbers of them as of fp32 copies, which take
    twice the memory. Embeddings and norms, and what is tied to them, become fp32: hidden states have their type."""
    others = {id(p) for module in language.modules() if not isinstance(module, nn.Linear) for p in module.parameters(recurse=False)}
    for path, layer in language.named_modules():
        one = stored.get(base_name(f"language.{path}.weight"))
        if not (one and isinstance(layer, nn.Linear)) or id(layer.weight) in others:
            continue
        if layer.weight.is_meta and not layer.weight.requires_grad:
            kind = one.dtype or one.read().dtype
            layer.weight.data = layer.weight.data.to(kind if kind in (torch.bfloat16, torch.float16) else torch.float32)


def component_table(model: nn.Module, components) -> list[dict]:
    """Parameters of each component, trainable and frozen."""
    rows: dict[str, dict] = {}
    for name, parameter in model.named_parameters():
        component = component_of(name, components)
        row = rows.setdefault(component, {"component": component, "trainable": 0, "frozen": 0})
        row["trainable" if parameter.requires_grad else "frozen"] += parameter.numel()
    return list(rows.values())


# ---------------------------------------------------------------- hashes of what a stage starts from


def start_digests(model: nn.Module, stored: Mapping[str, Stored], backend: Backend) -> dict[str, str]:
    """Name -> hash over all bytes of each parameter and of each buffer that belongs to a frozen part, as the stage starts from them.

    Of trained tensors in fp32, as checkpoints and exports hold them; of frozen ones as their file holds them, whatever type they are kept
    in. Processes share the work. ValueError on all of them where an export's source has changed since.
    """
    parameters, buffers, kept = dict(model.named_parameters()), dict(model.named_buffers()), model.state_dict()
    trained = {name for name, tensor in parameters.items() if tensor.requires_grad}
    # an export has the rows of added tokens in their tables
    trained |= {f"{path}.base_layer.weight" for path in row_tables(model)} & parameters.keys()
    moving = trained_buffers(model)
    everything = parameters | {name: buffer for name, buffer in buffers.items() if name in kept and name not in moving}
    codes = (torch.uint8, torch.int8)  # quantised on another device they may be others; what they were made of counts
    names = [name for name, tensor in everything.items() if tensor.dtype not in codes or base_name(name) in stored]

    def digest(name: str) -> str:
        one = stored.get(base_name(name))
        if one:
            one.verify()
        if name in trained:
            return digest_of(one.read() if one else everything[name], torch.float32)
        return one.digest if one and one.digest else digest_of(one.read() if one else everything[name])

    problem, found = "", {}
    with ThreadPoolExecutor(HASHERS) as pool:
        mine = names[backend.rank :: backend.world]
        try:
            found = dict(zip(mine, pool.map(digest, mine), strict=True))
        except (OSError, ValueError) as error:
            problem = str(error)
    parts = backend.all_objects((problem, found))
    if problems := [text for text, _ in parts if text]:
        raise InputError(problems[0])
    together = {name: value for _, part in parts for name, value in part.items()}
    return {name: together[name] for name in names}


def trained_buffers(module: torch.nn.Module, plain: Callable[[str], str] = str) -> dict[str, Tensor]:
    """Persistent buffers of modules that hold a trained parameter themselves, as a batch norm's running statistics."""
    out = {}
    for prefix, owner in module.named_modules():
        if any(p.requires_grad for p in owner.parameters(recurse=False)):
            for name, buffer in owner.named_buffers(prefix, recurse=False):
                if name.rsplit(".", 1)[-1] not in owner._non_persistent_buffers_set:
                    out[plain(name)] = buffer
    return out


def frozen_record(model: nn.Module, stored: Mapping[str, Stored], digests: Mapping[str, str], components) -> dict[str, dict[str, Any]]:
    """What a checkpoint says of the frozen weights it does not hold, by component: sources, number of parameters, one hash over all bytes,
    and that of each tensor."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    sizes, record = {name: p.numel() for name, p in model.named_parameters()}, {}
    for name, digest in digests.items():
        if name in trained:
            continue
        row = record.setdefault(component_of(name, components), {"sources": [], "parameters": 0, "tensors": {}})
        source = stored[base_name(name)].source if base_name(name) in stored else "drawn or read with the model"
        row["sources"] += [] if source in row["sources"] else [source]
        row["parameters"] += sizes.get(name, 0)
        row["tensors"][base_name(name)] = digest
    for row in record.values():
        row["sha256"] = hashlib.sha256(json.dumps(row["tensors"]).encode()).hexdigest()
    return record
