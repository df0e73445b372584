"""Whole models against the originals: Cambrian training and inference, Ferret, LLaVA."""

from __future__ import annotations

from math import isqrt

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmkit.config import IGNORE_INDEX, IMAGE_TOKEN_INDEX, REGION_TOKEN_INDEX, EncoderConfig, VlmConfig
from mmkit.data.batches import Shape, Slots, build_row, stack_rows
from mmkit.data.conversation import Encoded
from mmkit.data.packing import Item, Member
from mmkit.letterbox import cropped, visible_cells
from mmkit.models.convert.config import vlm_config
from mmkit.models.convert.names import ours
from mmkit.models.generation import generate
from mmkit.models.language import decoder_layers, load_language
from mmkit.models.vlm import VisionLanguageModel, check_batch
from tests.golden_checks.case import Case
from tests.golden_checks.rows import collate

class Grid(nn.Module):
    """Stands for an encoder whose features are given."""

    def __init__(self, width: int, side: int):
        super().__init__()
        self.width, self.side = width, side


def build(case: Case, widths: list[int], sides: list[int], crop: bool = False) -> VisionLanguageModel:
    """The case's model with its weights, loaded strictly under their original names, its config read as a published one."""
    encoders = [EncoderConfig(name="given", side=side) for side in sides]
    config = vlm_config(case.json["config"], encoders).model_copy(update={"crop_padding": crop})
    grids = [Grid(width, side) for width, side in zip(widths, sides, strict=True)]
    model = VisionLanguageModel(config, load_language(config.language, weights=False), grids)
    model.load_state_dict(case.renamed(ours))
    return model.eval()


def _cambrian(case: Case, crop: bool) -> VisionLanguageModel:
    config = case.json["config"]
    return build(case, config["encoder_hidden_sizes"], [isqrt(n) for n in config["mm_vision_tower_aux_token_len_list"]], crop)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Next-token cross-entropy, averaged over the labels that count."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE_INDEX)


def cambrian_llama_train(case: Case) -> None:
    """Logits, loss and gradients of a padded batch, then the same logits from cropped sequences."""
    samples = list(zip(_numbered(case, "in.sample.{}.input_ids"), _numbered(case, "in.sample.{}.labels"), strict=True))
    length = case.json["model_max_length"]
    with_image = [bool((ids == IMAGE_TOKEN_INDEX).any()) for ids, _ in samples]
    sizes = [[size] if real else [] for size, real in zip(case["in.image_sizes_wh"], with_image, strict=True)]
    features = [[grid[b : b + 1] for b in range(len(samples))] for grid in case.many("in.features")]
    model = _cambrian(case, crop=False)
    # a text-only sample carries a hidden image block in the original, so less of its text survives the cut
    block = model.config.n_image_tokens
    samples = [s if real else tuple(part[: length - block] for part in s) for s, real in zip(samples, with_image, strict=True)]
    batch = collate(model.config, samples, sizes, features, length)
    real, theirs = batch["segments"] > 0, case["mid.collated.attention_mask"].bool()
    case.close(batch["labels"][real], case["mid.collated.labels"][theirs])
    case.close(batch["positions"][real], case["mid.collated.position_ids"][theirs])
    _rows_of_the_loader(case, model.config, sizes, length)
    layers, samplers = _watch_layers(model), _watch_samplers(model)
    hidden = model(batch)
    logits = model.logits(hidden)
    for index, layer in enumerate(layers):
        case.close(layer[real], case[f"mid.decoder_layer_out.{index}"][theirs])
    _sampled(case, model, batch, samplers)
    case.close(hidden[real], case["mid.final_norm"][theirs])
    case.close(logits[real], case["out.logits"][theirs])
    loss = mean_loss(logits, batch["labels"])
    case.close(loss, "out.loss")
    loss.backward()
    _gradients(case, model)
    if length >= max(len(ids) + block for ids, _ in samples):  # cut in other places otherwise
        _cropped_too(case, logits, batch, samples, sizes, features)


