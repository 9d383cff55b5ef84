"""Ranks of a vocabulary choose alike whatever their shards; told different things, they give no number."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_linear_groups import compare, forced, inputs, span
from test_linear_oracle import dense_loss, leaves

from autosp.custom_ops.linear_loss import plan, vocab_parallel_linear_cross_entropy, vocab_parallel_linear_kl_div
from autosp.errors import InputError, RankMismatchError


def unforced_body(info, sizes, chunk_bytes):
    """Ways and chunks as each rank chooses them, at sizes where those of its own shard would have it choose apart."""
    part = span(sizes, info.rank)
    h, w, _, target = inputs(n=150, hidden=16)
    with mock.patch.multiple(plan, GIB=0, CHUNK_BYTES=chunk_bytes):
        for reduction in ("mean", "sum"):
            local, dense = leaves(h, w[part]), leaves(h, w)
            value = vocab_parallel_linear_cross_entropy(
                *local, target, tp_group=dist.group.WORLD, reduction=reduction, memory="fast"
            )
            compare(value, dense_loss(*dense, target, None, reduction), local, dense, part, 1e-11)


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 1 << 12], ids=["one chunk", "several chunks"])
def test_ranks_of_very_different_shards_choose_alike(ranks, chunk_bytes):
    ranks.run(unforced_body, (23, 0), chunk_bytes, world_size=2, timeout=60)
    ranks.run(unforced_body, (3, 20), chunk_bytes, world_size=2, timeout=60)


def distributed_body(info, name):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    h, w, b, target = inputs()
    given = {"hidden": h, "weight": w, "bias": b}
    given[name] = distribute_tensor(given[name], init_device_mesh("cpu", (info.world_size,)), [Shard(0)])
    try:
        vocab_parallel_linear_cross_entropy(given["hidden"], given["weight"], target, given["bias"])
    except InputError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
def test_a_sharded_parameter_is_refused(ranks, name):
    for text in ranks.run(distributed_body, name, world_size=2, timeout=60):
        assert text.startswith(f"{name} is a DTensor (Shard(dim=0),); pass the part of this rank (.to_local()")


def apart_body(info, what):
    h, w, _, target = inputs(n=150)
    h, w = h.requires_grad_(what != "hidden" or info.rank == 0), w[span((12, 11), info.rank)].requires_grad_()
    settings = {"tp_group": dist.group.WORLD, "memory": ("fast", "lean")[info.rank] if what == "memory" else "fast"}
    try:
        if what == "pair":
            settings |= {"reduction": "sum", "memory": ("fast", "lean")[info.rank]}
            vocab_parallel_linear_kl_div(h, w, h.detach(), w.detach(), **settings)
        else:
            settings["reduction"] = ("mean", "none")[info.rank] if what == "reduction" else "mean"
            vocab_parallel_linear_cross_entropy(h, w, target, **settings)
    except RankMismatchError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("what", ["memory", "reduction", "hidden", "pair"])
def test_ranks_that_would_issue_other_collectives_all_raise(ranks, what):
    for text in ranks.run(apart_body, what, world_size=2, timeout=60):
        assert "disagree on when the gradient is formed" in text and 'pass memory="fast" or "lean"' in text


def other_targets_body(info, way):
    """Without ``debug``: token 0 is claimed by both ranks, token 1 by none, the others by the same one."""
    h, w, _, _ = inputs(n=4)
    target = torch.tensor([(0, 22), (22, 0), (1, 1), (22, 22)])[:, info.rank]
    local = leaves(h, w[span((12, 11), info.rank)])
    with forced(way):
        loss = vocab_parallel_linear_cross_entropy(*local, target, tp_group=dist.group.WORLD, reduction="sum")
    losses = vocab_parallel_linear_cross_entropy(*local, target, tp_group=dist.group.WORLD, reduction="none")
    (dh,) = torch.autograd.grad(loss, local[:1])
    return bool(torch.isnan(loss)), torch.isnan(losses).tolist(), torch.isnan(dh).all(1).tolist()


@pytest.mark.parametrize("way", ["form", "lean"])
def test_targets_that_two_ranks_claim_are_nan(ranks, way):
    nan = [True, True, False, False]
    assert ranks.run(other_targets_body, way, world_size=2, timeout=60) == [(True, nan, nan)] * 2
