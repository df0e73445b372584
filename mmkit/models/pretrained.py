"""Exported models: a folder in the Hugging Face layout that `from_pretrained` reads back tensor for tensor.

    config.json         our config, versions, and which tensors are referenced
    model*.safetensors  tensors under our names
    adapter/            LoRA weights in peft's own layout, where adapters were trained
    tokenizer/

A frozen part that still equals its public source, tensor by tensor (sha256), is referenced by that source and not stored.
Nothing is told from the name of a folder. Not here: training checkpoints (`training.checkpoint`).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from mmkit.cache import atomic_folder
from mmkit.config import ClipConfig, ConfigError, ModelConfig, VlmConfig
from mmkit.errors import InputError
from mmkit.models.build import build, build_hollow, unit_readers, units_of
from mmkit.models.convert import files, llava
from mmkit.models.hollow import Stored, allocate, base_name, digest_of, same_tensor, without_memory
from mmkit.models.language import hf_config
from mmkit.models.merging import LOSS_LIMIT, Merging
from mmkit.models.vocabulary import ROWS, carried_by_adapter, folded
from mmkit.storage import fetched, is_remote

logger = logging.getLogger(__name__)
MARK = "mmkit_version"
LANGUAGE_SHAPES = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "tie_word_embeddings", "rms_norm_eps", "rope_parameters",
)  # fmt: skip
_QUANTISATION = re.compile(r"\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+)$|\.(SCB|weight_format)$")
Stream = Iterator[tuple[str, Tensor]]


# ---------------------------------------------------------------- save


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    config: ModelConfig,
    tokenizer=None,
    state: Iterable[tuple[str, Tensor]] | None = None,
    main: bool = True,
) -> Path:
    """Writes ``model`` to ``folder``, whole or not at all; an older export there is replaced.

    ``state`` yields (name, whole CPU tensor) where the model's own tensors are slices (a backend's ``full_parameters()``). Every
    process calls this and consumes ``state``; only ``main`` writes. The written files are opened again and checked.
    """
    folder = Path(folder)
    stream = state if state is not None else _untied(model)
    if not main:
        for _ in stream:
            pass
        return folder
    with atomic_folder(folder) as work:
        sources = {} if isinstance(config, ClipConfig) else _source_hashes(model, config)
        references: dict[str, dict[str, Any]] = {}
        adapters: dict[str, Tensor] = {}
        carried = carried_by_adapter(model)
        written = files.write(_stored(folded(model, stream), sources, references, adapters, carried), work)
        _check_files(work, written)
        _write_config(work, config, references)
        if adapters:
            _write_adapter(model, work / "adapter", adapters)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(work / "tokenizer")
    return folder


def _untied(model: nn.Module) -> Stream:
    """The model's state with each shared tensor once, under its first name."""
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape)
        if not tensor.numel() or key not in seen:
            seen.add(key)
            yield name, tensor


def _stored(
    stream: Iterable[tuple[str, Tensor]], sources: dict[str, _Source], references: dict,
    adapters: dict[str, Tensor], carried: dict[str, list[tuple[str, list[int] | None]]],
) -> Stream:  # fmt: skip
    """What goes into the weight files; the rest is put into ``references`` and ``adapters`` as it passes.
    ``adapters`` gets by peft's names what stands in ``carried`` (`carried_by_adapter`) too: without it the
    adapter's folder would not do alone."""
    for name, tensor in stream:
        if ".lora_" in name:
            adapters[name.replace(".default.", ".")] = tensor.detach().cpu().clone()
            continue
        for file, ids in carried.get(base_name(name), ()):
            adapters[file] = tensor[ids].cpu() if ids else tensor.detach().cpu().clone()
        if _QUANTISATION.search(name):
            continue
        name = base_name(name)
        unit = next((unit for unit in sources if name.startswith(unit + ".")), None)
        digest = sources[unit].hashes.get(name) if unit else None
        quantised = tensor.dtype in (torch.uint8, torch.int8)
        if digest is not None and (quantised or digest == digest_of(tensor)):
            entry = references.setdefault(unit, {"source": sources[unit].source, "tensors": {}})
            entry["tensors"][name] = digest
        elif quantised:
            raise InputError(
                f"{name} is quantised and its unquantised source cannot be read; make the source reachable or train with bits: "
                "16"
            )
        else:
            yield name, tensor


class _Source:
    """A source of a part of the model, and the digest of each of its tensors under our names, in the type the model keeps it in."""

    def __init__(self, source: str, stored: dict[str, Stored], dtypes: dict[str, torch.dtype]):
        self.source = source
        self.hashes = {name: digest_of(one.checked(), dtypes.get(name)) for name, one in stored.items()}


