"""autosp's operators: schema, fake and autograd by ``opcheck``, values and gradients against dense tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import RankInfo, RankPool
from torch._subclasses.fake_tensor import FakeTensorMode

# dimension, length, size, start, outer, inner: whole, uneven, windowed, factored, shorter than the group.
CUTS = {
    "even": (1, 6, 6, 0, 1, 1),
    "uneven": (1, 7, 7, 0, 1, 1),
    "first": (0, 5, 5, 0, 1, 1),
    "window": (1, 7, 5, 1, 1, 1),
    "window_of_even": (1, 6, 5, 0, 1, 1),
    "factored": (1, 6, 6, 0, 2, 3),
    "factored_window": (1, 7, 4, 2, 2, 2),
    "short": (1, 2, 2, 0, 1, 1),
    "one": (1, 1, 1, 0, 1, 1),
}


def start() -> Any:
    import autosp
    from autosp import backend  # noqa: F401

    return autosp.initialize({"autosp": {"inner_backend": "eager"}})


def whole_tensor(cut: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    dim, _, size, _, outer, inner = cut
    shape = [2, 3, 4]
    shape[dim] = outer * size * inner
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rows_of(whole: torch.Tensor, cut: tuple[int, ...], rank: int, ranks: int, fill: float) -> torch.Tensor:
    """This rank's rows, one grid position at a time."""
    dim, length, size, start, outer, inner = cut
    block = -(-length // ranks)
    factored = whole.unflatten(dim, (outer, size, inner))
    pieces = []
    for position in range(rank * block, (rank + 1) * block):
        inside = start <= position < start + size
        piece = factored.select(dim + 1, position - start if inside else 0)
        pieces.append(piece if inside else torch.full_like(piece, fill))
    return torch.stack(pieces, dim + 1).flatten(dim, dim + 2)


def compare_cuts(rank_info: RankInfo) -> dict[str, float]:
    """Forward and backward of the operators on every cut; the largest error of each."""
    state = start()
    ops, group, rank, ranks = torch.ops.autosp, state.sp_group, state.sp_rank, state.sp_size
    errors: dict[str, float] = {}

    def note(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        assert got.shape == expected.shape, (name, got.shape, expected.shape)
        errors[name] = (got - expected).abs().max().item() if got.numel() else 0.0

    for name, cut in CUTS.items():
        whole = whole_tensor(cut).requires_grad_()
        local = ops.shard_sequence(whole, *cut, 5.0, group)
        note(f"{name}: shard", local.detach(), rows_of(whole.detach(), cut, rank, ranks, 5.0))
        # Each rank's rows get a gradient; all ranks get the gradient of the whole tensor.
        upstream = whole_tensor(cut, seed=1)
        local.backward(rows_of(upstream, cut, rank, ranks, 0.0))
        note(f"{name}: shard backward", whole.grad, upstream)

        mine = rows_of(whole.detach(), cut, rank, ranks, 9.0).requires_grad_()
        gathered = ops.all_gather_sequence(mine, *cut, False, group)
        note(f"{name}: gather", gathered.detach(), whole.detach())
        gathered.backward(upstream)
        note(f"{name}: gather backward", mine.grad, rows_of(upstream, cut, rank, ranks, 0.0))

        mine.grad = None
        ops.all_gather_sequence(mine, *cut, True, group).backward(upstream * (rank + 1))
        total = sum(range(1, ranks + 1))
        note(f"{name}: gather backward of parts", mine.grad, rows_of(upstream * total, cut, rank, ranks, 0.0))

        part = (whole.detach() * (rank + 1)).requires_grad_()
        scattered = ops.reduce_scatter_sequence(part, *cut, group)
        note(f"{name}: reduce_scatter", scattered.detach(), rows_of(whole.detach() * total, cut, rank, ranks, 0.0))
        scattered.backward(rows_of(upstream, cut, rank, ranks, 0.0))
        note(f"{name}: reduce_scatter backward", part.grad, upstream)
    return errors


@pytest.mark.parametrize("world", [2, 3])
def test_cuts_against_dense(ranks: RankPool, world: int):
    for errors in ranks.run(compare_cuts, world_size=world):
        assert len(errors) == 7 * len(CUTS)
        wrong = {name: error for name, error in errors.items() if not error <= 1e-12}
        assert not wrong


def compare_others(rank_info: RankInfo) -> None:
    state = start()
    ops, group, rank, ranks = torch.ops.autosp, state.sp_group, state.sp_rank, state.sp_size
    # Rank r sends r + 1 numbers to rank 0, r + 2 to rank 1, ...
    send = [rank + other + 1 for other in range(ranks)]
    receive = [other + rank + 1 for other in range(ranks)]
    x = torch.cat([torch.full((n,), 10.0 * rank + other) for other, n in enumerate(send)]).requires_grad_()
    y = ops.all_to_all(x, send, receive, group)
    expected = torch.cat([torch.full((n,), 10.0 * other + rank) for other, n in enumerate(receive)])
    assert torch.equal(y.detach(), expected)
    y.backward(torch.cat([torch.full((n,), 100.0 * rank + other) for other, n in enumerate(receive)]))
    assert torch.equal(x.grad, torch.cat([torch.full((n,), 100.0 * other + rank) for other, n in enumerate(send)]))

    x = torch.full((3,), rank + 1.0, requires_grad=True)
    y = ops.all_reduce_sum(x, group)
    total = ranks * (ranks + 1) / 2
    assert torch.equal(y.detach(), torch.full((3,), total))
    y.backward(torch.full((3,), 7.0))
    assert torch.equal(x.grad, torch.full((3,), 7.0)), "the gradient of a sum is whole on every rank already"

    grads = {"sum": total, "times_size": (rank + 1.0) * ranks, "over_size": (rank + 1.0) / ranks}
    for reduction, grad in grads.items():
        x = torch.ones(3, requires_grad=True)
        y = ops.enter_sharded(x, reduction, group)
        assert y.data_ptr() == x.data_ptr(), "no copy"
        y.backward(torch.full((3,), rank + 1.0))
        torch.testing.assert_close(x.grad, torch.full((3,), grad))


@pytest.mark.parametrize("world", [2, 3])
def test_exchanges_sums_and_edges(ranks: RankPool, world: int):
    ranks.run(compare_others, world_size=world)


def compare_losses(rank_info: RankInfo) -> None:
    state = start()
    group, rank, ranks = state.sp_group, state.sp_rank, state.sp_size
    aggregate = torch.ops.autosp.aggregate_loss
    counts = [float(3 * other + 1) for other in range(ranks)]
    sums = [float(2 * other + 5) for other in range(ranks)]
    mean = sum(sums) / sum(counts)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        mine = torch.tensor(sums[rank], requires_grad=True)
        loss = aggregate(mine, torch.tensor(counts[rank]), dtype, group)
        assert loss.dtype == dtype
        torch.testing.assert_close(loss.detach(), torch.tensor(mean).to(dtype))
        loss.backward(torch.tensor(3.0, dtype=dtype))
        torch.testing.assert_close(mine.grad, torch.tensor(3.0 / sum(counts)))
    mine = torch.tensor(sums[rank], requires_grad=True)
    loss = aggregate(mine, None, torch.float32, group)
    assert loss.item() == sum(sums)
    loss.backward(torch.tensor(2.0))
    assert mine.grad.item() == 2.0
    # No valid token anywhere: 0 / 0, as cross entropy gives.
    assert aggregate(torch.zeros(()), torch.zeros(()), torch.float32, group).isnan()
    # Sums that half precision cannot hold are divided before they are narrowed.
    loss = aggregate(torch.tensor(9.0e4), torch.tensor(2.0e4), torch.float16, group)
    assert loss.isfinite() and abs(loss.item() - 4.5) < 1e-2


@pytest.mark.parametrize("world", [2, 3])
def test_losses(ranks: RankPool, world: int):
    ranks.run(compare_losses, world_size=world)


def check_operators(rank_info: RankInfo) -> list[str]:
    """``opcheck`` of every operator; gradients with dynamic shapes among its tests."""
    state = start()
    ops, group = torch.ops.autosp, state.sp_group
    checked = []

    def check(op: Any, *args: Any) -> None:
        # torch's own wait_tensor returns its argument and does not say so: test_schema and test_faketensor, which look
        # at every operator on the way, fail on it, so the fake is compared with the real result here.
        tests = ["test_autograd_registration", "test_aot_dispatch_dynamic"]
        if op is ops.enter_sharded.default:
            tests += ["test_schema", "test_faketensor"]
        torch.library.opcheck(op, args, test_utils=tests)
        real = op(*args)
        with FakeTensorMode() as mode:
            fake = op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))
        for name in ("shape", "dtype", "device", "requires_grad"):
            assert getattr(real, name) == getattr(fake, name), (op, name)
        assert real.stride() == fake.stride(), op
        checked.append(str(op))

    for name in ("even", "uneven", "window", "factored"):
        cut = CUTS[name]
        whole = whole_tensor(cut)
        local = rows_of(whole, cut, state.sp_rank, state.sp_size, 0.0)
        check(ops.shard_sequence.default, whole.clone().requires_grad_(), *cut, 0.0, group)
        check(ops.all_gather_sequence.default, local.clone().requires_grad_(), *cut, False, group)
        check(ops.all_gather_sequence.default, local.clone().requires_grad_(), *cut, True, group)
        check(ops.reduce_scatter_sequence.default, whole.clone().requires_grad_(), *cut, group)
    size = 2 * state.sp_size
    check(ops.all_to_all.default, torch.ones(size, requires_grad=True), [2] * state.sp_size, [2] * state.sp_size, group)
    check(ops.all_reduce_sum.default, torch.ones(3, requires_grad=True), group)
    for reduction in ("sum", "times_size", "over_size"):
        check(ops.enter_sharded.default, torch.ones(3, requires_grad=True), reduction, group)
    check(ops.aggregate_loss.default, torch.tensor(3.0, requires_grad=True), torch.tensor(2.0), torch.float32, group)
    check(ops.aggregate_loss.default, torch.tensor(3.0, requires_grad=True), None, torch.float32, group)
    return checked


def test_opcheck(ranks: RankPool):
    for checked in ranks.run(check_operators, timeout=240):
        assert len(set(checked)) == 7, sorted(set(checked))
