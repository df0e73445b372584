"""The whole model: slots from input_ids, fixed and cropped sequences, packing, hidden images, recomputation, generation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from mmkit.config import VlmConfig
from mmkit.letterbox import visible_slots
from mmkit.models import generation
from mmkit.models.generation import Chat, Here, Sampling, generate, stream
from mmkit.models.language import Places, load_language
from mmkit.models.vlm import COMPONENTS, VisionLanguageModel, check_batch, match, put, take

ARCHITECTURE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "llama": {}, "phi3": {"sliding_window": 30}, "qwen2": {}, "qwen3": {}, "gemma": {}, "mistral": {"sliding_window": 30},
    "smollm2": {"model_type": "llama", "tie_word_embeddings": True},
}  # fmt: skip
WIDE, TALL, SQUARE, EXTREME = (300, 200), (100, 400), (64, 64), (4000, 20)


class PixelGrid(nn.Module):
    """An encoder: each cell of the grid is one pixel through one linear layer."""

    def __init__(self, width: int, side: int):
        super().__init__()
        self.width, self.side = width, side
        self.layer = nn.Linear(3, width)

    def forward(self, images):
        return self.layer(images.flatten(2).transpose(1, 2))


def model_of(family="llama", crop=False, samplers=True, regions=None, **connector):
    torch.manual_seed(0)
    config = VlmConfig(
        encoders=[{"name": "a", "side": 4}, {"name": "b", "side": 8}],
        connector={"kind": "sva", "width": 16, "heads": 4, "depth": 2, "query_sides": [4]} | connector,
        samplers={"start": 0, "stride": 2, "count": 2} if samplers else None,
        language={"source": "random", "architecture": {"model_type": family} | ARCHITECTURE | FAMILIES.get(family, {})},
        regions=regions,
        crop_padding=crop,
    )
    return VisionLanguageModel(config, load_language(config.language), [PixelGrid(12, 4), PixelGrid(10, 8)]).eval()


def row_of(config, *parts):
    """Text (a list of ids) and images ((width, height)) of one conversation -> ids, segments, positions, sizes."""
    ids, real, sizes = [], [], []
    for part in parts:
        if isinstance(part, list):
            ids, real = ids + part, real + [1] * len(part)
            continue
        shown = visible_slots(torch.tensor(part), config.grid_side, config.connector.newline).tolist()
        kept = [int(s) for s in shown if s or not config.crop_padding]
        ids, real, sizes = ids + [-200] * len(kept), real + kept, [*sizes, part]
    positions = (torch.tensor(real).cumsum(0) - 1).clamp(min=0).tolist()
    return ids, real, positions, sizes


def pixels_of(size, side):
    generator = torch.Generator().manual_seed(size[0] * 7 + size[1])
    return torch.randn(3, side, side, generator=generator)


def batch_of(config, *rows, side="right", images=None):
    made = [row_of(config, *row) for row in rows]
    length, places = max(len(row[0]) for row in made), images or max(1, *(len(row[3]) for row in made))
    pad = lambda x: torch.tensor([0] * (length - len(x)) + x if side == "left" else x + [0] * (length - len(x)))  # noqa: E731
    batch = {name: torch.stack([pad(row[k]) for row in made]) for k, name in enumerate(("input_ids", "segments", "positions"))}
    batch["image_sizes"] = torch.full((len(rows), places, 2), 336)
    batch["image_real"] = torch.zeros(len(rows), places, dtype=torch.bool)
    for e, encoder in enumerate(config.encoders):
        batch[f"images.{e}"] = torch.zeros(len(rows), places, 3, encoder.side, encoder.side)
    for b, row in enumerate(made):
        for i, size in enumerate(row[3]):
            batch["image_sizes"][b, i], batch["image_real"][b, i] = torch.tensor(size), True
            for e, encoder in enumerate(config.encoders):
                batch[f"images.{e}"][b, i] = pixels_of(size, encoder.side)
    return batch


ROWS = ([5, 6, 7], WIDE, [8, 9, 10, 11]), ([12], TALL, [13, 14], SQUARE, [15, 16, 17]), ([20, 21, 22, 23, 24],), (EXTREME, [30, 31])


def text(batch, hidden):
    """Hidden states of real text positions, in order."""
    return hidden[(batch["segments"] > 0) & (batch["input_ids"] >= 0)]


# ---------------------------------------------------------------- slots


def test_marks_pair_with_present_slots_by_rank_as_in_a_loop():
    torch.manual_seed(0)
    marks, present = torch.rand(5, 12) > 0.5, torch.rand(5, 15) > 0.5
    marks[4] = False
    got = match(marks, present)
    for b in range(5):
        spots = marks[b].nonzero().flatten().tolist()
        want = [12] * 15
        for rank, slot in enumerate(present[b].nonzero().flatten().tolist()):
            want[slot] = spots[rank] if rank < len(spots) else 12
        assert got[b].tolist() == want


def test_dropped_entries_read_zero_and_get_a_zero_gradient():
    x, new = torch.randn(1, 3, 2, requires_grad=True), torch.randn(1, 2, 2, requires_grad=True)
    index = torch.tensor([[1, 3]])
    out = put(x, index, new)
    assert torch.equal(out[0, 1], new[0, 0]) and torch.equal(out[0, [0, 2]], x[0, [0, 2]])
    assert torch.equal(take(x, index)[0], torch.stack([x[0, 1], torch.zeros(2)]))
    out.sum().backward()
    assert new.grad.tolist() == [[[1, 1], [0, 0]]] and x.grad.tolist() == [[[1, 1], [0, 0], [1, 1]]]


@pytest.mark.parametrize("family", FAMILIES)
def test_fixed_and_cropped_sequences_give_the_same_text_in_any_family(family):
    fixed, cropped = model_of(family), model_of(family, crop=True)
    cropped.load_state_dict(fixed.state_dict())
    full, short = batch_of(fixed.config, *ROWS), batch_of(cropped.config, *ROWS, side="left")
    check_batch(fixed.config, full), check_batch(cropped.config, short)
    assert short["input_ids"].shape[1] < full["input_ids"].shape[1]
    with torch.no_grad():
        got, want = cropped.logits(text(short, cropped(short))), fixed.logits(text(full, fixed(full)))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "connector",
    [{"newline": False}, {"query_sides": [4, 2]}, {"query_sides": [2, 4]}, {"query_sides": [2, 1], "grid_side": 4}, {"depth": 1}],
)
def test_fixed_and_cropped_sequences_agree_for_other_connectors(connector):
    fixed, cropped = model_of(**connector), model_of(crop=True, **connector)
    cropped.load_state_dict(fixed.state_dict())
    full, short = batch_of(fixed.config, *ROWS), batch_of(cropped.config, *ROWS)
    with torch.no_grad():
        torch.testing.assert_close(text(short, cropped(short)), text(full, fixed(full)), atol=1e-5, rtol=1e-4)


def test_rows_alone_and_packed_into_one_row_give_the_same_text():
    model = model_of()
    rows = [row_of(model.config, *row) for row in ROWS]
    packed = {"input_ids": [], "segments": [], "positions": []}
    for number, (ids, real, positions, _) in enumerate(rows, 1):
        packed["input_ids"] += ids
        packed["segments"] += [number * r for r in real]
        packed["positions"] += positions
    together = batch_of(model.config, tuple(part for row in ROWS for part in row))
    together |= {name: torch.tensor([values]) for name, values in packed.items()}
    with torch.no_grad():
        got = text(together, model(together))
        alone = torch.cat([text(b, model(b)) for b in (batch_of(model.config, row) for row in ROWS)])
    torch.testing.assert_close(got, alone, atol=1e-5, rtol=1e-4)


def test_the_image_matters_wherever_it_is_also_for_samplers_alone():
    model = model_of()
    for row in (([5, 6], WIDE, [7]), (WIDE, [7]), ([5] * 20, WIDE, [7, 8])):
        batch = batch_of(model.config, row)
        with torch.no_grad():
            want = text(batch, model(batch))
            other = batch | {"images.1": batch["images.1"] + 1}
            assert (text(other, model(other)) - want)[-1].abs().max() > 1e-4
            embeds, vision = model.embed(batch)
            skipped = model.run(embeds, model.places(batch))
            assert (text(batch, skipped) - want)[-1].abs().max() > 1e-5


# ---------------------------------------------------------------- gradients


def loss_of(model, batch):
    return model.logits(text(batch, model(batch))).square().mean()


def gradients(model, batch):
    model.zero_grad()
    loss_of(model, batch).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_a_text_only_batch_gives_zero_not_missing_gradients_to_every_vision_part():
    model = model_of().train()
    model.encoders[0].requires_grad_(True)
    rows = ([5, 6, 7],), ([8, 9],)
    grads = gradients(model, batch_of(model.config, *rows))
    vision = [name for name in dict(model.named_parameters()) if name.startswith(("connector.", "samplers.", "encoders.0"))]
    assert vision and all(name in grads and not grads[name].any() for name in vision)
    assert not any(name.startswith("encoders.1") for name in grads)


def test_dummy_images_change_neither_text_nor_gradients():
    model = model_of().train()
    plain, padded = batch_of(model.config, *ROWS[:2]), batch_of(model.config, *ROWS[:2], images=3)
    noisy = padded | {"images.0": torch.where(padded["image_real"][..., None, None, None], padded["images.0"], 9.0)}
    want, got = gradients(model, plain), gradients(model, noisy)
    for name in want:
        torch.testing.assert_close(got[name], want[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_give_the_same_gradients(reentrant):
    model = model_of().train()
    batch = batch_of(model.config, *ROWS)
    want = gradients(model, batch)
    model.language.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    got = gradients(model, batch)
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], atol=1e-6, rtol=1e-5, msg=name)


def test_a_wrapper_that_runs_hooks_again_in_backward_gives_the_same_gradients():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    model = model_of().train()
    batch = batch_of(model.config, *ROWS)
    want = gradients(model, batch)
    apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__ in model.blocks)
    got = {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in gradients(model, batch).items()}
    for name in want:
        torch.testing.assert_close(got[name], want[name], atol=1e-6, rtol=1e-5, msg=name)


def test_frozen_encoders_run_without_a_graph_and_cached_features_equal_images():
    model = model_of()
    batch = batch_of(model.config, *ROWS)
    grids = model.encode([batch[f"images.{e}"].flatten(0, 1) for e in range(2)])
    assert not any(grid.requires_grad for grid in grids)
    shape = batch["image_real"].shape
    cached = {name: t for name, t in batch.items() if not name.startswith("images.")}
    cached |= {f"features.{e}": grid.unflatten(0, shape) for e, grid in enumerate(grids)}
    with torch.no_grad():
        assert torch.equal(model(cached), model(batch))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_features_kept_in_half_precision_and_autocast_run_close_to_full_precision(stored):
    model = model_of()
    batch = batch_of(model.config, *ROWS)
    shape = batch["image_real"].shape
    grids = model.encode([batch[f"images.{e}"].flatten(0, 1) for e in range(2)])
    cached = {name: t for name, t in batch.items() if not name.startswith("images.")}
    cached |= {f"features.{e}": grid.to(stored).unflatten(0, shape) for e, grid in enumerate(grids)}
    with torch.no_grad():
        want = text(batch, model(batch))
        torch.testing.assert_close(text(batch, model(cached)), want, atol=0.05, rtol=0.05)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = text(batch, model(cached)).float()
    assert (got - want).square().mean().sqrt() < 0.05


def test_a_copy_has_its_own_samplers():
    model = model_of()
    batch = batch_of(model.config, *ROWS)
    loss_of(model, batch)  # leaves a graph behind
    twin = copy.deepcopy(model)
    with torch.no_grad():
        want = model(batch)
        for parameter in model.samplers.parameters():
            parameter.zero_()
        assert torch.equal(twin(batch), want) and not torch.equal(model(batch), want)


def test_every_parameter_has_a_component():
    import re

    model = model_of(regions={"kind": "mean"})
    found = {next(part for pattern, part in COMPONENTS if re.fullmatch(pattern, name)) for name, _ in model.named_parameters()}
    assert found == {"encoders", "connector", "samplers", "regions", "language"}


@pytest.mark.parametrize("fit", ["stretch", "square"])
def test_only_letter_boxed_pictures_have_a_border_to_mask(fit):
    model = model_of()
    features = [torch.randn(1, side * side, width, generator=torch.Generator().manual_seed(side)) for side, width in ((4, 12), (8, 10))]
    wide = {
        "input_ids": torch.tensor([[-200] * 20 + [5, 6]]), "image_sizes": torch.tensor([[[900, 100]]]), "image_real": torch.tensor([[True]]),
        **{f"features.{e}": grid[:, None] for e, grid in enumerate(features)},
    }  # fmt: skip
    square = wide | {"image_sizes": torch.tensor([[[100, 100]]])}
    boxed = [model(wide), model(square)]
    model.config = model.config.model_copy(update={"image_fit": fit})
    assert not torch.allclose(*boxed)
    torch.testing.assert_close(model(wide), boxed[1])


# ---------------------------------------------------------------- regions


def region_batch(model, batch, count=2):
    rows = batch["input_ids"].shape[0]
    torch.manual_seed(1)
    return batch | {
        "region_points": torch.rand(rows, count, 16, 2),
        "region_starts": torch.zeros(rows, count, 1, dtype=torch.long),
        "region_image": torch.zeros(rows, count, dtype=torch.long),
        "region_real": (batch["input_ids"] == -300).sum(1, keepdim=True) > torch.arange(count),
    }


GEO = {"kind": "geo", "n_points": 16, "n_sub_points": [4], "n_neighbors": [3], "encoder": 1}


def test_region_tokens_take_their_places_in_order_and_unused_ones_touch_nothing():
    model = model_of(regions=GEO)
    batch = region_batch(model, batch_of(model.config, (WIDE, [5, -300, 6, -300]), (WIDE, [7, -300, 8, 9]), ([10, 11],)))
    check_batch(model.config, batch)
    embeds = model.embed(batch)[0]
    grid = model.features(batch)[1].unflatten(0, (3, 1)).flatten(1, 2)
    tokens = model.regions(grid, batch["region_points"], batch["region_image"], batch["region_starts"])
    places = (batch["input_ids"] == -300).nonzero().tolist()
    for (b, t), want in zip(places, (tokens[0, 0], tokens[0, 1], tokens[1, 0]), strict=True):
        assert torch.equal(embeds[b, t], want)
    loss = model.train().logits(text(batch, model(batch))).square().mean()
    loss.backward()
    assert all(p.grad is not None for p in model.regions.parameters())


def test_a_region_model_needs_region_tensors_and_matching_counts():
    model = model_of(regions=GEO)
    batch = batch_of(model.config, (WIDE, [5, -300]))
    with pytest.raises(ValueError, match="no region_points, region_image, region_real, region_starts"):
        model(batch)
    more = region_batch(model, batch)
    more["region_real"] = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="row 0 has 1 region tokens .* need 2"):
        check_batch(model.config, more)
    with pytest.raises(ValueError, match="row 0 has 1 region tokens .* need 0"):
        check_batch(model_of().config, batch)


# ---------------------------------------------------------------- generation


class FixedShapes(Here):
    """Asks for one program for all further tokens, so for a cache of fixed length; else as a model where it is."""

    compiled = True


@pytest.mark.parametrize("cache", [Here, FixedShapes])
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma", "smollm2"])
def test_batched_answers_equal_one_by_one_and_a_loop_without_cache(family, cache):
    model = model_of(family)
    want = [by_whole_forward(model, row, 5) for row in ROWS]
    for side in ("left", "right"):
        assert generate(model, batch_of(model.config, *ROWS, side=side), 5, backend=cache(model)) == want
    assert [generate(model, batch_of(model.config, row), 5, backend=cache(model))[0] for row in ROWS] == want
    cropped = model_of(family, crop=True)
    cropped.load_state_dict(model.state_dict())
    assert generate(cropped, batch_of(cropped.config, *ROWS, side="left"), 5, backend=cache(cropped)) == want
    for steps in (1, 3):  # an answer that is cut is the beginning of the whole one
        assert generate(model, batch_of(model.config, *ROWS), steps, backend=cache(model)) == [row[:steps] for row in want]


def test_a_cache_of_fixed_length_has_every_shape_from_the_first_token_on(monkeypatch):
    model, shapes = model_of(), []
    attend = torch.nn.functional.scaled_dot_product_attention

    def noted(query, key, value, **more):
        if query.shape[3] == ARCHITECTURE["head_dim"]:  # of the language model
            shapes.append((key.shape[2], value.shape[2]))
        return attend(query, key, value, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(generation, "end_tokens", lambda model: set())
    batch = batch_of(model.config, ([5, 6, 7],), ([8],))
    for cache, lengths in ((FixedShapes, {7}), (Here, {3, 4, 5, 6, 7})):  # three of the prompt, four of the answer's five
        shapes.clear()
        generate(model, batch, 5, backend=cache(model))
        assert set(shapes) == {(n, n) for n in lengths}


def by_whole_forward(model, row, steps):
    out = []
    while len(out) < steps:
        batch = batch_of(model.config, (*row, out) if out else row)
        with torch.no_grad():
            out.append(int(model.logits(text(batch, model(batch))[-1]).argmax()))
        if out[-1] == 1:
            break
    return out


@pytest.mark.parametrize("side", ["left", "right"])
def test_answers_are_the_same_with_a_two_dimensional_mask_or_none(side):
    model = model_of()
    batch = batch_of(model.config, *ROWS[:3], side=side)
    want = generate(model, batch, 4)
    bare = {name: t for name, t in batch.items() if name not in ("segments", "positions")}
    assert generate(model, bare, 4) == want  # padding is the pad token at either end
    mask = (batch["input_ids"] != 0).long()
    assert generate(model, bare | {"attention_mask": mask}, 4) == want


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", [None, -1, 2])
def test_without_a_pad_token_several_prompts_need_a_mask_and_one_does_not(side, pad):
    """Of padding by token 0, which is none of the model's own; 2 begins its texts too."""
    model = model_of()
    batch = batch_of(model.config, *ROWS[:3], side=side)
    want = generate(model, batch, 4)
    model.language.config.pad_token_id = pad
    bare = {name: t for name, t in batch.items() if name not in ("segments", "positions")}
    bare["input_ids"] = torch.where(batch["segments"] > 0, batch["input_ids"], pad if pad == 2 else 0)
    bare["input_ids"] = torch.where(batch["input_ids"] == -200, -200, bare["input_ids"])  # slots of a border are hidden, and no padding
    refused = "begins with token 2, which is .* padding and its beginning" if pad == 2 else f"3 prompts have no mask, .*pad_token_id is {pad}"
    if pad != 2 or side == "left":
        with pytest.raises(ValueError, match=refused):
            generate(model, bare, 4)
    mask = ((batch["segments"] > 0) | (batch["input_ids"] == -200)).long()
    assert generate(model, bare | {"attention_mask": mask}, 4) == want
    alone = {name: t for name, t in batch_of(model.config, ROWS[2]).items() if name not in ("segments", "positions")}
    assert generate(model, alone, 4)[0] == want[2]