def _source_hashes(model: nn.Module, config: VlmConfig) -> dict[str, _Source]:
    """Part name -> its source, for frozen parts whose source can be read now."""
    out = {}
    for unit, source in units_of(config).items():
        part = model.get_submodule(unit)
        trained = [name for name, p in part.named_parameters() if p.requires_grad]
        if source is None or not all(".lora_" in name or name.endswith(f".{ROWS}") for name in trained):
            continue
        state = {f"{unit}.{base_name(name)}": tensor.dtype for name, tensor in part.state_dict().items()}
        if torch.uint8 in state.values() or torch.int8 in state.values():
            source = getattr(model, "weights_from", source)  # quantised weights cannot be compared with a source: it must be the right one
        dtypes = {name: dtype for name, dtype in state.items() if dtype.is_floating_point}
        try:
            out[unit] = _Source(source, _unit_stored(unit, source, config), dtypes)
        except (ValueError, OSError) as error:
            logger.info("%s is stored whole: its source %s cannot be read to compare (%s)", unit, source, error)
    return out


def _unit_stored(unit: str, source: str, config: VlmConfig) -> dict[str, Stored]:
    """Our name -> tensor of a part, in its source: that of the config, or an earlier export."""
    if (Path(source) / "config.json").is_file() and MARK in json.loads((Path(source) / "config.json").read_text(encoding="utf8")):
        config, content = read_config(source)
        found = stored_tensors(Path(source), config, content, merge=True)
        return {name: one for name, one in found.items() if name.startswith(unit + ".")}
    return {name: Stored(source, read) for name, read in unit_readers(config, unit, source).items()}


def _version() -> str:
    try:
        return importlib.metadata.version("mmkit")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"


def _write_config(work: Path, config: ModelConfig, references: dict[str, Any]) -> None:
    if isinstance(config, ClipConfig):
        from mmkit.models.clip import resolved

        config = resolved(config)
    content = {MARK: _version(), "torch_version": torch.__version__, "model": config.model_dump(mode="json"), "references": references}
    (work / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf8")


def _check_files(work: Path, written: list[str]) -> None:
    """Opens what was written; a tensor that is absent, empty or not finite is an error now rather than at the next load."""
    found = {}
    for name, tensor in files.tensors(work) if written else ():
        found[name] = tensor.numel() > 0 and (not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()))
    if broken := sorted(set(written) - {name for name, good in found.items() if good}):
        raise InputError(f"export is not written: {len(broken)} tensors are missing, empty or not finite: {', '.join(broken)}")


# ---------------------------------------------------------------- adapters


def _write_adapter(model: nn.Module, folder: Path, adapters: dict[str, Tensor]) -> None:
    import peft

    folder.mkdir()
    config = model.peft_config["default"].to_dict()
    config = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()} | {"peft_version": peft.__version__}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, default=str) + "\n", encoding="utf8")
    renamed = {"base_model.model." + name: tensor for name, tensor in adapters.items()}
    files.write(iter(renamed.items()), folder, "adapter_model")
    _check_files(folder, list(renamed))
    llava.read_adapter(folder)


def lora_config(stored: dict[str, Any], source: str):
    """peft's LoraConfig from a stored mapping. Settings this peft does not know are ignored, with a note, where they are off;
    otherwise ValueError naming the peft version that wrote them."""
    import peft

    known = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    version = stored.get("peft_version")
    unknown = {key: value for key, value in stored.items() if key not in known}
    if active := {key: value for key, value in unknown.items() if value not in (None, False, "", [], {}) and key != "peft_version"}:
        raise InputError(
            f"{source}: adapter settings {active} are unknown to peft {peft.__version__} "
            f"(written by peft {version or 'of unknown version'}); install that version or a newer one"
        )
    if off := sorted(set(unknown) - {"peft_version"}):
        logger.info("%s: ignored adapter settings that are off and unknown to peft %s: %s", source, peft.__version__, ", ".join(off))
    return peft.LoraConfig(**{key: value for key, value in stored.items() if key in known})


