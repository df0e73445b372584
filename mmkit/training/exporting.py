"""``export/``: the trained model as other programs load it, checked against what training left in memory."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from mmkit.errors import InputError
from mmkit.models.exports import PROVENANCE, provenance
from mmkit.models.hollow import base_name, digest_of
from mmkit.models.vocabulary import folded, row_tables
from mmkit.storage import Store
from mmkit.training.agreement import by_main
from mmkit.training.assemble import TrainState

UNCHECKED = "export.tmp"  # an export on its way

def export(state: TrainState) -> str:
    """Writes ``export/``: weights under the model's own names, adapter, config, tokenizer; read back by `models.pretrained`.

    All processes. An export that holds the trained tensors already is left as it is. ValueError where the trained tensors on the disk are
    not those in memory, or where after training all of them are still what it started from.
    """
    from mmkit.models.build import tokenizer
    from mmkit.models.pretrained import save_pretrained

    store, backend, trained = Store(state.run.folder), state.backend, {}
    if holds_trained(state, store):
        return store.path("export")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "export") if store.remote else Path(store.path(UNCHECKED))
        words = tokenizer(state.run.model) if backend.is_main else None
        save_pretrained(state.model, folder, state.run.model, words, whole_tensors(state, trained), backend.is_main)

        def publish() -> None:
            # nobody takes it for the run's export before it has proved to hold what was trained and says so itself
            check_written(folder, trained, state)
            facts = {"run": state.run.folder, "stage": state.run.stage, "step": state.step, "trained": trained}
            facts["started_from"] = state.started_from
            (folder / PROVENANCE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf8")
            if store.remote:
                store.upload(folder, "export", last="config.json")
            else:
                store.rename(UNCHECKED, "export")

        try:
            by_main(backend, publish)
        finally:
            if backend.is_main and not store.remote:
                store.remove(UNCHECKED)
    return store.path("export")


def holds_trained(state: TrainState, store: Store) -> bool:
    """Whether ``export/`` holds the trained tensors as they are now, by their hashes. All processes.

    Its step says nothing: training anew under the same name passes the same steps with other weights.
    """
    backend, recorded = state.backend, {}
    if backend.is_main and store.size("export/config.json") is not None:
        facts = provenance(store.path("export"))
        recorded = facts.get("trained", {}) if facts.get("step") == state.step else {}
    if not backend.broadcast(bool(recorded)):
        return False
    now = {trained: digest_of(tensor) for _, tensor, trained in own_tensors(state) if trained}
    same = recorded == now and (store.remote or not other_in_files(Path(store.path("export")), now))
    return backend.broadcast(same if backend.is_main else None)


def whole_tensors(state: TrainState, trained: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer, whole and on the CPU, for the main process; quantised layers by the weights they were made of.

    ``trained`` gets the hash of each trained tensor as it passes.
    """
    for name, tensor, under in own_tensors(state):
        if under:
            trained[under] = digest_of(tensor)
        source = state.stored.get(base_name(name)) if tensor.dtype in (torch.uint8, torch.int8) else None
        yield name, source.checked() if source else tensor


def own_tensors(state: TrainState) -> Iterator[tuple[str, Tensor, str]]:
    """(name, whole tensor on the CPU, name in an export if it was trained, else "") of the model, for the
    main process; rows of added tokens stand in their tables, which count as trained."""
    whole = state.backend.full_parameters(owner=lambda index: 0)
    stream = ((name, tensor) for name, tensor in whole if tensor is not None)
    tables = {f"{path}.base_layer.weight": f"{path}.weight" for path in row_tables(state.model)}
    for name, tensor in folded(state.model, stream):
        yield name, tensor, tables.get(name, name if name in state.trained else "")


def check_written(folder: Path, trained: dict[str, str], state: TrainState) -> None:
    """ValueError where a trained tensor in the written files is missing or another, or where none of them differs from the start."""
    if wrong := other_in_files(folder, trained):
        count = f"{len(wrong)} of {len(trained)}"
        raise InputError(f"export {folder} does not hold what was trained: {count} tensors differ, first {wrong[0]!r}")
    moved = state.step > int(state.backend.n_skipped) and bool(state.started_with)
    if moved and all(state.started_with.get(name) == digest for name, digest in trained.items()):
        raise InputError(f"export {folder} equals what training started from in all trained tensors: {state.step} steps changed nothing")


def other_in_files(folder: Path, trained: dict[str, str]) -> list[str]:
    """Names of those trained tensors (name -> hash) that the files of an export lack or hold otherwise."""
    found = {}
    for path in [*folder.glob("model*.safetensors"), *folder.glob("adapter/*.safetensors")]:
        with safe_open(path, "pt") as file:
            for stored in file.keys():  # noqa: SIM118
                if name := _trained_name(stored, trained):
                    found[name] = digest_of(file.get_tensor(stored))
    return [name for name, digest in trained.items() if found.get(name) != digest]


def _trained_name(stored: str, trained: dict[str, str]) -> str | None:
    """The name in training of a tensor in a file: peft's files leave the adapter's own name out."""
    plain = stored.removeprefix("base_model.model.")
    head, lora, tail = plain.rpartition(".lora_")
    kind, dot, rest = tail.partition(".")
    names = (plain, f"{head}{lora}{kind}.default{dot}{rest}")
    return next((name for name in names if name in trained), None)
