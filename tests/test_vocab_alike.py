"""Ranks that share a vocabulary without the compiler: the same step on all of them, or an error on all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zoo
from pool import RankPool
from test_vocab_head import against_dense, head_config

import autosp
from autosp.errors import RankMismatchError


def other_steps(rank_info: Any) -> list[str]:
    model = zoo.build("llama", num_hidden_layers=1, tie_word_embeddings=False)
    reference = copy.deepcopy(model)
    autosp.initialize(head_config(2), model=model)
    heard = []
    mine, same = zoo.batch(9, seed=rank_info.rank), zoo.batch(9)
    ids, labels = mine["input_ids"], same["labels"]
    for args, kwargs in (
        ((), mine),
        ((ids,), {}),
        ((ids.bool().logical_not().long() + rank_info.rank,), {"labels": labels}),
        ((), {**same, "attention_mask": torch.ones(2, 9, dtype=torch.long).tril(-rank_info.rank)}),
        ((), {**same, "num_items_in_batch": 7 + rank_info.rank}),
        ((same["input_ids"][:, : 9 - rank_info.rank],), {}),
    ):
        with pytest.raises(RankMismatchError) as caught:
            model(*args, **kwargs)
        heard.append(str(caught.value))
    torch.manual_seed(rank_info.rank)
    with pytest.raises(RankMismatchError) as caught:
        model.generate(same["input_ids"], max_new_tokens=9, do_sample=True, temperature=5.0)
    heard.append(str(caught.value))
    # Nothing hangs on: the same model goes on with the same batch.
    against_dense(model, reference, same)
    torch.manual_seed(3)
    sampled = model.generate(same["input_ids"], max_new_tokens=4, do_sample=True)
    torch.manual_seed(3)
    assert torch.equal(sampled, reference.generate(same["input_ids"], max_new_tokens=4, do_sample=True))
    return heard


def test_other_inputs_are_an_error_on_every_rank(ranks: RankPool) -> None:
    first, second = ranks.run(other_steps, world_size=2)
    assert first == second
    named = ["input_ids, labels", "argument 0", "argument 0", "attention_mask", "num_items_in_batch", "argument 0"]
    for message, names in zip(first, named, strict=False):
        assert f"different inputs for the same step: {names}." in message
        assert "ranks [0, 1], which share the vocabulary" in message and "data parallel axis" in message
    assert len(first) == 7 and "sampled ids included" in first[6]


def other_dropout(rank_info: Any) -> None:
    model = zoo.build("gpt2", n_layer=1, resid_pdrop=0.5).train()
    reference = copy.deepcopy(model)
    autosp.initialize(head_config(2, vocab_parallel_embedding=True), model=model)
    torch.manual_seed(rank_info.rank)
    with pytest.raises(RankMismatchError, match="the random state that dropout is drawn from"):
        model(**zoo.batch(9))
    against_dense(model.eval(), reference.eval(), zoo.batch(9))  # which draws nothing
    torch.manual_seed(3)
    found = model.train()(**zoo.batch(9)).loss
    torch.manual_seed(3)
    torch.testing.assert_close(found, reference.train()(**zoo.batch(9)).loss)


def test_dropout_that_is_drawn_otherwise_is_an_error_on_every_rank(ranks: RankPool) -> None:
    ranks.run(other_dropout, world_size=2)


def unchecked(rank_info: Any) -> float:
    model = zoo.build("llama", num_hidden_layers=1, tie_word_embeddings=False)
    autosp.initialize({**head_config(2), "autosp": {"verify": "compile"}}, model=model)
    return model(**zoo.batch(9), unused=rank_info.rank).loss.item()


def test_the_comparison_can_be_turned_off(ranks: RankPool) -> None:
    first, second = ranks.run(unchecked, world_size=2)
    assert first == second
