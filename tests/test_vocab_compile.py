"""The operators under torch.compile and torch.library.opcheck."""

from __future__ import annotations

import pytest
import torch

from autosp.custom_ops.vocab_parallel import (
    vocab_parallel_cross_entropy,
    vocab_parallel_entropy,
    vocab_parallel_jsd,
    vocab_parallel_kl_div,
    vocab_parallel_logprobs,
    vocab_parallel_token_stats,
    vocab_parallel_topk_kl_div,
)
from autosp.errors import InputError

SETTINGS = (None, (1.3, 0.0), (-1, -1, -1), "")
PER_ROW = (torch.tensor([0.5, 1.0, 2.0]), (1.0, 3.0), (0, 9, 9), "")


def tensors():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(3, 9, generator=generator) for _ in range(2))
    return x, y, torch.tensor([1, 8, -100])


@pytest.mark.parametrize("settings", [SETTINGS, PER_ROW])
@pytest.mark.parametrize("flags", [(True, True, False, False, False), (False, False, False, True, False)])
def test_opcheck_row_stats(settings, flags):
    x, _, index = tensors()
    op = torch.ops.autosp.vocab_row_stats
    torch.library.opcheck(op, (x.requires_grad_(), index, *settings, -100, flags))
    with torch.no_grad():
        _, _, entropy, _, _, saved = op(x, index, *settings, -100, flags)
    ones = torch.ones(3)
    gradients = (ones, ones, ones if flags[0] else None, ones if flags[1] else None)
    arguments = (index, saved, entropy, *gradients, *settings, -100, flags)
    torch.library.opcheck(torch.ops.autosp.vocab_row_stats_backward, (x.detach(), *arguments))
    torch.library.opcheck(torch.ops.autosp.vocab_row_stats_backward_, (x.detach().clone(), *arguments))


def test_opcheck_top_k():
    x, _, _ = tensors()
    index = torch.tensor([[1, 2], [8, 0], [3, -100]])
    flags = (False, False, True, False, False)
    torch.library.opcheck(torch.ops.autosp.vocab_row_stats, (x.requires_grad_(), index, *SETTINGS, -100, flags))


@pytest.mark.parametrize("settings", [SETTINGS, PER_ROW])
def test_opcheck_divergences(settings):
    x, y, _ = tensors()
    leaf = x.clone().requires_grad_()
    torch.library.opcheck(torch.ops.autosp.vocab_kl, (leaf, y, *settings))
    torch.library.opcheck(torch.ops.autosp.vocab_jsd, (leaf, y.clone().requires_grad_(), 0.3, *settings))
    kl, saved = torch.ops.autosp.vocab_kl(x, y, *settings)
    torch.library.opcheck(torch.ops.autosp.vocab_kl_backward, (x, y, kl, saved, torch.ones(3), True, False, *settings))
    _, sums, saved = torch.ops.autosp.vocab_jsd(x, y, 0.3, *settings)
    torch.library.opcheck(
        torch.ops.autosp.vocab_jsd_backward, (x, y, sums, saved, torch.ones(3), 0.3, True, True, *settings)
    )


def test_opcheck_group_sum():
    torch.library.opcheck(torch.ops.autosp.vocab_sum_over_group, (torch.tensor(2.0, requires_grad=True), ""))


def everything(x, y, index, teacher, ids):
    stats = vocab_parallel_token_stats(x, index, softcap=5.0)
    return (
        vocab_parallel_cross_entropy(x[:, :-1], index[:, 1:], label_smoothing=0.1, z_loss=1e-3)
        + vocab_parallel_logprobs(x, ids, temperature=0.7).mean()
        + vocab_parallel_entropy(x).mean()
        + stats.entropy.sum()
        + vocab_parallel_kl_div(x, y).mean()
        + vocab_parallel_kl_div(x, y, True).mean()
        + vocab_parallel_jsd(x, y).mean()
        + vocab_parallel_topk_kl_div(x, teacher, ids).mean()
    )


def problem(batch, length, vocab=11):
    generator = torch.Generator().manual_seed(batch * 100 + length)
    x, y = (torch.randn(batch, length, vocab, generator=generator) for _ in range(2))
    index = torch.randint(0, vocab, (batch, length), generator=generator)
    teacher, ids = torch.log_softmax(y, -1).topk(3)
    return x.requires_grad_(), y, index, teacher, ids


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_graph_with_any_shape(backend):
    torch._dynamo.reset()
    compiled = torch.compile(everything, fullgraph=True, dynamic=True, backend=backend)
    for batch, length in ((2, 5), (3, 7), (2, 4)):
        arguments = problem(batch, length)
        want, got = everything(*arguments), compiled(*arguments)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got, arguments[0]), torch.autograd.grad(want, arguments[0]))


def test_in_place_backward_is_refused_while_compiling():
    x, index = torch.randn(2, 8, requires_grad=True), torch.tensor([1, 2])

    def loss(t):
        return vocab_parallel_cross_entropy(t * 1.0, index, inplace_backward=True)

    with pytest.raises((InputError, torch._dynamo.exc.Unsupported), match="leave it False under torch.compile"):
        torch.compile(loss, fullgraph=True, backend="eager")(x)


def test_strict_mode_is_refused_while_compiling():
    x, index = torch.randn(2, 8), torch.tensor([1, 2])

    def loss(t):
        return vocab_parallel_cross_entropy(t, index, strict=True)

    with pytest.raises((InputError, torch._dynamo.exc.Unsupported), match="leave it False under torch.compile"):
        torch.compile(loss, fullgraph=True, backend="eager")(x)


def test_one_graph_with_any_settings():
    x, index = torch.randn(2, 3, 12, requires_grad=True), torch.randint(0, 12, (2, 3))

    def loss(t, temperature, smoothing, z_loss, beta, end):
        return (
            vocab_parallel_cross_entropy(
                t, index, None, None, 0, end, label_smoothing=smoothing, z_loss=z_loss, temperature=temperature
            )
            + vocab_parallel_jsd(t, 2 * t.detach(), beta).mean()
        )

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for settings in ((0.7, 0.1, 0, 0.5, 12), (0.8, 0.2, 1e-3, 0.3, 12), (2, 0.3, 2e-3, 0.4, 12), (0.9, 0, 3e-3, 1, 12)):
        want, got = loss(x, *settings), compiled(x, *settings)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got, x), torch.autograd.grad(want, x))


def test_autocast_inside_a_compiled_function():
    weight, x, index = torch.randn(9, 4, requires_grad=True), torch.randn(3, 4), torch.tensor([0, 8, -100])

    def loss(x, weight):
        with torch.autocast("cpu", torch.bfloat16):
            return vocab_parallel_cross_entropy(torch.nn.functional.linear(x, weight), index)

    torch._dynamo.reset()
    got, want = torch.compile(loss, fullgraph=True, backend="aot_eager")(x, weight), loss(x, weight)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, weight), torch.autograd.grad(want, weight))