def _inject_adapter(model: nn.Module, folder: Path) -> None:
    import peft

    stored = json.loads((folder / "adapter_config.json").read_text(encoding="utf8"))
    # what it carries of the model's own tensors (rows of added tokens, modules trained whole) is in the
    # model's files, and so in its place
    config, carried = lora_config(stored, str(folder)), ("modules_to_save", "trainable_token_indices")
    peft.inject_adapter_in_model(dataclasses.replace(config, **dict.fromkeys(carried)), model, "default")
    for name in carried:
        setattr(model.peft_config["default"], name, getattr(config, name))
    wanted = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" in name}
    tensors = files.tensors(folder / "adapter_model.safetensors")
    stream = ((_injected_name(name), tensor) for name, tensor in tensors if ".lora_" in name)
    left = set(wanted)
    for name, tensor in stream:
        if name not in wanted or wanted[name].shape != tensor.shape:
            raise InputError(f"{folder}: adapter tensor {name} of shape {tuple(tensor.shape)} has no place in the model")
        wanted[name].copy_(tensor)
        left.discard(name)
    if left:
        raise InputError(f"{folder}: adapter tensors are missing: {', '.join(sorted(left))}")


def _injected_name(name: str) -> str:
    """peft's file name -> the name inside the model: the adapter's own name stands after ``lora_A`` and the like."""
    name = name.removeprefix("base_model.model.")
    head, _, tail = name.rpartition(".lora_")
    part, dot, rest = tail.partition(".")
    return f"{head}.lora_{part}.default{dot}{rest}"


# ---------------------------------------------------------------- load


def read_config(folder: str | Path) -> tuple[ModelConfig, dict[str, Any]]:
    """(model config, whole content) of an export's config.json; ConfigError where it is not one of ours or says too little."""
    path = fetched(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} is no exported model: it has no config.json")
    content = json.loads(path.read_text(encoding="utf8"))
    if MARK not in content:
        raise ConfigError(f"{path} was not written by mmkit; published checkpoints are read by models.convert.published or `mmkit convert`")
    try:
        config = TypeAdapter(ModelConfig).validate_python(content["model"])
    except ValidationError as error:
        raise ConfigError(f"{path} (written by mmkit {content[MARK]}): {error.errors()[0]['msg']} at {error.errors()[0]['loc']}") from None
    if isinstance(config, ClipConfig) and "quick_gelu" not in (config.architecture or {}):
        raise ConfigError(
            f"{path} does not say which activation the weights belong to; "
            "add model.architecture.quick_gelu (true for OpenAI's)"
        )
    return config, content


def from_pretrained(
    folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None, merge: bool = False,
    loss_limit: float = LOSS_LIMIT, half: torch.dtype | None = None,
) -> tuple[nn.Module, ModelConfig]:  # fmt: skip
    """(model, config) of an export, or of a published checkpoint in its authors' layout.

    Adapters are injected by peft, or with ``merge`` folded into the weights; the log says how much of them ``dtype`` rounds away, and
    ValueError refuses a layer that loses more than the share ``loss_limit``. ``dtype`` None keeps fp32, but for ``half`` those weights that
    autocast to it would cast at every use (`hollow.cast_at_use`): results under it are the same. Each tensor goes from its file straight to
    ``device``: the host holds one at a time. ValueError listing every missing or unexpected tensor by name. ``folder`` may be a URL.
    """
    source, folder = folder, fetched(folder)
    if not (folder / "config.json").is_file() or MARK not in json.loads((folder / "config.json").read_text(encoding="utf8")):
        from mmkit.models.convert import published

        model, config = published.load(folder, dtype=dtype or torch.float32, half=half)
        return model.to(device), config
    config, content = read_config(folder)
    with without_memory():
        model = build(config, weights=False)
    allocate(model, device, dtype, half)
    stored = stored_tensors(folder, config, content, merge, dtype or torch.float32, loss_limit)
    files.fill(model, ((name, one.checked()) for name, one in stored.items()), str(folder))
    if (folder / "adapter").is_dir() and not merge:
        _inject_adapter(model, folder / "adapter")
    model.weights_from = str(source if is_remote(source) else folder.resolve())
    return model, config


def stored_tensors(
    folder: Path, config: ModelConfig, content: dict[str, Any], merge: bool, dtype: torch.dtype = torch.float32, limit: float = LOSS_LIMIT
) -> dict[str, Stored]:
    """Our name -> tensor of an export: those it holds, and those it refers to in their sources. With ``merge`` its adapters are in them:
    adapted weights come in ``dtype``, and where that loses more than ``limit`` of an adapter (`models.merging`) reading is refused.

    ValueError where a source no longer holds a tensor; whether it still holds the same one is seen when it is read (`Stored.checked`).
    """
    held = files.readers(folder) if any(folder.glob("model*.safetensors")) else {}
    found = {name: Stored(str(folder), read) for name, read in held.items()}
    for unit, entry in content["references"].items():
        there = _unit_stored(unit, entry["source"], config)
        if left := set(entry["tensors"]) - set(there):
            raise InputError(f"{folder}: {entry['source']} no longer holds {', '.join(sorted(left))}")
        for name, digest in entry["tensors"].items():
            found[name] = dataclasses.replace(there[name], digest=digest, referred=f"{folder}: {name}")
    return found | _merged(found, folder, dtype, limit) if merge and (folder / "adapter").is_dir() else found


