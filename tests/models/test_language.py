"""Any causal language model by config: masks against Hugging Face's own, loading and its errors."""

from __future__ import annotations

import itertools

import pytest
import torch

from mmkit.config import LanguageConfig
from mmkit.errors import InputError
from mmkit.models.language import Places, adjust_logits, decoder_layers, hf_config, load_language, run, visible

TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "llama": {},
    "smollm2": {"model_type": "llama", "tie_word_embeddings": True},
    "phi3": {"sliding_window": 5},
    "mistral": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 4, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]},
}


def tiny(family: str, **fields) -> LanguageConfig:
    return LanguageConfig(source="random", architecture={"model_type": family} | TINY | FAMILIES.get(family, {}) | fields)


def language(family: str, **fields):
    torch.manual_seed(0)
    return load_language(tiny(family, **fields)).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_equal_hugging_face_on_the_bare_row(family):
    model = language(family)
    ids = torch.randint(3, 64, (1, 9))
    want = model(input_ids=ids).logits[0]
    for left, right in ((0, 4), (3, 0), (2, 2)):
        padded = torch.nn.functional.pad(ids, (left, right))
        mask = torch.nn.functional.pad(torch.ones_like(ids), (left, right))
        hidden = run(model, model.get_input_embeddings()(padded), Places.of({"input_ids": padded, "attention_mask": mask}))
        got = adjust_logits(model, model.get_output_embeddings()(hidden))[0, left : left + 9]
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_packed_conversations_and_branches_equal_each_on_its_own(family):
    model = language(family)
    a, b, shared = (torch.randint(3, 64, (n,)).tolist() for n in (7, 5, 4))
    questions = [torch.randint(3, 64, (n,)).tolist() for n in (3, 6)]
    row = [*a, *b, *shared, *questions[0], *questions[1]]
    batch = {
        "input_ids": torch.tensor([row]),
        "segments": torch.tensor([[1] * 7 + [2] * 5 + [3] * 13]),
        "branches": torch.tensor([[0] * 16 + [1] * 3 + [2] * 6]),
        "positions": torch.tensor([[*range(7), *range(5), *range(4), *range(4, 7), *range(4, 10)]]),
    }
    got = run(model, model.get_input_embeddings()(batch["input_ids"]), Places.of(batch))[0]
    alone = lambda ids: model.get_decoder()(input_ids=torch.tensor([ids])).last_hidden_state[0]  # noqa: E731
    torch.testing.assert_close(got[:7], alone(a), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(got[7:12], alone(b), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(got[16:19], alone(shared + questions[0])[4:], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(got[19:25], alone(shared + questions[1])[4:], atol=2e-5, rtol=1e-4)


def test_visibility_equals_its_definition_position_by_position():
    torch.manual_seed(1)
    segments, branches = torch.randint(0, 3, (2, 10)), torch.randint(0, 3, (2, 10))
    places = Places(torch.arange(10).expand(2, -1), segments, branches, torch.zeros(2, 10).long())
    got = visible(places, places)
    for n, t, j in itertools.product(range(2), range(10), range(10)):
        same = segments[n, t] == segments[n, j] and segments[n, j] > 0 and (branches[n, j] == 0 or branches[n, j] == branches[n, t])
        assert bool(got[n, t, j]) == (t == j or (j < t and bool(same)))


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "opt"])
def test_decoder_layers_are_found_in_families_that_name_them_otherwise(family):
    other = {"n_embd": 32, "n_layer": 2, "n_head": 4, "ffn_dim": 48, "word_embed_proj_dim": 32} if family in ("gpt2", "opt") else {}
    assert len(decoder_layers(language(family, **other))) == 2


def test_nothing_is_read_or_allocated_on_the_meta_device():
    full = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_key_value_heads": 8}
    config = LanguageConfig(source="no/such-model", architecture={"model_type": "llama", "num_attention_heads": 32} | full)
    model = load_language(config, "meta")
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248  # Llama-3-8B
    assert all(p.is_meta for p in model.parameters())


def test_weights_come_from_a_folder_and_a_larger_vocabulary_adds_mean_rows(tmp_path):
    model = language("llama")
    model.save_pretrained(tmp_path)
    config = tiny("llama", vocab_size=66).model_copy(update={"source": str(tmp_path)})
    grown = load_language(config)
    tables = [(m.get_input_embeddings(), m.get_output_embeddings()) for m in (grown, model)]
    for table, old in zip(*tables, strict=True):
        assert torch.equal(table.weight[:64], old.weight) and table.weight.shape[0] == 66
        torch.testing.assert_close(table.weight[65], old.weight.mean(0))
    assert torch.equal(grown.model.norm.weight, model.model.norm.weight)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 60}, "vocab_size 60 is smaller than the 64"),
        ({"hidden_size": 16}, "hidden_size is 16, the weights in .* have 32"),
        ({"model_type": "qwen2"}, "model_type is qwen2, the weights in .* have llama"),
        ({"hidden_act": "sillu"}, "'sillu' is not an activation.*did you mean 'silu'"),
    ],
)
def test_an_architecture_that_does_not_fit_the_weights_is_refused_with_both_values(tmp_path, fields, message):
    language("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_language(tiny("llama", **fields).model_copy(update={"source": str(tmp_path)}))


def test_a_missing_tensor_is_named(tmp_path):
    model = language("llama")
    state = {name: t for name, t in model.state_dict().items() if "norm" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match=r"lack \d+ tensors: model.layers.0.input_layernorm.weight"):
        load_language(tiny("llama").model_copy(update={"source": str(tmp_path)}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": "abc"}, "vocab_size.* got str"),
        ({"hidden_size": 33}, "33.* not a multiple of"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"model_type": "lama"}, "model_type 'lama' is no model of transformers.*llama"),
    ],
)  # fmt: skip
def test_a_value_that_the_library_does_not_take_is_told_in_one_line(fields, message):
    with pytest.raises(InputError, match=rf"^(model\.)?language\.architecture.*{message}") as told:
        load_language(tiny("llama", **fields))
    assert "\n" not in str(told.value)


def test_an_architecture_without_model_type_is_refused():
    with pytest.raises(ValueError, match="no model_type"):
        hf_config({"hidden_size": 3})
