"""The fused losses over real groups: the vocabulary, the sequence, or both shared; even, uneven and empty shards."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_linear_oracle import dense_divergence, dense_loss, leaves, relative_error

from autosp.custom_ops.linear_loss import (
    groups,
    plan,
    vocab_parallel_linear_cross_entropy,
    vocab_parallel_linear_entropy,
    vocab_parallel_linear_jsd,
    vocab_parallel_linear_kl_div,
    vocab_parallel_linear_logprobs,
    vocab_parallel_linear_token_stats,
)
from autosp.errors import RankMismatchError

SHARDS = {2: [(12, 11), (23, 0), (3, 20)], 4: [(6, 6, 6, 5), (0, 11, 0, 12)]}


def inputs(seed=0, n=9, hidden=6, vocab=23, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    h, w, b = (torch.randn(*s, generator=g).to(dtype) for s in ((n, hidden), (vocab, hidden), (vocab,)))
    target = torch.randint(0, vocab, (n,), generator=g)
    target[2] = -100
    return h, w, b, target


def span(sizes, rank):
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


def check(name, got, expected, tolerance):
    error = relative_error(got, expected)
    if not error <= tolerance:
        raise AssertionError(f"{name}: relative error {error} above {tolerance}")


def compare(value, expected, local, dense, part, tolerance):
    """Value and gradients of (hidden, weight, bias) of this rank against the dense ones; ``part`` of the vocabulary."""
    check("value", value, expected, tolerance)
    g = torch.rand(value.shape, generator=torch.Generator().manual_seed(5), dtype=value.dtype) + 0.5
    ours = torch.autograd.grad(value, [x for x in local if x is not None], g)
    theirs = torch.autograd.grad(expected, [x for x in dense if x is not None], g.to(expected.dtype))
    check("hidden", ours[0], theirs[0], tolerance)
    for name, o, t in zip(("weight", "bias"), ours[1:], theirs[1:], strict=False):
        if o.numel():
            check(name, o, t[part], tolerance * 4)


def forced(way):
    """The way that a mean or sum is computed, whatever the sizes. A rank's process outlives its test."""
    return mock.patch.object(plan, "choose_way", lambda *_: way)


def cross_entropy_body(info, sizes, way):
    with forced(way):
        return compare_cross_entropy(info, sizes)


def compare_cross_entropy(info, sizes):
    tp = dist.group.WORLD
    part = span(sizes, info.rank)
    h, w, b, target = inputs()
    for reduction in ("mean", "sum", "none"):
        for smoothing, z_loss, cap, temperature, chunk in (
            (0.0, 0.0, None, 1.0, None),
            (0.1, 0.01, 5.0, torch.rand(9, generator=torch.Generator().manual_seed(1)).double() + 0.5, 4),
        ):
            local, dense = leaves(h, w[part], b[part]), leaves(h, w, b)
            bounds = {} if chunk else {"vocab_start_index": part.start, "vocab_end_index": part.stop}
            value = vocab_parallel_linear_cross_entropy(
                local[0], local[1], target, local[2], tp_group=tp, reduction=reduction, label_smoothing=smoothing,
                z_loss=z_loss, softcap=cap, temperature=temperature, chunk_size=chunk, debug=True, **bounds,
            )  # fmt: skip
            expected = dense_loss(dense[0], dense[1], target, dense[2], reduction, smoothing, z_loss, cap, temperature)
            compare(value, expected, local, dense, part, 1e-11)
    # A target in nobody's shard is NaN on every rank, never a plausible number.
    outside = target.clone()
    outside[0] = 23
    return bool(torch.isnan(vocab_parallel_linear_cross_entropy(h, w[part], outside, tp_group=tp)))


@pytest.mark.parametrize("way", ["form", "lean", "keep"])
def test_cross_entropy_over_two_ranks(ranks, way):
    for sizes in SHARDS[2]:
        assert all(ranks.run(cross_entropy_body, sizes, way, world_size=2, timeout=120))


@pytest.mark.parametrize("way", ["form", "lean"])
def test_cross_entropy_over_four_ranks(ranks, way):
    for sizes in SHARDS[4]:
        assert all(ranks.run(cross_entropy_body, sizes, way, world_size=4, timeout=120))