def _rows_of_the_loader(case: Case, config: VlmConfig, sizes: list, length: int) -> None:
    """Raw samples with a picture, laid into rows by the kit's own loader code, are the original collator's rows."""
    slots = Slots.of(config)
    for b, (ids, labels) in enumerate(
        zip(_numbered(case, "in.sample.{}.input_ids"), _numbered(case, "in.sample.{}.labels"), strict=True)
    ):
        if not sizes[b]:
            continue
        member = Member(
            b, Encoded(ids.numpy(), (labels != IGNORE_INDEX).numpy()), ("picture",), (slots.full,)
        )
        member = member if member.length <= length else member.truncated(length)
        row = stack_rows(
            [build_row((Item((member,)),), [[tuple(sizes[b][0].tolist())]], slots)],
            Shape(1, length, targets=length),
        )
        real = row["segments"][0] > 0
        text = row["input_ids"][0] != IMAGE_TOKEN_INDEX  # the original keeps -200 in the first slot only
        assert torch.equal(real, case["mid.collated.attention_mask"][b].bool())
        assert torch.equal(row["input_ids"][0][real & text], case["mid.collated.input_ids"][b][real & text])
        assert torch.equal(row["labels"][0], case["mid.collated.labels"][b])
        assert torch.equal(row["positions"][0][real], case["mid.collated.position_ids"][b][real])


def _numbered(case: Case, pattern: str) -> list[Tensor]:
    out = []
    while pattern.format(len(out)) in case:
        out.append(case[pattern.format(len(out))])
    return out


def _watch_layers(model: VisionLanguageModel) -> list[Tensor]:
    """Fills with the output of each decoder layer, before a sampler changes it."""
    seen: list[Tensor] = []
    for layer in decoder_layers(model.language):
        layer.register_forward_hook(lambda module, args, out: seen.append(out.detach()), prepend=True)
    return seen


def _watch_samplers(model: VisionLanguageModel) -> list[tuple[Tensor, Tensor]]:
    """Fills with the queries that each in-LLM sampler gets and gives."""
    seen: list[tuple[Tensor, Tensor]] = []
    for sampler in model.samplers:
        sampler.register_forward_hook(lambda module, args, out: seen.append((args[0].detach(), out.detach())))
    return seen


def _sampled(case: Case, model: VisionLanguageModel, batch: dict, seen: list[tuple[Tensor, Tensor]]) -> None:
    """Where a cell is visible and in the sequence; elsewhere the original works on positions that nothing looks at."""
    if not seen:
        return
    cells = visible_cells(batch["image_sizes"], model.config.grid_side) & batch["image_real"][..., None, None]
    there = cells.flatten(1) & (model.embed(batch)[1].cells < batch["input_ids"].shape[1])
    for index, (before, after) in enumerate(seen):
        case.close(before, f"mid.inllm_sampler_in.{index}", there.flatten())
        case.close(after, f"mid.inllm_sampler_out.{index}", there.flatten())


def _gradients(case: Case, model: VisionLanguageModel) -> None:
    own = dict(model.named_parameters())
    wanted = [name for name in case.tensors if name.startswith("out.grad.")]
    assert wanted
    for name in wanted:
        case.close(own[ours(name.removeprefix("out.grad."))].grad, name)
    assert all(parameter.grad is not None for parameter in own.values())
    total = torch.stack([parameter.grad.norm() for parameter in own.values()]).norm()
    case.close(total, torch.tensor(case.json["grad_global_norm"]))


def _cropped_too(case: Case, logits: Tensor, batch: dict, samples, sizes, features) -> None:
    model = _cambrian(case, crop=True)
    short = collate(model.config, samples, sizes, features)
    check_batch(model.config, short)
    got = model.logits(model(short))
    case.close(got[short["segments"] > 0], logits[batch["segments"] > 0].detach())


def cambrian_llama_infer(case: Case) -> None:
    """Prefill of cropped sequences and greedy ids; both again with all slots in the sequence, and row by row."""
    config, mask = case.json["config"], case["in.attention_mask"].bool()
    samples = [(ids[real], labels[real]) for ids, labels, real in zip(case["in.input_ids"], case["in.labels"], mask, strict=True)]
    sizes = [[size] for size in case["in.image_sizes_wh"]]
    features = [[grid[b : b + 1] for b in range(len(samples))] for grid in case.many("in.features")]
    model = _cambrian(case, crop=True)
    batch = collate(model.config, samples, sizes, features, case["mid.inputs_embeds"].shape[1])
    logits = _whole(case, model, batch)
    for b, ((width, height),) in enumerate(size[0][None].tolist() for size in sizes):
        assert list(cropped(model.config.grid_side, width, height)) == case["mid.final_size_hw"][b].tolist()
    full = _cambrian(case, crop=False)
    fixed = collate(full.config, samples, sizes, features)
    if fixed["segments"].sum() == batch["segments"].sum():  # else the original cut the prompt
        case.close(full.logits(full(fixed))[fixed["segments"] > 0], logits[batch["segments"] > 0].detach())
    if "out.generated_ids" in case:
        steps = case.json["max_new_tokens"]
        want = case["out.generated_ids"].tolist()
        assert generate(model, batch, steps) == want
        assert generate(full, fixed, steps) == want
    assert config["image_position"] == samples[0][0].tolist().index(IMAGE_TOKEN_INDEX)


