"""The zigzag order: every row at one rank, equal work, exact under whatever else the mask says."""

from __future__ import annotations

import functools
from typing import Any

import masked_toys
import parity
import pytest
import torch
from pool import RankPool
from test_attention_strategies import form

from autosp.layout.attention.strategies import ring
from autosp.layout.zigzag import owner, piece_rows

slow = pytest.mark.slow


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("block", [1, 2, 6, 7])
def test_each_rank_has_an_early_and_a_late_piece_and_the_same_work(ranks: int, block: int):
    pieces = [[p for p in range(2 * ranks) if owner(p, ranks) == rank] for rank in range(ranks)]
    starts = [p // 2 * block + p % 2 * piece_rows(0, block) for p in range(2 * ranks)]
    work = []
    for rank, mine in enumerate(pieces):
        assert mine == [rank, 2 * ranks - 1 - rank]
        assert sum(piece_rows(p, block) for p in mine) == block
        work.append(sum(i + 1 for p in mine for i in range(starts[p], starts[p] + piece_rows(p, block))))
    # Odd blocks have a row more in one half.
    assert max(work) - min(work) <= (0 if block % 2 == 0 else ranks * block)


def exchange(rank_info: Any, block: int) -> bool:
    import autosp
    from autosp import backend  # noqa: F401
    from autosp.layout.axis import Axis
    from autosp.layout.zigzag import from_zigzag, to_zigzag

    state = autosp.initialize(parity.CASE)
    axis = Axis("sp", state.sp_size, state.sp_rank, state.sp_group)
    ranks, rank = axis.size, axis.rank
    whole = torch.arange(ranks * block, dtype=torch.float64)
    tensors = [(whole + 1000 * i).view(1, 1, -1, 1).expand(2, 3 - i, -1, 4 + i) for i in range(2)]
    mine = [x[:, :, rank * block : (rank + 1) * block].clone().requires_grad_() for x in tensors]
    moved = to_zigzag(axis, mine, block)
    starts = [p // 2 * block + p % 2 * piece_rows(0, block) for p in (rank, 2 * ranks - 1 - rank)]
    rows = [start + i for start, p in zip(starts, (rank, 2 * ranks - 1 - rank), strict=True)
            for i in range(piece_rows(p, block))]  # fmt: skip
    right = all(torch.equal(a, b[:, :, rows]) for a, b in zip(moved, tensors, strict=True))
    back = from_zigzag(axis, [x * x for x in moved], block)
    right = right and all(torch.equal(a, b * b) for a, b in zip(back, mine, strict=True))
    grads = torch.autograd.grad(sum(x.sum() for x in back), mine)
    return right and all(torch.equal(g, 2 * x) for g, x in zip(grads, mine, strict=True))


@pytest.mark.parametrize("world", [3, pytest.param(2, marks=slow), pytest.param(4, marks=slow)])
def test_rows_there_and_back(ranks: RankPool, world: int):
    for block in (1, 5, 6):
        assert all(ranks.run(exchange, block, world_size=world, timeout=60)), block


def test_causal_attention_alone_takes_it():
    assert ring.takes_zigzag(form(4, 4, 2))
    assert not ring.takes_zigzag(form(4, 4, 2, causal=False))
    assert ring.estimate(form(4, 4, 2)).share == 1 / 4 and "zigzag" in ring.build(form(4, 4, 2)).note


@pytest.mark.parametrize(
    ("mask", "world", "lengths"),
    [
        ("document", 3, (17,)),
        *(
            pytest.param(mask, world, (16, 17, 30), marks=slow)
            for mask in ("is_causal", "document", "padding", "learned_alibi")
            for world in (2, 3, 4)
        ),
    ],
)
def test_a_zigzag_ring_is_exact(ranks: RankPool, inner: str, mask: str, world: int, lengths: tuple[int, ...]):
    batches = [masked_toys.batch(n, packed=mask == "document") for n in lengths]
    build = functools.partial(masked_toys.build, mask)
    config = {"autosp": {"inner_backend": inner, "attention": "ring"}}
    for results in ranks.run(parity.run_model, build, batches, config=config, world_size=world, timeout=300):
        for result in results:
            result.check()