def _merged(found: dict[str, Stored], folder: Path, dtype: torch.dtype, limit: float) -> dict[str, Stored]:
    """The adapted weights of an export with its adapter in them; each is computed when it is read."""
    halves = llava.read_adapter(folder / "adapter").halves
    if left := sorted(layer for layer in halves if f"{layer}.weight" not in found):
        raise InputError(f"{folder}: {len(left)} adapted layers have no weight in the base: {', '.join(left)}")
    merging = Merging(halves, llava.adapter_config(folder / "adapter"), str(folder), dtype, limit)

    def read(layer: str) -> Tensor:
        return merging.fold(layer, found[f"{layer}.weight"].checked())

    return {f"{layer}.weight": Stored(str(folder), functools.partial(read, layer), dtype) for layer in halves}


def hollow(config: ModelConfig, folder: str | Path | None = None) -> tuple[nn.Module, dict[str, Stored]]:
    """The model of ``config`` with the parameters that files hold on the meta device, and where each of its tensors that a file holds is.

    The files are those of an export in ``folder`` (which may be a URL; its adapters are merged), or the sources of ``config``. What no
    file holds has its values, as have buffers; a contrastive model that does not start from an export is whole.
    ConfigError where the export's architecture is another, ValueError where its tensors do not fit the model.
    """
    if folder is None:
        model, stored = (build(config), {}) if isinstance(config, ClipConfig) else _hollow_sources(config)
    else:
        source, folder = folder, fetched(folder)
        there, content = read_config(folder)
        check_same_architecture(config, there, str(folder))
        with without_memory():
            model = build(config, weights=False)
        stored = _for_all_names(model, stored_tensors(folder, there, content, merge=True), str(folder))
        model.weights_from = str(source if is_remote(source) else folder.resolve())
    for name, tensor in model.state_dict().items():
        if name in stored and not tensor.is_meta:
            tensor.copy_(stored[name].read())
    return model, stored


def _hollow_sources(config: VlmConfig) -> tuple[nn.Module, dict[str, Stored]]:
    model, readers = build_hollow(config)
    units = units_of(config)
    return model, {name: Stored(units[next(u for u in units if name.startswith(f"{u}."))], read) for name, read in readers.items()}


def _for_all_names(model: nn.Module, stored: dict[str, Stored], source: str) -> dict[str, Stored]:
    """``stored`` with each tied tensor under all of its names; ValueError naming what is missing and what is unexpected."""
    out, problems = {}, []
    for names in same_tensor(model):
        found = [stored[name] for name in names if name in stored]
        problems += [] if found else [f"missing {names[0]}"]
        out |= dict.fromkeys(names, found[0]) if found else {}
    problems += [f"unexpected {name}" for name in stored if name not in out]
    if problems:
        raise InputError(f"{source} does not fit the model: {len(problems)} tensors: " + "; ".join(problems))
    return out


def check_same_architecture(config: ModelConfig, stored: ModelConfig, source: str) -> None:
    """ConfigError naming the first setting that shapes the network (activation included) in which two configs differ."""
    if config.kind != stored.kind:
        raise ConfigError(f"{source} holds a {stored.kind} model, the run builds a {config.kind} model")
    for name, shape in _shapes(config).items():
        if shape != (there := _shapes(stored)[name]):
            raise ConfigError(f"model.{name} is {shape}, the weights in {source} have {there}; take that setting or other weights")


def _shapes(config: ModelConfig) -> dict[str, Any]:
    if isinstance(config, ClipConfig):
        from mmkit.models.clip import architecture_of

        whole = architecture_of(config)
        return {f"architecture.{name}": whole.get(name) for name in ("quick_gelu", "embed_dim", "vision_cfg", "text_cfg")}
    encoders = [(encoder.name, encoder.side, encoder.resolution, encoder.architecture) for encoder in config.encoders]
    language = hf_config(config.language.architecture)
    out = {f"language.architecture.{name}": getattr(language, name, None) for name in LANGUAGE_SHAPES} | {"encoders": encoders}
    parts = {name: getattr(config, name) for name in ("connector", "samplers", "regions")}
    return out | {name: part and part.model_dump() for name, part in parts.items()}