@pytest.mark.parametrize("cache", [Here, FixedShapes])
def test_a_row_stops_at_a_stop_token_and_others_go_on(cache):
    model = model_of()
    batch = batch_of(model.config, *ROWS[:3])
    free = generate(model, batch, 6, backend=cache(model))
    stop = free[0][1]
    got = generate(model, batch, 6, stop=[stop], backend=cache(model))
    for row, whole in zip(got, free, strict=True):
        assert row == (whole[: whole.index(stop) + 1] if stop in whole else whole)
    model.language.generation_config.eos_token_id = [1, stop]
    assert generate(model, batch, 6, backend=cache(model)) == got


def test_sampling_repeats_with_a_generator_and_turns_greedy_when_cold():
    model = model_of().train()
    batch = batch_of(model.config, *ROWS[:2])

    def draw(seed, **settings):
        return generate(model, batch, 8, sampling=Sampling(generator=torch.Generator().manual_seed(seed), **settings))

    assert draw(1, temperature=2.0) == draw(1, temperature=2.0) != draw(2, temperature=2.0)
    assert draw(1, temperature=1e-4) == draw(1, temperature=1.0, top_p=1e-6) == generate(model, batch, 8)
    assert model.training


def test_a_chat_streams_the_answer_it_returns_and_remembers_the_turns():
    model = model_of()
    asked = []

    def encode(images, turns):
        asked.append((images, turns))
        return batch_of(model.config, ([5], *images, [ord(c) % 60 + 3 for _, said in turns for c in said]))

    chat = Chat(model, encode, lambda ids: "".join(chr(65 + i) for i in ids), max_new_tokens=4)
    answer, history = chat(WIDE, "what?")
    assert len(answer) >= 1 and history == [("user", "what?"), ("assistant", answer)]
    assert "".join(chat.stream(WIDE, "what?")).strip() == answer
    chat(None, "and?", history)
    assert asked[-1] == ([], [*history, ("user", "and?")])