def family_body(info, sizes):
    tp = dist.group.WORLD
    part = span(sizes, info.rank)
    h, w, b, target = inputs()
    th, tw, _, _ = inputs(seed=7)

    local, dense = leaves(h, w[part], b[part]), leaves(h, w, b)
    index = torch.stack([target, target.flip(0)], 1)
    got = vocab_parallel_linear_logprobs(local[0], local[1], index, local[2], tp_group=tp, chunk_size=4)
    logprob = (dense[0] @ dense[1].T + dense[2]).log_softmax(-1)
    expected = torch.where(index == -100, 0.0, logprob.gather(-1, index.clamp(min=0)))
    compare(got, expected, local, dense, part, 1e-11)

    local, dense = leaves(h, w[part], b[part]), leaves(h, w, b)
    got = vocab_parallel_linear_entropy(local[0], local[1], local[2], tp_group=tp)
    logprob = (dense[0] @ dense[1].T + dense[2]).log_softmax(-1)
    compare(got, -(logprob.exp() * logprob).sum(-1), local, dense, part, 1e-11)

    z = h @ w.T + b
    stats = vocab_parallel_linear_token_stats(h, w[part], z.argmax(-1), b[part], tp_group=tp)
    assert stats.is_argmax.all()
    check("lse", stats.logsumexp, z.logsumexp(-1), 1e-12)

    for kind in ("forward", "reverse", "jsd"):
        for reduction in ("none", "sum"):
            local, dense = leaves(h, w[part], th, tw[part]), leaves(h, w, th, tw)
            settings = {"tp_group": tp, "reduction": reduction, "chunk_size": 4}
            if kind == "jsd":
                got = vocab_parallel_linear_jsd(*local, beta=0.3, **settings)
            else:
                got = vocab_parallel_linear_kl_div(*local, reverse=kind == "reverse", **settings)
            expected = dense_divergence(dense[0] @ dense[1].T, dense[2] @ dense[3].T, kind, 0.3)
            expected = expected if reduction == "none" else expected.sum()
            check(kind, got, expected, 1e-9)
            g = torch.full_like(got, 1.5)
            ours, theirs = torch.autograd.grad(got, local, g), torch.autograd.grad(expected, dense, g)
            for i in (0, 2):
                check(f"{kind} hidden", ours[i], theirs[i], 1e-9)
                if ours[i + 1].numel():
                    check(f"{kind} weight", ours[i + 1], theirs[i + 1][part], 1e-8)


@pytest.mark.parametrize("sizes", SHARDS[2])
def test_the_rest_of_the_family(ranks, sizes):
    ranks.run(family_body, sizes, world_size=2, timeout=120)


def sequence_body(info, lengths, tp_size):
    """``sp`` shares the tokens in uneven parts (one may be empty), ``tp`` the vocabulary."""
    world = info.world_size
    sp_size = world // tp_size
    grid = torch.arange(world).view(sp_size, tp_size)
    sp_groups = [dist.new_group(grid[:, i].tolist()) for i in range(tp_size)]
    tp_groups = [dist.new_group(grid[i].tolist()) for i in range(sp_size)]
    row, column = divmod(info.rank, tp_size)
    sp, tp = sp_groups[column], tp_groups[row] if tp_size > 1 else None
    h, w, b, target = inputs()
    vocab = span((10, 13), column) if tp_size > 1 else slice(0, 23)
    tokens = span(lengths, row)
    for way in ("form", "lean"):
        for reduction in ("mean", "sum"):
            for name in (False, True):
                local, dense = leaves(h[tokens], w[vocab], b[vocab]), leaves(h, w, b)
                group = sp.group_name if name else sp
                with forced(way):
                    value = vocab_parallel_linear_cross_entropy(
                        local[0], local[1], target[tokens], local[2], tp_group=tp, sp_group=group, reduction=reduction
                    )
                expected = dense_loss(dense[0], dense[1], target, dense[2], reduction)
                check("value", value, expected, 1e-11)
                (3 * value).backward()
                (3 * expected).backward()
                if tokens.stop > tokens.start:
                    check("hidden", local[0].grad, dense[0].grad[tokens], 1e-11)
                dw = local[1].grad.clone()
                dist.all_reduce(dw, group=sp)
                check("weight", dw, dense[1].grad[vocab], 1e-11)
    # The mean's count is exact and nothing of "none" is summed over the sequence.
    losses = vocab_parallel_linear_cross_entropy(
        h[tokens], w[vocab], target[tokens], b[vocab], tp_group=tp, sp_group=sp, reduction="none"
    )
    assert losses.shape == (tokens.stop - tokens.start,)
    if losses.numel():
        check("none", losses, dense_loss(h, w, target, b, "none")[tokens], 1e-11)


def test_sequence_group(ranks):
    ranks.run(sequence_body, (5, 4), 1, world_size=2, timeout=120)
    ranks.run(sequence_body, (9, 0), 1, world_size=2, timeout=120)


def test_sequence_and_vocabulary_groups(ranks):
    ranks.run(sequence_body, (2, 7), 2, world_size=4, timeout=120)


def promise_body(info):
    h, w, b, target = inputs(dtype=torch.float32)
    tp, part = dist.group.WORLD, span((12, 11), info.rank)
    local, dense = leaves(h, w[part], b[part]), leaves(h, w, b)
    main_grad = torch.ones(w[part].shape)
    value = vocab_parallel_linear_cross_entropy(
        local[0], local[1], target, local[2], tp_group=tp, main_grad=main_grad, main_grad_upstream=0.5, chunk_size=4
    )
    (0.5 * value).backward()
    (0.5 * dense_loss(dense[0], dense[1], target, dense[2])).backward()
    check("main_grad", main_grad, 1 + dense[1].grad[part], 1e-5)
    check("hidden", local[0].grad, dense[0].grad, 1e-5)


