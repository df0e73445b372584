"""Golden kind ``prompts_*``: prompt strings, trained spans and, with the tokenizer of the file, ids and trained tokens."""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np

from mmkit.config import DataConfig, VlmConfig
from mmkit.data.batches import Slots, build_row
from mmkit.data.conversation import Formatter
from mmkit.data.example import IMAGE, BadRecord, Example, ImageRef, Turn
from mmkit.data.mixture import mixture_of
from mmkit.data.packing import Item
from mmkit.data.planning import ConversationPlan
from mmkit.data.templates import TEMPLATES, image_first, render

# the files' names for templates -> ours
NAMES = {"llama_v3": "llama_3", "llama_v3_autobos": "llama_3", "v1": "vicuna_v1"}
ROLES = {"human": "user", "gpt": "assistant"}


def template_of(name: str) -> str:
    """Our template for a file name such as ``prompts_cambrian_llama_v3``."""
    short = name.removeprefix("prompts_").partition("_")[2]
    return NAMES.get(short, short)


def turns_of(case: dict) -> list[Turn]:
    """The raw messages as the LLaVA reader hands them on: a leading answer dropped, the image marker first."""
    messages = case["messages_in"]
    if messages[0]["from"] != "human":
        messages = messages[1:]
    return [Turn(ROLES[m["from"]], image_first(m["value"]) if case["has_image"] else m["value"]) for m in messages]


def tokenizer_of(description: str, folder: Path):
    """The tokenizer a golden file names; None where the file's special tokens are not described closely enough.

    The files were written with transformers 4.37: its ``legacy=False`` is today's fast Llama tokenizer, ``legacy=True`` the slow one.
    """
    if description.startswith("bpe_llama3_like"):
        from transformers import PreTrainedTokenizerFast

        path = str(folder / "tokenizers" / "bpe_llama3_like.json")
        return PreTrainedTokenizerFast(tokenizer_file=path, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")
    if "im_start" in description or "phi3" in description:
        return None
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if "legacy=True" in description:
        from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

        return SentencePieceBackend(vocab_file=str(folder / "tokenizers" / "spm.model"), legacy=True, **tokens)
    from transformers import LlamaTokenizer

    with tempfile.TemporaryDirectory() as place:
        shutil.copy(folder / "tokenizers" / "spm.model", Path(place) / "tokenizer.model")
        return LlamaTokenizer.from_pretrained(place, **tokens)


def check(name: str, folder: Path) -> int:
    """Compares every case of one file; returns how many cases were compared down to token ids."""
    document = json.loads((folder / f"{name}.json").read_text())
    template = template_of(name)
    tokenizer = tokenizer_of(document["tokenizer"], folder)
    compared = 0
    for case in document["cases"]:
        turns = turns_of(case)
        rendered = render(TEMPLATES[template], turns)
        assert rendered.text == case["prompt"], (name, case["id"])
        if not case["warning"]:  # else the original masked everything by mistake
            assert [rendered.text[a:b] for a, b in rendered.spans] == [span["text"] for span in case["trained_spans"]]
            assert [list(span) for span in rendered.spans] == [[span["start"], span["end"]] for span in case["trained_spans"]]
        if case["generation_prompt"] is not None:
            assert render(TEMPLATES[template], turns[:-1], generate=True).text == case["generation_prompt"]
        if tokenizer is not None and "input_ids" in case and not case["warning"]:
            compared += _check_ids(case, template, tokenizer, turns)
    return compared


def _check_ids(case, template, tokenizer, turns) -> int:
    n_images = sum(turn.text.count(IMAGE) for turn in turns)
    example = Example(case["id"], images=(ImageRef(b"x"),) * n_images, turns=tuple(turns))
    encoded = Formatter(tokenizer, template).encode(example)
    ids, trained = list(encoded.ids), encoded.trained
    if case["input_ids"][0] == tokenizer.bos_token_id != ids[0]:  # the file's tokenizer adds BOS, ours does not
        ids, trained = [tokenizer.bos_token_id, *ids], np.concatenate([[False], trained])
    assert ids == case["input_ids"], case["id"]
    assert trained.astype(int).tolist() == case["trained_mask"], case["id"]
    bos = len(ids) - len(encoded.ids)  # 1 where only the file's tokenizer adds it
    _check_truncated(
        example, case["input_ids"][bos:], case["trained_mask"][bos:], Formatter(tokenizer, template)
    )
    return 1


SIZE = (12, 12)  # of a picture, six slots with its newlines
SMALL = {
    "encoders": [{"name": "lite0", "side": 4}],
    "connector": {"query_sides": [2], "width": 16, "heads": 4},
    "language": {"source": "random", "architecture": {"model_type": "llama", "vocab_size": 64}},
}


def _check_truncated(example: Example, ids: list[int], trained_mask: list[int], formatter: Formatter) -> None:
    """The row at every length beside the original's ids and labels, pictures unfolded to slots, cut by a slice."""
    slots, row = Slots.of(VlmConfig(**SMALL)), []
    for token, trained in zip(ids, trained_mask, strict=True):
        row += [(token, token if trained else -100)] * (slots.full if token == -200 else 1)
    for length in range(1, len(row) + 1):
        data = DataConfig(max_length=length, too_long="truncate")
        plan = ConversationPlan(
            mixture_of([example]), data, VlmConfig(**SMALL), formatter, seed=0, train=False, megabatch=1
        )
        kept = row[:length]
        half_a_picture = sum(token == -200 for token, _ in kept) % slots.full
        if half_a_picture or all(label == -100 for _, label in kept):
            try:
                plan.fit(plan.encode(0, example), example)
            except BadRecord as error:
                assert error.reason == "nothing left to learn" and str(length) in error.message
                continue
            raise AssertionError((example.key, length))
        member = plan.fit(plan.encode(0, example), example)
        made = build_row((Item((member,)),), [[SIZE] * len(member.slots)], slots)
        assert list(zip(made.ids.tolist(), made.labels.tolist(), strict=True)) == kept, (example.key, length)
        assert (member.length, member.cut) == (length, len(row) - length)
