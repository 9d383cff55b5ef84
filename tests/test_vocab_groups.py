"""Vocabulary-parallel losses over real gloo ranks: even, uneven, empty and padded shards, and the token axis."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import vocab_oracle as oracle
from pool import RankFailure

from autosp.custom_ops.vocab_parallel import (
    vocab_parallel_cross_entropy,
    vocab_parallel_entropy,
    vocab_parallel_jsd,
    vocab_parallel_kl_div,
    vocab_parallel_logprobs,
    vocab_parallel_token_stats,
    vocab_parallel_topk_kl_div,
)
from autosp.errors import InputError, RankMismatchError

ROWS = 3
# name -> (vocabulary, local shard lengths by rank; None: torch.chunk of the vocabulary), for 2 and 4 ranks
SHARDS = {
    "even": lambda ranks: [16] * ranks,
    "uneven": lambda ranks: [5 + 3 * rank for rank in range(ranks)],
    "empty": lambda ranks: [0] + [9] * (ranks - 1),
    "empty last": lambda ranks: [9] * (ranks - 1) + [0],
}


def whole_problem(vocab):
    generator = torch.Generator().manual_seed(11)
    x, y = (3 * torch.randn(ROWS, vocab, generator=generator) for _ in range(2))
    x[1] += 1000
    x[2, : vocab // 2] = -float("inf")
    y[2, : vocab // 2] = -float("inf")
    index = torch.tensor([0, -100, vocab - 1])
    top = torch.tensor([[0, vocab // 2, 0], [1, -100, vocab - 1], [vocab - 1, vocab - 2, vocab - 3]])
    ids = y.topk(3).indices
    teacher = oracle.log_probs(y).gather(-1, ids).float()
    return x, y, index, top, ids, teacher


def functions(index, top, ids, teacher, group, bounds, size):
    """``name: (vocabulary-parallel, reference, second tensor is used)``."""
    by_bounds = dict(zip(("vocab_start_index", "vocab_end_index"), bounds, strict=True)) if bounds else {}
    known = by_bounds or dict(global_vocab_size=size)
    return {
        "logprobs": (
            lambda x, y: vocab_parallel_logprobs(x, index, group, **known),
            lambda x, y: oracle.logprobs(x, index),
        ),
        "top-k": (
            lambda x, y: vocab_parallel_logprobs(x, top, group, **known).sum(-1),
            lambda x, y: oracle.logprobs(x, top).sum(-1),
        ),
        "entropy": (lambda x, y: vocab_parallel_entropy(x, group), lambda x, y: oracle.entropy(x)),
        "lse": (
            lambda x, y: vocab_parallel_token_stats(x, index, group, **known).lse,
            lambda x, y: oracle.lse(x),
        ),
        "KL": (lambda x, y: vocab_parallel_kl_div(x, y, False, group), lambda x, y: oracle.kl(y, x)),
        "reverse KL": (lambda x, y: vocab_parallel_kl_div(x, y, True, group), lambda x, y: oracle.kl(x, y)),
        "JSD": (lambda x, y: vocab_parallel_jsd(x, y, 0.3, group), lambda x, y: oracle.jsd(x, y, 0.3)),
        "top-k KL": (
            lambda x, y: vocab_parallel_topk_kl_div(x, teacher, ids, False, group, **known),
            lambda x, y: oracle.topk_kl(x, teacher, ids),
        ),
    }


def shards_body(info, lengths, pad, with_bounds, world_name):
    group = dist.group.WORLD if not world_name else dist.group.WORLD.group_name
    start, size = sum(lengths[: info.rank]), sum(lengths)
    end = start + lengths[info.rank]
    x, y, index, top, ids, teacher = whole_problem(size)
    bounds = (start, end) if with_bounds else None
    worst = []
    for name, (ours, reference) in functions(index, top, ids, teacher, group, bounds, size).items():
        if pad and name in ("entropy", "KL", "reverse KL", "JSD"):
            continue
        padded = [
            torch.cat([t[:, start:end], torch.full((ROWS, pad), float("nan"))], 1).requires_grad_() for t in (x, y)
        ]
        full = [t.double().requires_grad_() for t in (x, y)]
        got, want = ours(*padded), reference(*full)
        upstream = torch.tensor([0.5, -1.0, 2.0])
        got.backward(upstream)
        want.backward(upstream.double())
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
        for mine, other in zip(padded, full, strict=True):
            if other.grad is None:
                assert mine.grad is None
                continue
            near = dict(rtol=2e-4, atol=5e-6, msg=lambda m, n=name: f"gradient of {n}: {m}")
            torch.testing.assert_close(mine.grad[:, : end - start].double(), other.grad[:, start:end], **near)
            assert torch.equal(mine.grad[:, end - start :], torch.zeros(ROWS, pad))
        worst.append(got.detach())
    return worst


def same_bits(results):
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_shards_with_bounds(ranks, shards, world):
    same_bits(ranks.run(shards_body, SHARDS[shards](world), 0, True, False, world_size=world, timeout=90))


@pytest.mark.parametrize("size", [32, 33, 5, 9])
def test_shards_of_a_stated_vocabulary(ranks, size):
    chunk = -(-size // 4)
    lengths = [max(0, min(chunk, size - rank * chunk)) for rank in range(4)]
    same_bits(ranks.run(shards_body, lengths, 0, False, True, world_size=4, timeout=90))


def test_padded_shards(ranks):
    same_bits(ranks.run(shards_body, [12, 7], 4, True, True, world_size=2, timeout=90))


def wrong_bounds_body(info):
    group = dist.group.WORLD
    columns = (8, 6)[info.rank]  # uneven, and nobody said so
    x = torch.randn(2, columns, generator=torch.Generator().manual_seed(info.rank), requires_grad=True)
    index = torch.tensor([1, 9])
    unsaid = vocab_parallel_logprobs(x, index, group)
    unsaid.sum().backward()
    overlap = vocab_parallel_cross_entropy(x, index, group, None, *((0, 8) if info.rank == 0 else (7, 13)))
    gap = vocab_parallel_cross_entropy(x, index, group, None, *((0, 8) if info.rank == 0 else (9, 15)))
    good = vocab_parallel_cross_entropy(x, index, group, None, *((0, 8) if info.rank == 0 else (8, 14)))
    return unsaid, x.grad, overlap, gap, good


def test_shards_that_do_not_lie_end_to_end_are_nan(ranks):
    for unsaid, gradient, overlap, gap, good in ranks.run(wrong_bounds_body, timeout=60):
        assert unsaid.isnan().all() and gradient.isnan().all() and overlap.isnan() and gap.isnan()
        assert good.isfinite()


def too_small_body(info):
    vocab_parallel_logprobs(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long), dist.group.WORLD, global_vocab_size=10)


def test_a_vocabulary_that_does_not_fit_its_shards(ranks):
    with pytest.raises(RankFailure, match="gives rank 0 the ids 0..4, but its logits have 4 columns"):
        ranks.run(too_small_body, timeout=60)


def one_too_small_body(info):
    """Only rank 1 lacks columns: it raises, and rank 0 does not wait for it."""
    columns, ids = (5, 4)[info.rank], torch.zeros(2, dtype=torch.long)
    try:
        return vocab_parallel_logprobs(torch.zeros(2, columns), ids, dist.group.WORLD, global_vocab_size=10)
    except InputError as error:
        return str(error)


def test_one_shard_that_is_too_small_does_not_hang_the_others(ranks):
    values, message = ranks.run(one_too_small_body, timeout=60)
    assert values.isnan().all() and "gives rank 1 the ids 5..9, but its logits have 4 columns" in message


def strict_body(info):
    x, bad, good = torch.zeros(1, 4), torch.tensor([8]), torch.tensor([7])
    fine = vocab_parallel_cross_entropy(x, good, dist.group.WORLD, strict=True)
    try:
        vocab_parallel_cross_entropy(x, bad, dist.group.WORLD, strict=True)
    except ValueError as error:
        return fine, str(error)


def test_strict_mode_knows_the_whole_vocabulary(ranks):
    for fine, message in ranks.run(strict_body, timeout=60):
        assert fine.item() == pytest.approx(torch.log(torch.tensor(8.0)).item())
        assert "ids outside [0, 8)" in message


def strict_together_body(info):
    """What one rank refuses, every rank refuses: ids of its own tokens (sp), and ids that differ over tp."""
    world, other = dist.group.WORLD, info.rank == 1
    x, good = torch.zeros(2, 4), torch.tensor([1, 3])
    messages = []
    for call in (
        lambda: vocab_parallel_cross_entropy(x, torch.tensor([1, 4]) if other else good, None, world, strict=True),
        lambda: vocab_parallel_logprobs(x, good + other, world, strict=True),
        lambda: vocab_parallel_logprobs(x, good if other else good.flip(0), world, strict=True),
    ):
        try:
            call()
        except (InputError, RankMismatchError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_strict_mode_refuses_on_every_rank(ranks):
    first, second = ranks.run(strict_together_body, timeout=60)
    assert "InputError: target was refused on rank(s) [1] of sp_group" in first[0]
    assert "InputError: target holds ids outside [0, 4)" in second[0]
    for messages in (first, second):
        assert len(messages) == 3 and all("RankMismatchError: index differs" in text for text in messages[1:])


def tokens_body(info, smoothing):
    """Tokens over sp, vocabulary over tp: 2 x 2 ranks."""
    tokens, vocab = 6, 12
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, vocab, generator=generator)
    target = torch.tensor([3, -100, 11, 0, 5, -100])
    sp_rank, tp_rank = divmod(info.rank, 2)
    groups = {
        name: [dist.new_group(members) for members in lists]
        for name, lists in {"tp": ([0, 1], [2, 3]), "sp": ([0, 2], [1, 3])}.items()
    }
    tp, sp = groups["tp"][sp_rank], groups["sp"][tp_rank]
    rows, columns = slice(3 * sp_rank, 3 * sp_rank + 3), slice(6 * tp_rank, 6 * tp_rank + 6)
    for reduction in ("mean", "sum", "none"):
        options = dict(reduction=reduction, label_smoothing=smoothing, z_loss=0.01)
        local, full = x[rows, columns].clone().requires_grad_(), x.double().requires_grad_()
        got = vocab_parallel_cross_entropy(local, target[rows], tp, sp, **options)
        want = oracle.cross_entropy(full, target, **options)
        torch.testing.assert_close(got.double(), want[rows] if reduction == "none" else want, rtol=1e-5, atol=1e-6)
        (3.0 * got).sum().backward()
        (3.0 * want).sum().backward()
        torch.testing.assert_close(local.grad.double(), full.grad[rows, columns], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_tokens_and_vocabulary_sharded_together(ranks, smoothing):
    ranks.run(tokens_body, smoothing, world_size=4, timeout=90)


def train_body(info):
    """Three SGD steps of a sharded head, beside the dense one."""
    generator = torch.Generator().manual_seed(2)
    hidden, vocab = 8, 13
    weight, features = torch.randn(vocab, hidden, generator=generator), torch.randn(5, hidden, generator=generator)
    target = torch.tensor([0, 12, 6, -100, 7])
    lengths = [len(part) for part in torch.arange(vocab).tensor_split(info.world_size)]
    start = sum(lengths[: info.rank])
    bounds = dict(vocab_start_index=start, vocab_end_index=start + lengths[info.rank])
    dense = weight.double().requires_grad_()
    sharded = weight[start : start + lengths[info.rank]].clone().requires_grad_()
    group = dist.group.WORLD if info.world_size > 1 else None
    for _ in range(3):
        logits = features @ sharded.t()
        loss = vocab_parallel_cross_entropy(logits, target, group, **bounds) - 0.1 * (
            vocab_parallel_entropy(logits, group).mean()
        )
        logits = features.double() @ dense.t()
        reference = oracle.cross_entropy(logits, target) - 0.1 * oracle.entropy(logits).mean()
        for parameter, value in ((sharded, loss), (dense, reference)):
            gradient = torch.autograd.grad(value, parameter)[0]
            with torch.no_grad():
                parameter -= 0.5 * gradient
    torch.testing.assert_close(sharded.double(), dense[start : start + lengths[info.rank]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_training_a_sharded_head(ranks, world):
    ranks.run(train_body, world_size=world, timeout=90)


def compile_body(info):
    """One graph, with the group as an object and as a name, as in eager mode."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(info.rank), requires_grad=True)
    index = torch.tensor([1, 9, -100])
    group = dist.group.WORLD
    for given in (group, group.group_name):

        def loss(t, given=given):
            return (
                vocab_parallel_cross_entropy(t, index, given, given)
                + vocab_parallel_entropy(t, given).mean()
                + vocab_parallel_jsd(t, 2 * t.detach(), 0.5, given).mean()
            )

        eager, compiled = loss(x), torch.compile(loss, fullgraph=True, backend="aot_eager")(x)
        torch.testing.assert_close(compiled, eager)
        torch.testing.assert_close(torch.autograd.grad(compiled, x), torch.autograd.grad(eager, x))


def test_one_graph_with_a_group(ranks):
    ranks.run(compile_body, timeout=120)


def kernels_body(info):
    from autosp.custom_ops.dispatch import triton_usable

    assert triton_usable(torch.zeros(1))
    return shards_body(info, [11, 0, 6], 0, True, False)


@pytest.mark.processes
def test_shards_on_the_kernels(monkeypatch):
    pytest.importorskip("triton")
    from pool import RankPool

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with RankPool() as pool:
        same_bits(pool.run(kernels_body, world_size=3, timeout=150))