def test_nothing_is_streamed_for_no_steps_and_state_is_cleared_after_generation():
    model = model_of()
    batch = batch_of(model.config, ROWS[0])
    assert list(stream(model, batch, 0)) == []
    generate(model, batch, 2)
    assert model._vision is None


# ---------------------------------------------------------------- errors


def test_parts_that_do_not_fit_are_refused_with_both_values():
    model = model_of()
    language, encoders = model.language, list(model.encoders)
    with pytest.raises(ValueError, match="lists 2 encoders, 1 were given"):
        VisionLanguageModel(model.config, language, encoders[:1])
    with pytest.raises(ValueError, match="encoder 1 .* has a 4x4 grid, the config says side 8"):
        VisionLanguageModel(model.config, language, [encoders[0], PixelGrid(10, 4)])
    late = model.config.model_copy(update={"samplers": model.config.samplers.model_copy(update={"count": 3})})
    with pytest.raises(ValueError, match="would follow layer 4, the language model has layers 0 to 3"):
        VisionLanguageModel(late, language, encoders)


def test_batches_that_do_not_fit_are_refused_with_both_values():
    model = model_of()
    batch = batch_of(model.config, *ROWS[:2])
    with pytest.raises(ValueError, match="row 0 has 0 image slots .* need 20"):
        check_batch(model.config, batch | {"input_ids": batch["input_ids"].clamp(min=0)})
    with pytest.raises(ValueError, match="1 image tensors for 2 encoders"):
        model({name: t for name, t in batch.items() if name != "images.1"})
    with pytest.raises(ValueError, match="encoder 0 gave 64 tokens, the connector expects 4x4 = 16"):
        model(batch | {"images.0": batch["images.1"]})


def test_places_without_segments_hide_padded_slots():
    model = model_of()
    batch = batch_of(model.config, *ROWS[:2])
    bare = {name: t for name, t in batch.items() if name not in ("segments", "positions")}
    bare["attention_mask"] = (batch["input_ids"] != 0).long()
    got, want = model.places(bare), Places.of(batch)
    assert torch.equal(got.segments, want.segments)
    assert torch.equal(got.positions[want.segments > 0], want.positions[want.segments > 0])
