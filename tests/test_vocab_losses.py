"""Vocabulary-parallel losses of whole logits against fp64 definitions.

Runs on the plain path here, and once more on the Triton kernels in the interpreter from test_vocab_kernels.py.
"""

from __future__ import annotations

import pytest
import torch
import vocab_oracle as oracle

from autosp.custom_ops.dispatch import triton_interpreted
from autosp.custom_ops.vocab_parallel import (
    vocab_parallel_cross_entropy,
    vocab_parallel_entropy,
    vocab_parallel_jsd,
    vocab_parallel_kl_div,
    vocab_parallel_logprobs,
    vocab_parallel_token_stats,
    vocab_parallel_topk_kl_div,
)

INF = float("inf")
# (absolute error of a result over 1 + its largest value, error of a gradient over its largest value). Gradients are
# rounded once, to nearest; Triton's interpreter cuts bfloat16 off instead, which doubles the error.
BF16 = 8e-3 if triton_interpreted() else 4e-3
TOLERANCE = {torch.float32: (2e-6, 5e-5), torch.bfloat16: (2e-6, BF16), torch.float16: (2e-6, 2e-3)}


def draw(rows, vocab, dtype=torch.float32, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*rows, vocab, generator=generator) * scale).to(dtype)


def draw_ids(rows, vocab, seed=1):
    return torch.randint(0, vocab, rows, generator=torch.Generator().manual_seed(seed))


def check(function, reference, *inputs, dtype=torch.float32):
    """Values and every gradient, with random upstream gradients; gradients contiguous and in the input's dtype."""
    ours = [x.detach().clone().requires_grad_() for x in inputs]
    theirs = [x.detach().double().requires_grad_() for x in inputs]
    got, want = function(*ours), reference(*theirs)
    assert got.shape == want.shape and got.dtype == torch.float32
    near, near_gradient = TOLERANCE[dtype]
    assert (got.double() - want).abs().max() <= near * (1 + want.abs().max()) if got.numel() else True
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(7))
    gradients = torch.autograd.grad(got, ours, upstream)
    expected = torch.autograd.grad(want, theirs, upstream.double())
    for mine, other, source in zip(gradients, expected, inputs, strict=True):
        assert mine.dtype == source.dtype and mine.shape == source.shape and mine.is_contiguous()
        assert (mine.double() - other).abs().max() <= near_gradient * other.abs().max() if mine.numel() else True


def losses(target, top, ids, teacher_logprobs, **scaling):
    """``name: (ours, reference, number of logits)`` of every function."""

    def stats(x):
        got = vocab_parallel_token_stats(x, target, **scaling)
        return torch.stack([got.logprob, got.entropy, got.lse])

    def stats_reference(x):
        parts = oracle.logprobs(x, target, **scaling), oracle.entropy(x, **scaling), oracle.lse(x, **scaling)
        return torch.stack(parts)

    options = dict(label_smoothing=0.1, z_loss=1e-3, **scaling)
    return {
        "logprobs": (
            lambda x: vocab_parallel_logprobs(x, target, **scaling),
            lambda x: oracle.logprobs(x, target, **scaling),
            1,
        ),
        "top-k logprobs": (
            lambda x: vocab_parallel_logprobs(x, top, **scaling),
            lambda x: oracle.logprobs(x, top, **scaling),
            1,
        ),
        "entropy": (lambda x: vocab_parallel_entropy(x, **scaling), lambda x: oracle.entropy(x, **scaling), 1),
        "token stats": (stats, stats_reference, 1),
        "cross entropy": (
            lambda x: vocab_parallel_cross_entropy(x, target, reduction="none", **options),
            lambda x: oracle.cross_entropy(x, target, reduction="none", **options),
            1,
        ),
        "top-k KL": (
            lambda x: vocab_parallel_topk_kl_div(x, teacher_logprobs, ids, **scaling),
            lambda x: oracle.topk_kl(x, teacher_logprobs, ids, **scaling),
            1,
        ),
        "reverse top-k KL": (
            lambda x: vocab_parallel_topk_kl_div(x, teacher_logprobs, ids, True, **scaling),
            lambda x: oracle.topk_kl(x, teacher_logprobs, ids, True, **scaling),
            1,
        ),
        "forward KL": (
            lambda x, y: vocab_parallel_kl_div(x, y, **scaling),
            lambda x, y: oracle.kl(y, x, **scaling),
            2,
        ),
        "reverse KL": (
            lambda x, y: vocab_parallel_kl_div(x, y, True, **scaling),
            lambda x, y: oracle.kl(x, y, **scaling),
            2,
        ),
        "JSD": (
            lambda x, y: vocab_parallel_jsd(x, y, 0.3, **scaling),
            lambda x, y: oracle.jsd(x, y, 0.3, **scaling),
            2,
        ),
    }


NAMES = tuple(losses(None, None, None, None))


def case(name, rows, vocab, dtype, **scaling):
    x, y = draw(rows, vocab, dtype, 2), draw(rows, vocab, dtype, 3)
    target, top = draw_ids(rows, vocab), draw_ids((*rows, 3), vocab, 4)
    if target.numel() > 1:
        target.view(-1)[1], top.view(-1)[2] = -100, -100
        top.view(-1)[1] = top.view(-1)[0]  # an id twice in a row
    k = min(3, vocab)
    ids = y.topk(k).indices
    teacher = oracle.log_probs(y, **scaling).gather(-1, ids).float()
    ours, reference, number = losses(target, top, ids, teacher, **scaling)[name]
    check(ours, reference, *(x, y)[:number], dtype=dtype)


