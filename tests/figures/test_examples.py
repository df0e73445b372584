"""Pictures of examples: the token picture always reaches the tokens that carry loss."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mmkit.figures.examples import MAX_TOKENS, tokens
from mmkit.models.packs import byte_tokenizer


@pytest.mark.parametrize("before", [3, MAX_TOKENS - 1, 5 * MAX_TOKENS])
def test_the_token_picture_shows_where_learning_begins(before):
    trained = np.array([False] * before + [True] * 4)
    drawn = tokens(SimpleNamespace(ids=np.arange(before + 4) % 200 + 3, trained=trained), byte_tokenizer())
    assert drawn.table.trained.any() and not drawn.table.trained.all()
    assert len(drawn.table) <= MAX_TOKENS and drawn.table.trained.sum() == 4


def test_a_conversation_without_a_trained_token_is_still_shown():
    drawn = tokens(SimpleNamespace(ids=np.arange(5) + 3, trained=np.zeros(5, bool)), byte_tokenizer())
    assert len(drawn.table) == 5 and not drawn.table.trained.any()