def ferret_llama(case: Case) -> None:
    """Regions in a padded batch: region tokens, embeddings, logits and loss."""
    facts, features = case.json, case["in.features"]
    model = build(case, [features.shape[2]], [isqrt(features.shape[1])])
    mask = case["in.attention_mask"].bool()
    samples = []
    for ids, labels, real in zip(case["in.input_ids"], case["in.labels"], mask, strict=True):
        ids = torch.where(ids == facts["region_token_id"], REGION_TOKEN_INDEX, ids)
        samples.append((ids[real], labels[real]))
    sizes = [[torch.tensor([336, 336])] for _ in samples]
    batch = collate(model.config, samples, sizes, [[grid[None] for grid in features]], case["mid.inputs_embeds"].shape[1])
    batch |= _regions(case, model)
    check_batch(model.config, batch)
    tokens = model.regions(features, batch["region_points"], batch["region_image"], batch[_last_input(model)])
    for b, count in enumerate(facts["masks_per_sample"]):
        if count:
            case.close(tokens[b, :count], f"mid.region.{b}")
    _whole(case, model, batch)


def _last_input(model: VisionLanguageModel) -> str:
    return "region_starts" if model.config.regions.kind == "geo" else "region_point_real"


def _regions(case: Case, model: VisionLanguageModel) -> dict[str, Tensor]:
    counts = case.json["masks_per_sample"]
    shape = (len(counts), max(counts))
    drawn = list(case["in.points_xy"]) if "in.points_xy" in case else case.many("in.points_xy")
    longest = max(len(points) for points in drawn)
    out = {
        "region_points": torch.zeros(*shape, longest, 2),
        "region_point_real": torch.zeros(*shape, longest, dtype=torch.bool),
        "region_starts": torch.zeros(*shape, len(model.config.regions.n_sub_points), dtype=torch.long),
        "region_image": torch.zeros(shape, dtype=torch.long),
        "region_real": torch.zeros(shape, dtype=torch.bool),
    }
    starts = case.many("in.fps_start")
    where = [(b, k) for b, count in enumerate(counts) for k in range(count)]
    for row, ((b, k), points) in enumerate(zip(where, drawn, strict=True)):
        out["region_points"][b, k, : len(points)] = points
        out["region_point_real"][b, k, : len(points)] = True
        out["region_real"][b, k] = True
        for stage, start in enumerate(starts):
            out["region_starts"][b, k, stage] = start[row]
    return out


def llava_llama(case: Case) -> None:
    """No, one or several images a row; features come in the order of image tokens, one unused row for a text-only sample."""
    features, mask = case["in.features"], case["in.attention_mask"].bool()
    model = build(case, [features.shape[2]], [isqrt(features.shape[1])])
    samples = [(ids[real], labels[real]) for ids, labels, real in zip(case["in.input_ids"], case["in.labels"], mask, strict=True)]
    counts = [int((ids == IMAGE_TOKEN_INDEX).sum()) for ids, _ in samples]
    grids = features.split([max(count, 1) for count in counts])
    sizes = [[torch.tensor([336, 336])] * count for count in counts]
    _whole(case, model, collate(model.config, samples, sizes, [list(grids)], case["mid.inputs_embeds"].shape[1]))


def _whole(case: Case, model: VisionLanguageModel, batch: dict) -> Tensor:
    """Compares real positions in their order, on whichever side padding is; returns the logits."""
    real, theirs = batch["segments"] > 0, case["mid.attention_mask"].bool()
    assert real.sum(1).tolist() == theirs.sum(1).tolist()
    case.close(batch["labels"][real], case["mid.labels"][theirs])
    case.close(model.embed(batch)[0][real], case["mid.inputs_embeds"][theirs])
    logits = model.logits(model(batch))
    case.close(logits[real], case["out.logits"][theirs])
    case.close(mean_loss(logits, batch["labels"]), "out.loss")
    return logits
