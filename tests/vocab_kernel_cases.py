"""Cases that only make sense on the Triton kernels; run by test_vocab_kernels.py in the interpreter."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
import vocab_oracle as oracle

from autosp.custom_ops.dispatch import triton_interpreted, triton_usable
from autosp.custom_ops.vocab_parallel import (
    vocab_parallel_cross_entropy,
    vocab_parallel_entropy,
    vocab_parallel_jsd,
    vocab_parallel_kl_div,
    vocab_parallel_logprobs,
    vocab_parallel_token_stats,
)
from autosp.custom_ops.vocab_parallel.kernels import common, jsd, kl, row_stats


def test_the_kernels_are_what_runs(monkeypatch):
    assert triton_interpreted() and triton_usable(torch.zeros(1))
    calls = []
    for module, names in (
        (row_stats, ("whole_row_stats", "row_stats_backward")),
        (kl, ("whole_kl_stats", "kl_backward")),
        (jsd, ("local_jsd_sums", "jsd_backward")),
    ):
        for name in names:
            real = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *a, real=real, name=name: calls.append(name) or real(*a))
    x = torch.randn(2, 12, requires_grad=True)
    (vocab_parallel_entropy(x) + vocab_parallel_kl_div(x, x * 2) + vocab_parallel_jsd(x, x * 2)).sum().backward()
    assert set(calls) == {
        "whole_row_stats",
        "row_stats_backward",
        "whole_kl_stats",
        "kl_backward",
        "local_jsd_sums",
        "jsd_backward",
    }
    calls.clear()
    monkeypatch.setenv("AUTOSP_TRITON", "0")
    plain = vocab_parallel_entropy(x)
    assert not calls
    monkeypatch.delenv("AUTOSP_TRITON")
    torch.testing.assert_close(plain, vocab_parallel_entropy(x))


def everything(x, y, index):
    """All values and gradients of a batch, one row each."""
    leaf = x.clone().requires_grad_()
    stats = vocab_parallel_token_stats(leaf, index)
    outputs = [stats.logprob, stats.entropy, stats.lse, vocab_parallel_kl_div(leaf, y), vocab_parallel_jsd(leaf, y)]
    gradients = [torch.autograd.grad(output.sum(), leaf, retain_graph=True)[0] for output in outputs]
    return [output.detach() for output in outputs] + gradients


@pytest.mark.parametrize("vocab, dtype", [(96, torch.float32), (57, torch.bfloat16)])
def test_batch_invariance(vocab, dtype):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4, vocab, generator=generator).to(dtype) for _ in range(2))
    index = torch.randint(0, vocab, (4,), generator=generator)
    batch = everything(x, y, index)
    reversed_batch = everything(x.flip(0), y.flip(0), index.flip(0))
    for row in (0, 3):
        alone = everything(x[row : row + 1], y[row : row + 1], index[row : row + 1])
        for whole, turned, single in zip(batch, reversed_batch, alone, strict=True):
            assert torch.equal(whole[row], single[0]) and torch.equal(whole[row], turned[3 - row])


@triton.jit
def _offset_kernel(row_ptr, out_ptr, inner, outer_stride, inner_stride):
    tl.store(out_ptr, common.row_offset(tl.load(row_ptr), inner, outer_stride, inner_stride))


@pytest.mark.parametrize(
    "row, inner, outer_stride, inner_stride",
    [(16399, 16400, 0, 131072), (70001, 4096, 4097 * 151936, 151936), (3, 1, 0, 0)],
)
def test_addresses_are_64_bits(row, inner, outer_stride, inner_stride):
    out = torch.zeros(1, dtype=torch.int64)
    _offset_kernel[(1,)](torch.tensor([row], dtype=torch.int32), out, inner, outer_stride, inner_stride)
    assert out.item() == (row // inner) * outer_stride + (row % inner) * inner_stride


@pytest.mark.parametrize("ids", [1, 5])
def test_many_tiles(ids, monkeypatch):
    """Blocks small enough that a row takes several, its last one in part."""
    for table, entry in (
        (row_stats.FORWARD, dict(DEPTH=2, LANES=8, STAGES=1, EVICT="", num_warps=4)),
        (row_stats.BACKWARD, dict(BLOCK=16, STEPS=2, EVICT="", num_warps=4)),
        (kl.FORWARD, dict(DEPTH=2, LANES=8, STAGES=1, EVICT="", num_warps=4)),
        (kl.BACKWARD, dict(BLOCK=16, EVICT="", num_warps=4)),
        (jsd.FORWARD, dict(BLOCK=16, STAGES=1, EVICT="", num_warps=4)),
        (jsd.BACKWARD, dict(BLOCK=16, EVICT="", num_warps=4)),
    ):
        monkeypatch.setitem(table, 4, entry)
    generator = torch.Generator().manual_seed(3)
    x, y = (4 * torch.randn(3, 75, generator=generator) for _ in range(2))
    x[1].sort()
    index = torch.randint(0, 75, (3, ids), generator=generator)
    target = index[:, 0]
    for function, reference in (
        (lambda a: vocab_parallel_logprobs(a, index), lambda a: oracle.logprobs(a, index)),
        (
            lambda a: vocab_parallel_cross_entropy(a, target, label_smoothing=0.1),
            lambda a: oracle.cross_entropy(a, target, label_smoothing=0.1),
        ),
        (vocab_parallel_entropy, oracle.entropy),
        (lambda a: vocab_parallel_kl_div(a, y), lambda a: oracle.kl(y, a)),
        (lambda a: vocab_parallel_kl_div(a, y, True), lambda a: oracle.kl(a, y)),
        (lambda a: vocab_parallel_jsd(a, y), lambda a: oracle.jsd(a, y, 0.5)),
    ):
        ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
        got, want = function(ours), reference(theirs)
        torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6)
        got.sum().backward()
        want.sum().backward()
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=2e-6)


def test_wide_sweep_of_vocabularies():
    for vocab in (1, 16, 17, 4097):
        x = torch.randn(2, vocab, dtype=torch.float32)
        index = torch.tensor([0, vocab - 1])
        torch.testing.assert_close(
            vocab_parallel_logprobs(x, index).double(), oracle.logprobs(x, index), rtol=1e-5, atol=2e-6
        )
        torch.testing.assert_close(vocab_parallel_entropy(x).double(), oracle.entropy(x), rtol=1e-5, atol=2e-6)
