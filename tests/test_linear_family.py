"""Log-probabilities, entropy, token statistics, KL and JSD from hidden states, on one rank."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from test_linear_oracle import dense_divergence, gradients, leaves, logits_of, reduced, relative_error

from autosp.custom_ops.linear_loss import (
    vocab_parallel_linear_entropy,
    vocab_parallel_linear_jsd,
    vocab_parallel_linear_kl_div,
    vocab_parallel_linear_logprobs,
    vocab_parallel_linear_token_stats,
)
from autosp.errors import InputError


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def same(got, expected, inputs, tolerance=1e-11):
    assert got.shape == expected.shape
    assert relative_error(got, expected) < tolerance
    upstream = torch.rand(got.shape, dtype=got.dtype) + 0.5
    pairs = zip(gradients(got, upstream, inputs), gradients(expected, upstream, inputs), strict=True)
    for g, e in pairs:
        assert relative_error(g, e) < tolerance


@pytest.mark.parametrize("memory", ["auto", "fast", "lean"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("top_k", [None, 1, 4])
def test_logprobs(memory, reduction, top_k):
    h, w, b = normal(2, 5, 6), normal(23, 6, seed=1), normal(23, seed=2)
    shape = (2, 5) if top_k is None else (2, 5, top_k)
    index = torch.randint(0, 23, shape, generator=torch.Generator().manual_seed(3))
    index.flatten()[1] = -100
    index[1, 4] = -100
    if top_k == 4:
        index[0, 2] = 7
    for cap, temperature, chunk in itertools.product((None, 3.0), (1.0, 0.6), (None, 2)):
        got = vocab_parallel_linear_logprobs(
            h, w, index, b, reduction=reduction, softcap=cap, temperature=temperature, chunk_size=chunk, memory=memory
        )
        logprob = logits_of(h, w, b, cap, temperature).log_softmax(-1)
        ids = index if top_k else index[..., None]
        picked = logprob.gather(-1, ids.clamp(min=0)).reshape(index.shape)
        same(got, reduced(picked, index != -100, reduction), (h, w, b))


@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_entropy(memory):
    h, w = normal(7, 6), normal(23, 6, seed=1)
    mask = torch.tensor([1, 1, 0, 1, 0, 1, 1], dtype=torch.bool)
    for reduction in ("none", "sum", "mean"):
        for m in (None, mask):
            logprob = logits_of(h, w, None, 4.0, 0.7).log_softmax(-1)
            entropy = -(logprob.exp() * logprob).sum(-1)
            got = vocab_parallel_linear_entropy(
                h, w, mask=m, reduction=reduction, softcap=4.0, temperature=0.7, memory=memory, chunk_size=2
            )
            same(got, reduced(entropy, torch.ones(7, dtype=torch.bool) if m is None else m, reduction), (h, w))


def test_token_stats_are_differentiable_together():
    h, w, b = normal(7, 6), normal(23, 6, seed=1), normal(23, seed=2)
    z = logits_of(h, w, b)
    index = z.argmax(-1)
    index[0] = (index[0] + 1) % 23
    index[3] = -100
    stats = vocab_parallel_linear_token_stats(h, w, index, b, chunk_size=3)
    valid = index != -100
    logprob = z.log_softmax(-1)
    expected = (
        logprob.gather(-1, index.clamp(min=0)[:, None])[:, 0],
        -(logprob.exp() * logprob).sum(-1),
        z.logsumexp(-1),
    )
    assert stats.is_argmax.tolist() == [False, True, True, False, True, True, True]
    weights = (0.3, -1.2, 0.5)
    got = sum(weight * x for weight, x in zip(weights, stats[:3], strict=True))
    reference = sum(weight * torch.where(valid, x, 0.0) for weight, x in zip(weights, expected, strict=True))
    same(got, reference, (h, w, b))


def kl(kind, beta=0.3):
    if kind == "jsd":
        return partial(vocab_parallel_linear_jsd, beta=beta)
    return partial(vocab_parallel_linear_kl_div, reverse=kind == "reverse")


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_divergences(kind, memory):
    sides = (normal(7, 6), normal(23, 6, seed=1), normal(23, seed=2), normal(7, 4, seed=3), normal(23, 4, seed=4))
    mask = torch.tensor([1, 1, 0, 1, 0, 1, 1], dtype=torch.bool)
    for reduction, m, cap, temperature in itertools.product(
        ("none", "sum", "mean"), (None, mask), (None, 3.0), (1.0, 2.0)
    ):
        sh, sw, sb, th, tw = sides
        got = kl(kind)(
            sh, sw, th, tw, sb, None, mask=m, reduction=reduction, softcap=cap, temperature=temperature, memory=memory,
            chunk_size=3,
        )  # fmt: skip
        student, teacher = logits_of(sh, sw, sb, cap, temperature), logits_of(th, tw, None, None, temperature)
        expected = dense_divergence(student, teacher, kind, 0.3)
        same(got, reduced(expected, torch.ones(7, dtype=torch.bool) if m is None else m, reduction), sides, 1e-9)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_equal_distributions_diverge_by_exactly_zero(kind, reduction):
    for dtype, scale in ((torch.float32, 1.0), (torch.bfloat16, 30.0)):
        h = (normal(5, 6, dtype=dtype) * scale).detach().requires_grad_()
        w = normal(23, 6, seed=1, dtype=dtype)
        value = kl(kind)(h, w, h.detach(), w.detach(), reduction=reduction)
        assert value.abs().max() == 0
        for g in gradients(value, torch.ones_like(value), (h, w)):
            assert g.abs().max() <= 1e-6


def test_beta_zero_and_one_are_the_two_kl():
    sides = (normal(7, 6), normal(23, 6, seed=1), normal(7, 4, seed=3), normal(23, 4, seed=4))
    for beta, reverse in ((0, False), (1, True)):
        a = vocab_parallel_linear_jsd(*sides, beta=beta)
        assert torch.equal(a, vocab_parallel_linear_kl_div(*sides, reverse=reverse))


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_rows_spanning_the_whole_range(kind):
    h = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    w = torch.tensor([[3e38, 1.0], [-3e38, -2.0], [0.0, 0.5]], requires_grad=True)
    value = kl(kind)(h, w, h.detach(), w.detach())
    assert value.tolist() == [0.0, 0.0]
    stats = vocab_parallel_linear_token_stats(h, w, torch.tensor([0, 0]))
    assert stats.entropy[0] == 0 and stats.logprobs[0] == 0
    (dh,) = torch.autograd.grad(stats.entropy[0], h)
    assert dh.abs().max() == 0


def test_a_column_masked_in_one_side_only():
    h, w = normal(4, 6, dtype=torch.float32), normal(9, 6, seed=1, dtype=torch.float32)
    masked = torch.zeros(9)
    masked[3] = float("-inf")
    student_masked = vocab_parallel_linear_kl_div(h, w, h.detach(), w.detach(), masked)
    assert torch.isinf(student_masked).all()
    teacher_masked = vocab_parallel_linear_kl_div(h, w, h.detach(), w.detach(), None, masked)
    z = F.linear(h, w).double()
    expected = dense_divergence(z, (z + masked).clamp(min=-1e30), "forward")
    torch.testing.assert_close(teacher_masked.double(), expected, rtol=1e-5, atol=1e-6)
    assert all(torch.isfinite(g).all() for g in gradients(teacher_masked, torch.ones(4), (h, w)))


def test_fp16_reverse_kl_far_from_the_teacher_is_finite():
    h = (normal(6, 8, dtype=torch.float16) * 8).detach().requires_grad_()
    w = normal(500, 8, seed=1, dtype=torch.float16)
    th, tw = normal(6, 8, seed=2, dtype=torch.float16) * 8, normal(500, 8, seed=3, dtype=torch.float16)
    for reduction in ("none", "sum"):
        value = vocab_parallel_linear_kl_div(h, w, th.detach(), tw.detach(), reverse=True, reduction=reduction)
        got = gradients(value, torch.full_like(value, 16.0), (h, w))
        exact = leaves(h, w, dtype=torch.float64)
        reference = dense_divergence(exact[0] @ exact[1].T, th.double() @ tw.double().T, "reverse")
        upstream = torch.full((6,), 16.0).double()
        for g, e in zip(got, gradients(reference, upstream, exact), strict=True):
            assert relative_error(g, e) < 5e-3


def test_what_divergences_refuse():
    sides = [normal(7, 6), normal(23, 6, seed=1), normal(7, 4, seed=3), normal(23, 4, seed=4)]
    with pytest.raises(InputError, match="beta is 1.5"):
        vocab_parallel_linear_jsd(*sides, beta=1.5)
    with pytest.raises(InputError, match="must agree on the tokens"):
        vocab_parallel_linear_kl_div(*sides[:2], sides[2][:6], sides[3])
    with pytest.raises(InputError, match="must agree on the tokens"):
        vocab_parallel_linear_kl_div(*sides[:3], sides[3][:20])
    with pytest.raises(InputError, match="student computes in"):
        vocab_parallel_linear_kl_div(*sides[:2], sides[2].float(), sides[3].float())
    with pytest.raises(InputError, match="mask is torch.int64"):
        vocab_parallel_linear_kl_div(*sides, mask=torch.ones(7, dtype=torch.int64))
    with pytest.raises(InputError, match="teacher_softcap is -1"):
        vocab_parallel_linear_kl_div(*sides, teacher_softcap=-1)
