"""Operators at their edges: ties, negative symbolic bounds, joined sequences, positions that nobody has."""

from __future__ import annotations

from collections.abc import Callable

import parity
import pytest
import torch
from pool import RankFailure, RankInfo, RankPool
from torch import nn
from torch.nn import functional as F

import autosp

Form = Callable[["Edge", torch.Tensor, torch.Tensor], torch.Tensor]


class Edge(nn.Module):
    """Embedding and learned positions, then one of the forms below, to a scalar."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, 8)
        self.table = nn.Parameter(torch.zeros(64, 8))
        self.layer = nn.Linear(8, 8)
        self.form = FORMS[form]

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.embedding(input_ids))
        return self.form(self, x, input_ids)


def largest_with_ties(model: Edge, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    positions = model.table[: x.shape[1]] + 0 * x.detach()
    return (positions.amax(1) * x.mean(1)).sum() + positions.amax() * 3 + x.amin((0, 1)).sum()


def from_behind(model: Edge, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    quarter = x.shape[1] // 4
    return x[:, -2 * quarter : -quarter].square().sum() + x[:, -quarter:].sum()


def last_tokens(model: Edge, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return x[torch.arange(x.shape[0]), torch.tensor([3, -1])].square().sum()


def joined_keys(model: Edge, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    q = x.unsqueeze(1)
    k = torch.cat([q, 0.5 * q], 2)
    return F.scaled_dot_product_attention(q, k, k).square().sum()


def renormed(model: Edge, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.renorm(x, 2, 0, 1.0).sum()


def scattered_into_more_rows(model: Edge, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    base = x.new_zeros(x.shape[0], x.shape[1] + 3, x.shape[2])
    index = (x.detach() * 100).long().abs() % 8
    return base.scatter_add(-1, index, x).square().sum()


def past_the_end(model: Edge, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return x[torch.arange(x.shape[0]), torch.tensor([40, 2])].sum()


FORMS: dict[str, Form] = {
    f.__name__: f
    for f in (
        largest_with_ties,
        from_behind,
        last_tokens,
        joined_keys,
        renormed,
        scattered_into_more_rows,
        past_the_end,
    )
}


def run(rank_info: RankInfo, form: str, lengths: list[int]) -> list[parity.Result]:
    autosp.initialize(parity.CASE)
    model = Edge(form)
    compiled = torch.compile(model, backend="autosp")
    results = []
    for length in lengths:
        ids = torch.randint(1, 32, (2, length), generator=torch.Generator().manual_seed(length))
        batch = {"input_ids": ids}
        results.append(parity.compare(model, compiled, batch, prepare=autosp.prepare_batch, loss_of=lambda out: out))
    return results


@pytest.mark.parametrize("form", ["largest_with_ties", "from_behind", "last_tokens"])
def test_exact(ranks: RankPool, form: str) -> None:
    for results in ranks.run(run, form, [17, 18], world_size=3):
        for result in results:
            result.check()


@pytest.mark.parametrize("form", ["joined_keys", "renormed", "scattered_into_more_rows"])
def test_refused(ranks: RankPool, form: str) -> None:
    with pytest.raises(RankFailure, match="UnsupportedGraphError"):
        ranks.run(run, form, [18], world_size=3)


def out_of_range(rank_info: RankInfo) -> float:
    autosp.initialize(parity.CASE)
    ids = torch.randint(1, 32, (2, 18), generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(Edge("past_the_end"), backend="autosp")
    return compiled(**autosp.prepare_batch({"input_ids": ids})).item()


def test_a_position_that_nobody_has_is_nan(ranks: RankPool) -> None:
    assert all(value != value for value in ranks.run(out_of_range, world_size=2))
