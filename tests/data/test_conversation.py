"""Prompts, trained spans and labels: golden strings, and every kind of tokenizer (user reports U01, U06)."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mmkit.config import ConfigError
from mmkit.data.boxes import Box, pixels
from mmkit.data.conversation import Formatter
from mmkit.data.example import BadRecord, Example, ImageRef, Region, Turn
from mmkit.data.offsets import adds_bos, tokens_with_starts
from mmkit.data.templates import TEMPLATES
from tests.golden_checks import prompts

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = sorted(path.stem for path in GOLDEN.glob("prompts_*.json"))
SPM = str(GOLDEN / "tokenizers" / "spm.model")
CHAT = Example(
    "chat",
    images=(ImageRef(b"x"),),
    turns=(
        Turn("user", "<image>\nHow many boats — «Café»?"),
        Turn("assistant", "Three, é😀."),
        Turn("user", "Which is\nlargest?"),
        Turn("assistant", "The blue one."),
    ),
)


def spm_slow(**settings):
    from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

    return SentencePieceBackend(vocab_file=SPM, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **settings)


def spm_fast(tmp_path):
    import shutil

    from transformers import LlamaTokenizer

    shutil.copy(SPM, tmp_path / "tokenizer.model")
    return LlamaTokenizer.from_pretrained(tmp_path)


def byte_bpe(bos: bool):
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(GOLDEN / "tokenizers" / "bpe_llama3_like.json"), bos_token="<|begin_of_text|>", eos_token="<|eot_id|>"
    )
    if bos:
        pair = ("<|begin_of_text|>", tokenizer.bos_token_id)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[pair])
    return tokenizer


def any_tokenizer(kind, tmp_path):
    return {
        "slow sentencepiece": lambda: spm_slow(legacy=False),
        "slow sentencepiece, legacy": lambda: spm_slow(legacy=True),
        "fast sentencepiece": lambda: spm_fast(tmp_path),
        "byte-level": lambda: byte_bpe(False),
        "byte-level that adds BOS": lambda: byte_bpe(True),
    }[kind]()


def spelled(tokenizer, ids) -> str:
    """Decoded text; slow tokenizers of this transformers version print byte tokens as ``<0xC3>``, which are joined here."""
    if tokenizer.is_fast:
        return tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    tokens = tokenizer.convert_ids_to_tokens(ids)
    parts = [bytes([int(t[3:5], 16)]) if t.startswith("<0x") else t.replace("▁", " ").encode() for t in tokens]
    return b"".join(parts).decode()


KINDS = ["slow sentencepiece", "slow sentencepiece, legacy", "fast sentencepiece", "byte-level", "byte-level that adds BOS"]


@pytest.mark.parametrize("name", FILES)
def test_prompts_and_trained_spans_equal_the_published_ones(name):
    compared = prompts.check(name, GOLDEN)
    if any(part in name for part in ("ferret", "_v1", "llama_v3", "plain", "mistral")) and "autobos" not in name:
        assert compared, "no case was compared down to token ids"


@pytest.mark.parametrize("template", sorted(TEMPLATES))
@pytest.mark.parametrize("kind", KINDS)
def test_labels_decode_to_exactly_the_answers(kind, template, tmp_path):
    tokenizer = any_tokenizer(kind, tmp_path)
    formatter = Formatter(tokenizer, template)
    encoded = formatter.encode(CHAT)
    rendered = formatter.render(CHAT.turns)
    wanted = "".join(rendered.text[a:b] for a, b in rendered.spans)
    decoded = spelled(tokenizer, encoded.ids[encoded.trained].tolist())
    squeezed = ["".join(text.split()) for text in (decoded, wanted)]
    assert squeezed[0] == squeezed[1]
    assert "Three,é😀." in squeezed[0] and encoded.n_images == 1
    assert (encoded.labels >= 0).sum() == encoded.trained.sum()


def test_bos_appears_once_whoever_adds_it():
    for bos in (False, True):
        tokenizer = byte_bpe(bos)
        assert adds_bos(tokenizer) is bos
        ids = Formatter(tokenizer, "llama_3").encode(CHAT).ids
        assert (ids == tokenizer.bos_token_id).sum() == 1 and ids[0] == tokenizer.bos_token_id
    assert Formatter(byte_bpe(True), "chatml_direct").encode(CHAT).ids[0] == byte_bpe(True).bos_token_id


def test_slow_and_fast_tokenizers_agree_on_where_tokens_start(tmp_path):
    text = "a red kite </s>é😀\nTwo  spaces"
    fast_ids, fast = tokens_with_starts(spm_fast(tmp_path), text)
    slow_ids, slow = tokens_with_starts(spm_slow(legacy=False), text)
    assert fast_ids[1:] == slow_ids[len(slow_ids) - len(fast_ids) + 1 :]
    assert fast[-6:] == slow[-6:]


def test_pieces_that_do_not_spell_the_text_are_refused():
    class Upper:
        is_fast, unk_token = False, None

        def encode(self, text, add_special_tokens):
            return [0]

        def convert_ids_to_tokens(self, ids):
            return ["HELLO"]

    with pytest.raises(ValueError, match="does not spell the text at 'hello'"):
        tokens_with_starts(Upper(), "hello")


def test_unknown_token_of_a_slow_tokenizer_does_not_shift_the_rest():
    class Words:
        is_fast, unk_token = False, "<unk>"

        def encode(self, text, add_special_tokens):
            return list(range(3))

        def convert_ids_to_tokens(self, ids):
            return ["a", "<unk>", "▁c"]

    assert tokens_with_starts(Words(), "a ☃☃ c")[1] == [0, 1, 4]


def test_sample_without_an_answer_is_an_error_naming_it():
    turns = (Turn("user", "hello"), Turn("assistant", "no loss", trained=False))
    with pytest.raises(BadRecord, match="'k9': no supervised token") as caught:
        Formatter(byte_bpe(False), "chatml_direct").encode(Example("k9", turns=turns))
    assert caught.value.reason == "no supervised token"


def test_roles_out_of_order_name_the_turn():
    turns = (Turn("user", "a"), Turn("user", "b"))
    with pytest.raises(BadRecord, match="turn 2 is from 'user' where 'assistant' is due"):
        Formatter(byte_bpe(False), "short").encode(Example("k", turns=turns))


def test_unknown_template_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'vicuna_v1'"):
        Formatter(byte_bpe(False), "vicuna")


def test_region_markers_become_coordinates_and_tokens_for_users_only():
    region = Region("box", Box(10, 10, 60, 40, pixels(100, 70)))
    point = Region("point", Box.point(50, 35, pixels(100, 70)))
    turns = (Turn("user", "<image>\nWhat is <region> and <region_fea>?"), Turn("assistant", "A kite <region>."))
    example = Example("k", images=(ImageRef(b"x"),), turns=turns, regions=(region, point, region))
    for tokenizer in (byte_bpe(False), spm_slow(legacy=True)):
        encoded = Formatter(tokenizer, "ferret_v1", region_token="<region_fea>").encode(example)
        assert (encoded.ids == -300).sum() == 2 and encoded.regions == (0, 1)
    known = spm_slow(legacy=True)
    known.add_tokens(["<region_fea>"])
    encoded = Formatter(known, "ferret_v1", region_token="<region_fea>").encode(example)
    assert (encoded.ids == -300).sum() == 2
    words = known.decode([token for token in encoded.ids if token >= 0])
    assert words.count("[100, 142, 600, 571]") == 2
    assert (Formatter(known, "ferret_v1").encode(example).ids == -300).sum() == 0


def test_prompt_ends_where_the_last_answer_begins():
    tokenizer = byte_bpe(False)
    formatter = Formatter(tokenizer, "llama_3")
    full, prompt = formatter.encode(CHAT), formatter.prompt(CHAT)
    assert np.array_equal(full.ids[: len(prompt.ids)], prompt.ids)
    assert full.trained[len(prompt.ids)] and not full.trained[len(prompt.ids) - 1]
    assert tokenizer.convert_tokens_to_ids("<|eot_id|>") in formatter.stop_ids


def test_length_counts_image_slots():
    encoded = Formatter(byte_bpe(False), "short").encode(CHAT)
    assert encoded.length(16) == len(encoded.ids) + 15


def test_own_chat_template_is_supervised_up_to_the_end_of_turn():
    tokenizer = byte_bpe(False)
    tokenizer.chat_template = (
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    )
    formatter = Formatter(tokenizer, "tokenizer")
    rendered = formatter.render(CHAT.turns)
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["Three, é😀.<|eot_id|>", "The blue one.<|eot_id|>"]
    assert formatter.encode(CHAT).trained.any()
    tokenizer.chat_template = None
    with pytest.raises(BadRecord, match="needs a chat template"):
        formatter.encode(CHAT)


REFUSING = [
    ("{{ raise_exception('System role not supported') }}", "refuses this conversation: System role not supported; put the system text into"),
    ("{{ messages[0].content + 3 }}", "refuses this conversation: .*str.*; put the system text into the first question"),
    ("{{ messages[0].name.first }}", "refuses this conversation: .*has no attribute 'name'"),
    ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", "leaves out text of the system turn 1: 'Be brief.'"),
    ("{% for m in messages %}{{ m.content[:12] }}{% endfor %}", "leaves out text of the user turn 2"),
]


@pytest.mark.parametrize(("template", "words"), REFUSING)
def test_a_conversation_that_the_tokenizers_template_refuses_or_cuts_is_a_bad_record_in_its_words(template, words):
    tokenizer = byte_bpe(False)
    tokenizer.chat_template = template
    example = replace(CHAT, turns=(Turn("system", "Be brief."), *CHAT.turns))
    for read in (Formatter(tokenizer, "tokenizer").encode, Formatter(tokenizer, "tokenizer").prompt):
        with pytest.raises(BadRecord, match=words):
            read(example)


def test_system_turn_replaces_the_default_text():
    turns = (Turn("system", "Be brief."), *CHAT.turns)
    assert "Be brief." in Formatter(byte_bpe(False), "chatml_direct").render(turns).text
    text = Formatter(byte_bpe(False), "mistral_instruct").render(turns).text
    assert text.startswith("[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n<image>")
