"""What is longer than a row: left out or cut from the right, and never counted as bad (`data.too_long`)."""

import json
import logging

import numpy as np
import pytest
import torch

from mmkit import config
from mmkit.config import ConfigError, DataConfig, changed
from mmkit.data.boxes import Box, pixels
from mmkit.data.check import check, judge_together
from mmkit.data.conversation import Formatter
from mmkit.data.example import Example, Region, Turn
from mmkit.data.mixture import ListSource
from mmkit.presets import presets
from tests.data.test_loader import (
    PACKED,
    REGIONS,
    WORDS,
    examples,
    make,
    picture,
    take,
    tokenizer,
    vlm,
    with_broken,
)

SLOTS = 6  # of one picture


def talk(key: str, rounds: int, number: int, words: int = 3) -> Example:
    """A conversation of several rounds about one picture, each answer of its own."""
    vocabulary, turns = WORDS.split(), []
    for k in range(rounds):
        answer = " ".join(vocabulary[(number + 3 * k + j) % len(vocabulary)] for j in range(words))
        turns += [
            Turn("user", ("<image>\n" if k == 0 else "") + f"what {vocabulary[(number + k) % 11]}"),
            Turn("assistant", answer),
        ]
    return Example(key, (picture(number),), tuple(turns), source="made")


def cut_by_hand(example: Example, limit: int) -> list[tuple[int, int]] | None:
    """(id, label) of each place of its row, pictures unfolded to slots, cut by a slice; None where nothing is left."""
    encoded, row = Formatter.of(tokenizer(), vlm()).encode(example), []
    for token, label in zip(encoded.ids.tolist(), encoded.labels.tolist(), strict=True):
        row += [(token, label)] * (SLOTS if token == -200 else 1)
    kept = row[:limit]
    return (
        kept
        if any(label != -100 for _, label in kept) and not sum(token == -200 for token, _ in kept) % SLOTS
        else None
    )


def conversations_in(batches) -> dict[str, list[tuple[int, int]]]:
    """(id, label) of every conversation of the batches, taken out of its row by segment and branch, by its key."""
    out = {}
    for batch in batches:
        tensors = {name: value.numpy() for name, value in batch.tensors.items()}
        for b, keys in enumerate(batch.keys):
            keys, found = [key for key in keys.split(",") if key], []
            segments, branches = tensors["segments"][b], tensors["branches"][b]
            for segment in range(1, segments.max() + 1):
                for branch in range(1, max(branches[segments == segment].max(), 1) + 1):
                    own = (segments == segment) & ((branches == branch) | (branches == 0))
                    found.append(
                        list(
                            zip(
                                tensors["input_ids"][b][own].tolist(),
                                tensors["labels"][b][own].tolist(),
                                strict=True,
                            )
                        )
                    )
            out |= dict(zip(keys, found, strict=True))
    return out


