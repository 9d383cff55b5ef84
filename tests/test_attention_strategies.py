"""Every way in which a group shares attention, under every kind of mask: exact against one process."""

from __future__ import annotations

import functools

import masked_toys
import parity
import pytest
from pool import RankPool

STRATEGIES = ["ulysses", "allgather_kv", "ring", "hybrid"]


def check(ranks: RankPool, mask: str, strategy: str, world: int, lengths=(16, 17), **settings: int) -> None:
    batches = [masked_toys.batch(n, packed=mask == "document") for n in lengths]
    build = functools.partial(masked_toys.build, mask, **settings)
    config = {"autosp": {"inner_backend": "aot_eager", "attention": strategy}}
    for results in ranks.run(parity.run_model, build, batches, config=config, world_size=world, timeout=240):
        for result in results:
            result.check()


@pytest.mark.parametrize("mask", ["is_causal", *masked_toys.MASKS])
def test_masks_under_ulysses(ranks: RankPool, mask: str):
    check(ranks, mask, "ulysses", 2, lengths=(17,))