@pytest.mark.parametrize("name", NAMES)
def test_against_the_definition(name):
    case(name, (3,), 1000, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_narrow_dtypes(name, dtype):
    if name == "reverse top-k KL" and dtype == torch.float16:
        pytest.skip("its gradients lie below the smallest normal float16 here")
    case(name, (2,), 300, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_softcap_and_a_temperature_per_token(name):
    case(name, (2, 2), 257, torch.float32, softcap=2.5, temperature=torch.tensor([[0.6, 1.0], [1.7, 3.0]]))


@pytest.mark.parametrize("vocab", [1, 7])
@pytest.mark.parametrize("name", [name for name in NAMES if "top-k KL" not in name])
def test_small_vocabularies(name, vocab):
    ours = losses(torch.zeros(2, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long), None, None)
    if vocab == 1:
        x = torch.randn(2, 1, requires_grad=True)
        got = ours[name][0](*(x,) * ours[name][2])
        got.sum().backward()
        # One id has probability 1: nothing but the log-sum-exp and its square depend on the logit.
        if name not in ("token stats", "cross entropy"):
            assert torch.equal(got, torch.zeros_like(got)) and torch.equal(x.grad, torch.zeros_like(x))
    else:
        case(name, (2,), vocab, torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_no_rows(name):
    case(name, (0,), 11, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [32000, 50257, 129920])
@pytest.mark.parametrize("name", NAMES)
def test_real_vocabularies(name, vocab):
    case(name, (4,), vocab, torch.float32)
    case(name, (3,), vocab, torch.bfloat16, temperature=0.7)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing, z_loss", [(0.0, 0.0), (0.2, 1e-2)])
def test_cross_entropy_reductions(reduction, smoothing, z_loss):
    target = torch.tensor([[3, -100, 8], [0, 40, -100]])
    options = dict(reduction=reduction, label_smoothing=smoothing, z_loss=z_loss)
    check(
        lambda x: vocab_parallel_cross_entropy(x, target, **options),
        lambda x: oracle.cross_entropy(x, target, **options),
        draw((2, 3), 41),
    )


def test_cross_entropy_is_that_of_pytorch():
    x, target = draw((5,), 41), torch.tensor([3, 40, -100, 8, 0])
    for options in (dict(), dict(label_smoothing=0.3), dict(reduction="sum")):
        got = vocab_parallel_cross_entropy(x, target, **options)
        torch.testing.assert_close(got, torch.nn.functional.cross_entropy(x, target, **options))


def test_all_targets_ignored():
    x = draw((2,), 9).requires_grad_()
    target = torch.full((2,), -100)
    assert vocab_parallel_cross_entropy(x, target).isnan()
    loss = vocab_parallel_cross_entropy(x, target, reduction="sum", label_smoothing=0.1, z_loss=0.1)
    loss.backward()
    assert loss == 0 and torch.equal(x.grad, torch.zeros_like(x))


def test_an_ignore_index_inside_the_vocabulary():
    x, target = draw((3,), 12), torch.tensor([0, 4, 0])
    options = dict(ignore_index=0, reduction="sum", label_smoothing=0.1)
    check(
        lambda t: vocab_parallel_cross_entropy(t, target, **options),
        lambda t: oracle.cross_entropy(t, target, **options),
        x,
    )
    ids = torch.tensor([[0, 5], [1, 2], [0, 3]])
    teacher = torch.full((3, 2), 0.2).log()
    check(
        lambda t: vocab_parallel_topk_kl_div(t, teacher, ids, ignore_index=0),
        lambda t: oracle.topk_kl(t, teacher, ids, ignore_index=0),
        x,
    )


@pytest.mark.parametrize("bad", [12, 1 << 40, -1, -(1 << 40)])
def test_an_id_in_nobodys_shard_is_nan_at_that_token_only(bad):
    x = draw((3,), 12).requires_grad_()
    index = torch.tensor([4, bad, 5])
    got = vocab_parallel_logprobs(x, index)
    assert got.isnan().tolist() == [False, True, False]
    gradient = torch.autograd.grad(got.nansum(), x)[0]
    assert gradient.isfinite().all() and torch.equal(gradient[1], torch.zeros(12))
    assert torch.autograd.grad(vocab_parallel_logprobs(x, index).sum(), x)[0][1].isnan().all()
    stats = vocab_parallel_token_stats(x, index)
    assert stats.entropy.isfinite().all() and not stats.is_argmax[1]
    with pytest.raises(ValueError, match=r"ids outside \[0, 12\)"):
        vocab_parallel_logprobs(x, index, strict=True)
    with pytest.raises(ValueError, match="target holds ids outside"):
        vocab_parallel_cross_entropy(x, index, strict=True)


def test_strict_accepts_good_ids_and_ignored_ones():
    x, index = draw((2,), 12), torch.tensor([11, -100])
    assert torch.equal(vocab_parallel_logprobs(x, index, strict=True), vocab_parallel_logprobs(x, index))


def test_greedy_match():
    x = draw((3,), 12)
    x[2, 3] = x[2, 7] = 50.0
    best = x.argmax(-1)
    assert vocab_parallel_token_stats(x, best).is_argmax.all()
    assert not vocab_parallel_token_stats(x, (best + 1) % 12).is_argmax.any()
    top = x.topk(2).indices
    assert vocab_parallel_token_stats(x, top).is_argmax.tolist() == [[True, False], [True, False], [True, True]]