def test_main_grad_in_the_forward_over_a_group(ranks):
    ranks.run(promise_body, world_size=2, timeout=120)


def half_body(info, way):
    """Two classes on two ranks, weights of 8 and a loss scale of 65536: each rank's part alone leaves fp16."""
    h = torch.ones(4, 2, dtype=torch.float16)
    w = torch.tensor([[8.0, 8.0], [8.0, 8.0]], dtype=torch.float16)
    target = torch.tensor([0, 1, 0, 1])
    local, dense = leaves(h, w[info.rank : info.rank + 1]), leaves(h, w, dtype=torch.float64)
    with forced(way):
        loss = vocab_parallel_linear_cross_entropy(*local, target, tp_group=dist.group.WORLD)
    (loss * 65536).backward()
    (dense_loss(*dense, target) * 65536).backward()
    # Partial sums are +-65536, beyond fp16, and cancel.
    assert torch.equal(local[0].grad.double(), dense[0].grad)
    assert torch.equal(local[1].grad.double(), dense[1].grad[info.rank : info.rank + 1])


@pytest.mark.parametrize("way", ["form", "lean", "keep"])
def test_fp16_partials_that_overflow_and_cancel(ranks, way):
    ranks.run(half_body, way, world_size=2, timeout=120)


def mismatch_body(info, what):
    h, w, _, target = inputs()
    part = span((12, 11), info.rank)
    settings = {"tp_group": dist.group.WORLD}
    if what == "hidden":
        h = h + info.rank
        settings["debug"] = True
    elif what == "target":
        target = (target + info.rank * (target >= 0)) % 23
        settings["debug"] = True
    elif what == "count":
        target[5 + info.rank :] = -100
    elif what == "chunk":
        settings["chunk_size"] = 2 + info.rank
    else:
        start = {"overlap": (0, 11), "gap": (0, 13)}[what][info.rank]
        settings |= {"vocab_start_index": start, "vocab_end_index": start + part.stop - part.start}
    try:
        vocab_parallel_linear_cross_entropy(h, w[part], target, **settings)
    except RankMismatchError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    "what, message",
    [
        ("hidden", "hidden differs between the ranks"),
        ("target", "target differs between the ranks"),
        ("count", "disagree on tokens that count"),
        ("chunk", "disagree on chunk_size"),
        ("overlap", "bounds overlap"),
        ("gap", "bounds leave a gap"),
    ],
)
def test_ranks_that_disagree_all_raise(ranks, what, message):
    for text in ranks.run(mismatch_body, what, world_size=2, timeout=60):
        assert message in text


def train_body(info, steps):
    """A head trained by SGD over the group stays equal to the dense one."""
    h, w, b, target = inputs()
    sizes = [8] * info.world_size
    sizes[-1] = 23 - 8 * (info.world_size - 1)
    part = span(sizes, info.rank)
    local, dense = leaves(w[part], b[part]), leaves(w, b)
    for _ in range(steps):
        value = vocab_parallel_linear_cross_entropy(h, local[0], target, local[1], tp_group=dist.group.WORLD)
        value.backward()
        dense_loss(h, dense[0], target, dense[1]).backward()
        with torch.no_grad():
            for x in (*local, *dense):
                x -= 0.5 * x.grad
                x.grad = None
    check("weight", local[0].detach(), dense[0].detach()[part], 1e-11)


def test_three_steps_of_sgd_stay_equal(ranks):
    ranks.run(train_body, 3, world_size=2, timeout=120)


def counting_body(info, way):
    """How often each collective is issued, by operation."""
    issued = []
    original = groups.start_all_reduce
    groups.start_all_reduce = lambda tensor, op, name: issued.append(op) or original(tensor, op, name)
    try:
        h, w, b, target = inputs()
        part = span((23, 0), info.rank)
        local = leaves(h, w[part], b[part])
        with forced(way):
            loss = vocab_parallel_linear_cross_entropy(
                local[0], local[1], target, local[2], tp_group=dist.group.WORLD, chunk_size=4, label_smoothing=0.1
            )
        loss.backward()
    finally:
        groups.start_all_reduce = original
    return issued


@pytest.mark.parametrize("way, chunks", [("form", 2), ("lean", 1)])
def test_one_max_and_one_sum_a_chunk_and_the_hidden_gradient(ranks, way, chunks):
    # 8 of 9 tokens count: two chunks of 4. The lean way needs no more than one pair for all tokens. The hidden gradient
    # is one more sum a chunk; a rank with an empty shard issues the same.
    for issued in ranks.run(counting_body, way, world_size=2, timeout=60):
        assert issued == ["max", "sum", "sum"] * chunks
