"""Tokens added to a vocabulary: which rows are theirs, and tables of which only these rows train."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mmkit.config import ConfigError, LanguageConfig, RegionConfig
from mmkit.models import packs, vocabulary
from mmkit.models.build import build
from tests.models import twins


def sourced(folder, rows: int, words=None, **changes) -> LanguageConfig:
    """A language model of 300 rows whose files have ``rows`` of them, and the tokenizer ``words`` where one
    is given."""
    from mmkit.models.language import load_language

    load_language(twins.language(vocab_size=rows)).save_pretrained(folder)
    if words:
        words.save_pretrained(folder)
    return twins.language().model_copy(update={"source": str(folder), **changes})


def test_rows_that_the_files_lack_and_tokens_in_spare_rows_are_added(tmp_path):
    plain, more = packs.byte_tokenizer(), packs.byte_tokenizer()
    more.add_tokens(["<box>"], special_tokens=True)
    more.save_pretrained(tmp_path / "words")
    spare = len(plain)
    grown = sourced(tmp_path / "grown", 297)
    assert vocabulary.added_tokens(twins.llava(language=grown)) == [297, 298, 299]
    own = sourced(tmp_path / "own", 300, plain, tokenizer=str(tmp_path / "words"))
    assert vocabulary.added_tokens(twins.llava(language=own)) == [spare], "what the source's own tokenizer knows is old"
    assert vocabulary.added_tokens(twins.llava(language=own.model_copy(update={"tokenizer": None}))) == []
    assert vocabulary.added_tokens(twins.llava()) == [], "random weights have no older vocabulary"
    assert vocabulary.added_tokens(twins.ferret()) == [spare], "the region token"
    assert RegionConfig().token not in plain.get_vocab()


class Scaled(nn.Embedding):
    """As Gemma's: what it gives is scaled."""

    embed_scale = 3.0


def tables(tied: bool = False, bias: bool = False, scaled: bool = False):
    model = build(twins.llava(language=twins.language(tie_word_embeddings=tied)))
    language = model.language
    if bias:
        language.lm_head = nn.Linear(32, 300)
    if scaled:
        weight = language.model.embed_tokens.weight
        language.model.embed_tokens = Scaled(300, 32, _weight=weight.detach())
        language.model.embed_tokens.forward = lambda ids: nn.functional.embedding(ids, weight) * 3.0
    return model


@pytest.mark.parametrize("kind", [{}, {"tied": True}, {"bias": True}, {"scaled": True}], ids=str)
def test_a_table_with_rows_apart_computes_what_the_whole_table_does_and_only_they_get_gradients(kind):
    model, ids = tables(**kind), [7, 250, 299]
    words, hidden = torch.tensor([[1, 7, 299, 5]]), torch.randn(2, 3, 32)
    embedding, head = model.language.get_input_embeddings(), model.language.get_output_embeddings()
    wanted = embedding(words), head(hidden)
    vocabulary.train_rows_alone(model, ids, lambda name: None)
    got = model.language.get_input_embeddings()(words), model.head(hidden)
    for mine, whole in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, whole)
    model.requires_grad_(False)
    parts = vocabulary.row_tables(model)
    for part in parts.values():
        part.added_rows.requires_grad_(True)
    assert len({id(part.added_rows) for part in parts.values()}) == (1 if kind.get("tied") else 2)
    (model.language.get_input_embeddings()(words).sum() + model.head(hidden).square().sum()).backward()
    trained = [name for name, p in model.named_parameters() if p.grad is not None]
    assert trained and all(name.endswith(".added_rows") for name in trained)
    assert not model.language.model.embed_tokens.added_rows.grad[1].any() or kind.get("tied"), "a token that did not come"
    with torch.no_grad():
        for part in parts.values():
            part.added_rows += 1
    state = dict(vocabulary.folded(model, model.state_dict().items()))
    for path, part in parts.items():
        table, old = state[f"{path}.base_layer.weight"], [i for i in range(300) if i not in ids]
        assert torch.equal(table[old], part.base_layer.weight[old])
        if not (kind.get("tied") and path.endswith("lm_head")):  # one tensor under two names: a stream has it once
            assert torch.equal(table[ids], part.added_rows)
    assert not any(name.endswith(".added_rows") for name in state)


def test_a_table_of_an_unknown_kind_is_refused_by_its_name():
    model = tables()
    model.language.lm_head = nn.Sequential(model.language.lm_head)
    model.language.lm_head.weight = model.language.lm_head[0].weight
    with pytest.raises(ConfigError, match="'rows': language.lm_head is a Sequential, whose rows cannot train alone; use 'all'"):
        vocabulary.train_rows_alone(model, [1], lambda name: None)