@pytest.mark.parametrize(
    "data", [{}, {"pack": True}, {"share_image": True}, PACKED, {"group_by_length": True}, {"workers": 2}]
)
@pytest.mark.parametrize("limit", [12, 19, 24, 33])
def test_every_conversation_is_the_beginning_of_itself(data, limit):
    found = [talk(f"k{k}", rounds=k % 4 + 1, number=k // 3) for k in range(24)]
    expected = {example.key: kept for example in found if (kept := cut_by_hand(example, limit)) is not None}
    full = {example.key: cut_by_hand(example, 10**6) for example in found}
    settings = {"max_length": limit, "too_long": "truncate", "max_bad_share": 1.0} | data
    if not expected:
        with pytest.raises(
            ValueError, match="no example of the data can be used.*nothing left to learn of its"
        ):
            take(make(found, settings, train=False, device_batch=2), 1)
        return
    stream = make(found, settings, train=False, device_batch=2)
    assert conversations_in(list(stream)) == expected
    cut = sum(expected[key] != full[key] for key in expected)
    assert stream.counts["too_long"]["truncated"] == cut and (limit > 30 or cut > 0)
    assert dict(stream.counts["bad"]) == (
        {"nothing left to learn": len(found) - len(expected)} if len(found) > len(expected) else {}
    )


def test_a_cut_label_is_no_target():
    example = talk("a", 3, 1)
    for limit in range(13, 40):
        expected = cut_by_hand(example, limit)
        if expected:
            batch = next(
                make([example], {"max_length": limit, "too_long": "truncate"}, train=False, device_batch=1)
            )
            targets = batch.tensors["targets"][0]
            assert targets[targets != -100].tolist() == [label for _, label in expected if label != -100]
            assert batch.tensors["input_ids"].shape[1] == limit


def test_pictures_behind_the_cut_are_not_opened():
    turns = (
        Turn("user", "<image>\nwhat red"),
        Turn("assistant", "green"),
        Turn("user", "<image>\nwhat blue"),
        Turn("assistant", "sky"),
    )
    missing = Example("two", (picture(1), with_broken(1, [0])[0].images[0]), turns, source="made")
    whole = len(Formatter.of(tokenizer(), vlm()).encode(missing).ids) + 2 * (SLOTS - 1)
    first = (
        next(
            k
            for k, mark in enumerate(Formatter.of(tokenizer(), vlm()).encode(missing).ids)
            if k and mark == -200
        )
        + SLOTS
        - 1
    )
    for limit in (first - 1, first):  # before the second picture, exactly at its beginning
        batch = next(
            make([missing], {"max_length": limit, "too_long": "truncate"}, train=False, device_batch=1)
        )
        assert (
            not batch.problems and batch.tensors["image_real"].tolist() == [[True]] and batch.truncated == 1
        )
    for limit in range(first + 1, first + SLOTS):  # inside it
        with pytest.raises(
            ValueError,
            match=f"nothing left to learn of its {whole} tokens when they are cut at data.max_length {limit}",
        ):
            next(make([missing], {"max_length": limit, "too_long": "truncate"}, train=False, device_batch=1))


def test_regions_behind_the_cut_go_with_their_tokens():
    frame, model = pixels(40, 20), vlm(regions=REGIONS, image_fit="stretch")
    regions = tuple(Region("box", Box(k, 1, k + 4, 9, frame)) for k in range(4))
    turns = [
        Turn("user", "<image>\nwhat <region>"),
        Turn("assistant", "red"),
        Turn("user", "what <region> <region>"),
        Turn("assistant", "<region>"),
    ]
    example = Example("r", (picture(3, (40, 20)),), tuple(turns), regions, source="made")
    encoded = Formatter.of(tokenizer(), model).encode(example)
    shown, whole = set(), len(encoded.ids) + SLOTS - 1
    for limit in range(whole - 1, 0, -1):
        stream = make(
            [example],
            {"max_length": limit, "max_regions": 4, "too_long": "truncate"},
            model,
            train=False,
            device_batch=1,
        )
        try:
            tensors = next(stream).tensors
        except ValueError as error:
            assert "nothing left to learn" in str(error)
            break
        n = int((tensors["input_ids"] == -300).sum())
        assert n == int((encoded.ids[: limit - SLOTS + 1] == -300).sum()) == int(tensors["region_real"].sum())
        shown.add(n)
    assert shown == {1, 2, 3}


def test_a_region_of_a_picture_that_was_cut_away_leaves_nothing_to_show_it():
    model, frame = vlm(regions=REGIONS, image_fit="stretch"), pixels(12, 12)
    turns = (
        Turn("user", "<image>\nwhat <region>"),
        Turn("assistant", "red green"),
        Turn("user", "<image>\nwhat"),
        Turn("assistant", "sky"),
    )
    example = Example(
        "r", (picture(1), picture(2)), turns, (Region("box", Box(1, 1, 5, 5, frame), image=1),), source="made"
    )
    ids = Formatter.of(tokenizer(), model).encode(example).ids
    second = int(np.flatnonzero(ids == -200)[1]) + SLOTS - 1
    data = {"max_length": second, "max_regions": 1, "too_long": "truncate"}
    with pytest.raises(ValueError, match="nothing left to learn"):
        next(make([example], data, model, train=False, device_batch=1))


# ---------------------------------------------------------------- what is counted


def half_too_long(n: int = 200) -> list[Example]:
    return [talk(f"k{k}", 4 if k % 2 else 1, k) for k in range(n)]


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_left_out_for_their_length_never_stop_a_run(caplog, workers):
    with caplog.at_level(logging.WARNING):
        stream = make(
            half_too_long(),
            {"max_length": 24, "max_bad_share": 0.0, "workers": workers},
            train=False,
            device_batch=4,
        )
        assert len(list(stream)) == 25
        stream.close()
    assert dict(stream.counts["too_long"]) == {"dropped": 100} and not stream.counts["bad"]
    told = [record.message for record in caplog.records if "too long" in record.message]
    assert len(told) == 1 and "raise it, or set data.too_long to truncate" in told[0]


def test_a_bad_sample_among_long_ones_still_stops_the_run_and_is_the_one_that_is_named():
    found = half_too_long(400)
    for k in range(0, 400, 20):
        found[k] = with_broken(400, [k])[k]
    stream = make(found, {"max_length": 24, "max_bad_share": 0.02}, train=False, device_batch=4)
    with pytest.raises(
        ValueError,
        match=r"^\d of \d+ samples cannot be used \(\d undecodable image\).*'k\d*0': (?!.*max_length)",
    ):
        list(stream)


def test_truncated_samples_are_all_trained_on():
    stream = make(
        half_too_long(),
        {"max_length": 24, "max_bad_share": 0.0, "too_long": "truncate"},
        train=False,
        device_batch=4,
    )
    assert sum(batch.n_samples for batch in stream) == 200
    assert dict(stream.counts["too_long"]) == {"truncated": 100} and not stream.counts["bad"]


@pytest.mark.parametrize("too_long, kept", [("drop", 100), ("truncate", 200)])
def test_the_check_counts_as_training_does(too_long, kept):
    data, model = DataConfig(max_length=24, max_bad_share=0.0, too_long=too_long), vlm()
    report = check(ListSource(half_too_long()), data, model, Formatter.of(tokenizer(), model))
    assert not report.would_fail and (report.bad, report.share, report.too_long) == (0, 0.0, (100, 0.5))
    assert report.lengths["most"] > 24  # as they are, before any cut
    kind = "left out" if too_long == "drop" else "note"
    assert [
        (row["kind"], row["count"])
        for row in report.rows()
        if "too long" in row["what"] or "truncated" in row["what"]
    ] == [(kind, 100)]
    assert [row["examples"] for row in report.rows() if "truncated" in row["what"]] == [
        "k1; k3; k5; k7; k9"
    ] * (too_long == "truncate")
    assert (
        "longer than a row: 50.0% of the samples tokenised" in report.summary()
        and "0 unusable" in report.summary()
    )
    stream = make(
        half_too_long(), {"max_length": 24, "max_bad_share": 0.0, "too_long": too_long}, train=False
    )
    assert sum(batch.n_samples for batch in stream) == kept


def test_a_mixture_of_which_nothing_is_left_would_fail():
    model, data = vlm(), DataConfig(max_length=9)
    reports = [check(ListSource(examples(n)), data, model, Formatter.of(tokenizer(), model)) for n in (9, 12)]
    assert all(report.would_fail for report in reports)
    judge_together(reports, [9, 12])
    assert all(report.would_fail for report in reports)
    other = check(ListSource(examples(9)), DataConfig(), model, Formatter.of(tokenizer(), model))
    judge_together([*reports, other], [9, 12, 9])
    assert not any(report.would_fail for report in (*reports, other))


# ---------------------------------------------------------------- settings


def test_a_position_belongs_to_one_way_of_making_rows():
    found = half_too_long(40)
    dropped = make(found, {"max_length": 24}, device_batch=2)
    take(dropped, 3)
    state = json.loads(json.dumps(dropped.state_dict()))
    assert "truncate" not in state["rows_of"]  # as positions saved before there was a choice
    make(found, {"max_length": 24}, device_batch=2, state=state)
    with pytest.raises(ValueError, match="rows_of.*truncate"):
        make(found, {"max_length": 24, "too_long": "truncate"}, device_batch=2, state=state)


def test_resumed_truncated_batches_are_bit_identical():
    data = {"max_length": 24, "too_long": "truncate", "pack": True, "share_image": True}
    whole = make(half_too_long(60), data, device_batch=3)
    take(whole, 4)
    state, rest = json.loads(json.dumps(whole.state_dict())), take(whole, 15)
    again = take(make(half_too_long(60), data, device_batch=3, state=state), 15)
    assert all(
        torch.equal(a.tensors[name], b.tensors[name])
        for a, b in zip(rest, again, strict=True)
        for name in a.tensors
    )


@pytest.mark.parametrize("model", presets())
def test_presets_of_originals_that_truncate_do_and_the_demo_does_not(model):
    for stage in ("pretrain", "finetune"):
        run = config.load(model, stage)
        published = run.model.kind == "vlm" and run.preset != "tiny"
        assert run.data.too_long == ("truncate" if published else "drop")


def test_another_word_is_refused():
    with pytest.raises(ConfigError, match="data.too_long = 'cut'.*'drop' or 'truncate'"):
        changed(config.load("tiny", "finetune"), data__too_long="cut")
