"""Memory that scoring takes on its one device: weights in the types they are loaded in, and what a batch of documents keeps.

Weights and the key-value cache follow from counts and shapes; activations are an estimate, of one layer at a time since nothing is kept
for a backward pass. Prompts are reckoned at `TEXT` positions beside their pictures: how long they are is known when they are read.
"""

from __future__ import annotations

from typing import Any

from mmkit.config import RunConfig
from mmkit.evaluation.answering import BUCKETS, PICTURES
from mmkit.evaluation.tasks.table import TASKS
from mmkit.launch.plan import Need, Part, image_tokens

TEXT = 512  # template, question and options; of the published sets only a few questions are longer


def need_of(run: RunConfig, part: Part) -> Need:
    """What ``part`` of the model takes while ``run`` scores. Contrastive models compute in fp32 in every precision."""
    width = 2 if run.train.precision in ("bf16", "fp16") and run.model.kind == "vlm" else 4
    weights = part.parameters * 4.0 - part.halved * (4.0 - width)
    if run.model.kind != "vlm":
        return Need(part.component, weights, activations=_tower_bytes(run, part.component))
    model, rows = run.model, run.evaluation.batch
    if part.component == "language":
        prompt, answer = prompt_length(run), answer_length(run)
        cache = key_value_bytes(model.language.architecture, rows, prompt + answer, width)
        active = _prefill_bytes(model.language.architecture, rows, prompt, width)
        return Need(part.component, weights, cache=cache, activations=active)
    images, v = rows * run.data.max_images, model.connector.width
    keys = images * sum(encoder.side**2 for encoder in model.encoders)
    needs = {
        # their tokens, four times as wide inside a layer; convolutions begin with larger grids of fewer channels
        "encoders": max(PICTURES * encoder.side**2 * 1664 * 12 * width for encoder in model.encoders),
        "connector": (images * model.grid_side**2 * v * 10 + keys * v * 3) * width,
    }
    return Need(part.component, weights, activations=needs.get(part.component, 0.0))


def prompt_length(run: RunConfig) -> int:
    """Positions of a prompt with its pictures, as long as the rows that are made of it."""
    longest = run.data.max_images * run.model.n_image_tokens + TEXT
    return min((bucket for bucket in BUCKETS if bucket >= longest), default=longest)


def answer_length(run: RunConfig) -> int:
    """The longest answer that the tasks of ``run`` allow."""
    own = (TASKS[name].decode.max_new_tokens for name in run.evaluation.tasks if name in TASKS)
    return run.evaluation.max_new_tokens or max(own, default=0)


def key_value_bytes(architecture: dict[str, Any], rows: int, positions: int, width: int) -> float:
    """Keys and values of all layers of a language model, ``width`` bytes each number."""
    heads = architecture["num_attention_heads"]
    one = architecture.get("head_dim") or architecture["hidden_size"] // heads
    per_position = 2 * architecture["num_hidden_layers"] * (architecture.get("num_key_value_heads") or heads) * one
    return float(per_position * rows * positions * width)


def _prefill_bytes(architecture: dict[str, Any], rows: int, length: int, width: int) -> float:
    """One layer on all prompts of a batch, the attention masks, and the logits of one position a row."""
    d = architecture["hidden_size"]
    inner = architecture.get("intermediate_size", 4 * d)
    stream = 3 * d * 4  # the residual stream, its norm and that one cast stay in fp32
    layer = max(5 * d, 3 * inner) * width  # attention with keys and values repeated for every head, or the gated MLP
    masks = 4 * length  # bool, and the comparisons that make them
    return float(rows * (length * (stream + layer + masks) + architecture["vocab_size"] * 8))


def _tower_bytes(run: RunConfig, component: str) -> float:
    """One block of a contrastive tower on a batch."""
    architecture = run.model.architecture or {}
    name, depth = {"image": ("vision_cfg", 1024), "text": ("text_cfg", 768)}.get(component, ("", 0))
    tower = architecture.get(name, {})
    tokens = tower.get("context_length", 77) if component == "text" else image_tokens(tower)
    return float(run.evaluation.batch * tokens * tower.get("width", depth) * 60) if depth else 0.0
