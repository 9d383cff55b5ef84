"""The fused cross entropy on one rank: numbers, gradients, dtypes, memory and what it refuses to do."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from test_linear_oracle import dense_loss, gradients, leaves, relative_error
from torch.utils._python_dispatch import TorchDispatchMode

from autosp.custom_ops import linear_loss as ll
from autosp.custom_ops.linear_loss import (
    form_impl,
    linear_cross_entropy_sum,
    ops,
    ops_direct,
    pair_impl,
    plan,
    stats_impl,
)
from autosp.custom_ops.linear_loss import problem as problem_module
from autosp.custom_ops.linear_loss import vocab_parallel_linear_cross_entropy as fused
from autosp.errors import InputError, InternalError

WAYS = ("keep", "form", "lean")


@pytest.fixture
def way(request, monkeypatch):
    """Force one of the ways that a mean or sum is computed, whatever the sizes."""
    monkeypatch.setattr(plan, "choose_way", lambda *_: request.param)
    return request.param


def problem(n=13, hidden=8, vocab=37, dtype=torch.float64, bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(n, hidden, generator=generator).to(dtype).requires_grad_()
    w = torch.randn(vocab, hidden, generator=generator).to(dtype).requires_grad_()
    b = torch.randn(vocab, generator=generator).to(dtype).requires_grad_() if bias else None
    target = torch.randint(0, vocab, (n,), generator=generator)
    if n > 5:
        target[[2, 5]] = -100
    return h, w, b, target


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_equals_the_dense_loss(way, reduction):
    h, w, b, target = problem()
    per_token = torch.rand(13, dtype=torch.float64) + 0.5
    settings = itertools.product((0.0, 0.1), (0.0, 0.01), (None, 5.0), (1.0, 0.7, per_token), (None, 1, 5, 100))
    for smoothing, z_loss, cap, temperature, chunk in settings:
        for bias in (b, None):
            got = fused(
                h, w, target, bias, reduction=reduction, label_smoothing=smoothing, z_loss=z_loss, softcap=cap,
                temperature=temperature, chunk_size=chunk,
            )  # fmt: skip
            expected = dense_loss(h, w, target, bias, reduction, smoothing, z_loss, cap, temperature)
            upstream = torch.rand_like(got) + 0.5
            assert got.shape == expected.shape and relative_error(got, expected) < 1e-11
            pairs = zip(
                gradients(got, upstream, (h, w, bias)), gradients(expected, upstream, (h, w, bias)), strict=True
            )
            for g, e in pairs:
                assert relative_error(g, e) < 1e-11


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize("vocab", [1, 7, 1000])
def test_small_and_odd_sizes(way, n, vocab):
    h, w, b, target = problem(n=n, vocab=vocab, dtype=torch.float32)
    got = fused(h, w, target, b, reduction="sum")
    expected = dense_loss(*leaves(h, w, dtype=torch.float64), target, b.double(), "sum")
    assert abs(got - expected) <= 1e-5 * max(1.0, abs(expected))
    got.backward()
    reference = leaves(h, w, b, dtype=torch.float64)
    dense_loss(reference[0], reference[1], target, reference[2], "sum").backward()
    for ours, theirs in zip((h, w, b), reference, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_error_no_worse_than_the_same_dtype_eager(way, dtype):
    h, w, _, target = problem(n=64, hidden=32, vocab=503, dtype=dtype, bias=False)
    exact = leaves(h, w, dtype=torch.float64)
    expected = gradients(dense_loss(*exact, target), torch.tensor(3.0), exact)
    eager = gradients(F.cross_entropy(F.linear(h, w).float(), target), torch.tensor(3.0), (h, w))
    loss = fused(h, w, target)
    assert loss.dtype == torch.float32
    for ours, theirs, e in zip(gradients(loss, torch.tensor(3.0), (h, w)), eager, expected, strict=True):
        assert ours.dtype == dtype
        assert relative_error(ours, e) <= 1.5 * relative_error(theirs, e) + 1e-6


@pytest.mark.parametrize("way", ["form", "lean"], indirect=True)
def test_result_does_not_depend_on_the_chunk(way):
    h, w, _, target = problem(n=96, hidden=32, vocab=211, dtype=torch.bfloat16, bias=False)
    whole = gradients(fused(h, w, target, chunk_size=96), torch.ones(()), (h, w))
    for chunk in (1, 7, 32):
        for a, b in zip(gradients(fused(h, w, target, chunk_size=chunk), torch.ones(()), (h, w)), whole, strict=True):
            # fp32 sums in another order, then one rounding to bf16: at most one unit in the last place.
            assert relative_error(a, b) <= 2**-8


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_fp16_with_loss_scale_is_finite_and_exact(way):
    h = torch.ones(4, 2, dtype=torch.float16, requires_grad=True)
    w = torch.tensor([[8.0, 8.0], [-8.0, 8.0]], dtype=torch.float16, requires_grad=True)
    target = torch.tensor([0, 1, 0, 1])
    got = gradients(fused(h, w, target), torch.tensor(65536.0), (h, w))
    exact = leaves(h, w, dtype=torch.float64)
    expected = gradients(dense_loss(*exact, target), torch.tensor(65536.0), exact)
    for g, e in zip(got, expected, strict=True):
        representable = e.abs() <= 65504
        assert torch.isfinite(g[representable]).all()
        torch.testing.assert_close(g[representable].double(), e[representable], rtol=2e-3, atol=1e-2)


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_fp16_gradients_of_a_large_vocabulary_do_not_vanish(way):
    vocab = 20000
    h = torch.full((2, 4), 0.01, dtype=torch.float16, requires_grad=True)
    w = torch.full((vocab, 4), 0.01, dtype=torch.float16, requires_grad=True)
    target = torch.tensor([0, 1])
    (dw,) = gradients(fused(h, w, target, reduction="sum"), torch.tensor(1024.0), (w,))
    expected = 2 * 1024.0 * 0.01 / vocab
    assert abs(float(dw[5:].double().mean()) / expected - 1) < 5e-3


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_fp16_product_that_a_bias_cancels_stays_finite(way):
    h = torch.full((2, 4), 200.0, dtype=torch.float16, requires_grad=True)
    w = torch.full((3, 4), 100.0, dtype=torch.float16, requires_grad=True)
    b = torch.full((3,), -60000.0, dtype=torch.float16, requires_grad=True)
    loss = fused(h, w, torch.tensor([0, 2]), b)
    torch.testing.assert_close(loss.detach(), torch.tensor(3.0).log())
    for g in gradients(loss, torch.ones(()), (h, w, b)):
        assert torch.isfinite(g).all()


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_ignored_is_connected_with_zero_gradients(way, reduction):
    h, w, b, target = problem(dtype=torch.float32)
    target = torch.full_like(target, -100)
    loss = fused(h, w, target, b, reduction=reduction)
    eager = F.cross_entropy(F.linear(h, w, b), target, reduction=reduction)
    torch.testing.assert_close(loss, eager, equal_nan=True)
    loss.sum().backward()
    for x in (h, w, b):
        assert x.grad.abs().max() == 0


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("frozen", list(itertools.product((False, True), repeat=3)))
def test_only_the_needed_gradients(way, frozen):
    tensors = problem(dtype=torch.float32)
    for x, off in zip(tensors[:3], frozen, strict=True):
        x.requires_grad_(not off)
    loss = fused(*tensors[:2], tensors[3], tensors[2])
    assert loss.requires_grad == (not all(frozen))
    if loss.requires_grad:
        loss.backward()
    assert [x.grad is None for x in tensors[:3]] == list(frozen)


class Sizes(TorchDispatchMode):
    """Remembers the largest tensor that any operator made, and the multiply-adds of its matrix products."""

    BODIES = {
        "autosp::linear_stats": ops.linear_stats,
        "autosp::linear_stats_backward": ops.linear_stats_backward,
        "autosp::linear_cross_entropy": ops.linear_cross_entropy,
    }

    def __init__(self):
        super().__init__()
        self.largest = 0
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        body = self.BODIES.get(func.name())
        if body is not None:
            # A custom operator runs below this mode: its body is run again under it.
            with self:
                return body._init_fn(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and not x._is_view():
                self.largest = max(self.largest, x.numel())
        if func in (torch.ops.aten.mm.out, torch.ops.aten.addmm.out):
            a, b = args[-2:]
            self.products += a.shape[0] * a.shape[1] * b.shape[1]
        return out


@pytest.mark.parametrize("way, gemms", [("keep", 3), ("form", 3), ("lean", 4)], indirect=["way"])
def test_gemms_and_the_largest_tensor(way, gemms):
    n, hidden, vocab = 64, 16, 300
    h, w, _, target = problem(n=n, hidden=hidden, vocab=vocab, dtype=torch.float32, bias=False)
    target[:] = torch.arange(n)
    target[::2] = -100
    with Sizes() as sizes:
        fused(h, w, target, chunk_size=4).backward()
    # Ignored rows (half of them) cost no GEMM.
    assert sizes.products == gemms * (n // 2) * hidden * vocab
    if way != "keep":
        assert sizes.largest < n * vocab // 2


def test_without_gradients_nothing_is_kept():
    h, w, _, target = problem(n=64, hidden=16, vocab=300, dtype=torch.float32, bias=False)
    for memory in ("auto", "fast", "lean"):
        with torch.no_grad(), Sizes() as sizes:
            fused(h, w, target, memory=memory, chunk_size=4)
        assert sizes.largest < 64 * 300 // 2
        assert sizes.products == 62 * 16 * 300


def test_tied_embedding_and_accumulation():
    torch.manual_seed(0)
    table = torch.randn(11, 6, requires_grad=True)
    reference = table.detach().clone().requires_grad_()
    for seed in range(3):
        ids = torch.randint(0, 11, (4 + seed,), generator=torch.Generator().manual_seed(seed))
        (fused(F.embedding(ids, table).tanh(), table, ids) / 3).backward()
        (F.cross_entropy(F.embedding(ids, reference).tanh() @ reference.T, ids) / 3).backward()
    torch.testing.assert_close(table.grad, reference.grad)


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_autocast_multiplies_in_its_dtype_and_returns_the_inputs_dtypes(way):
    h, w, b, target = problem(n=32, hidden=16, vocab=97, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = fused(h, w, target, b)
    low = leaves(h, w, b, dtype=torch.bfloat16)
    expected = fused(low[0], low[1], target, low[2])
    # The bias is not rounded on the way: it is added in fp32.
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
    pairs = zip(gradients(loss, torch.ones(()), (h, w, b)), gradients(expected, torch.ones(()), low), strict=True)
    for g, e in pairs:
        assert g.dtype == torch.float32
        assert relative_error(g, e) < 1e-2
    mixed = h.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fused(mixed, w, target, b).backward()
    assert mixed.grad.dtype == torch.bfloat16 and w.grad.dtype == torch.float32


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_main_grad_takes_the_weight_gradient(way):
    h, w, _, target = problem(n=16, dtype=torch.bfloat16, bias=False)
    w.main_grad = torch.ones(w.shape)
    for scale in (2.0, 0.25):
        (fused(h, w, target, main_grad=True) * scale).backward()
    assert w.grad is None
    exact = leaves(h, w, dtype=torch.float64)
    dense_loss(*exact, target).backward()
    assert relative_error(w.main_grad, 1 + 2.25 * exact[1].grad) < 1e-2
    assert relative_error(h.grad, 2.25 * exact[0].grad) < 2e-2


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_main_grad_in_the_forward_with_a_promise(reduction):
    h, w, b, target = problem(n=16, dtype=torch.float32)
    main_grad = torch.ones(w.shape)
    loss = fused(h, w, target, b, reduction=reduction, main_grad=main_grad, main_grad_upstream=0.5, chunk_size=3)
    (loss * 0.5).backward()
    exact = leaves(h, w, b, dtype=torch.float64)
    expected = dense_loss(exact[0], exact[1], target, exact[2], reduction)
    (expected * 0.5).backward()
    assert relative_error(loss.detach(), expected.detach()) < 1e-6
    assert w.grad is None
    assert relative_error(main_grad, 1 + exact[1].grad) < 1e-6
    assert relative_error(h.grad, exact[0].grad) < 1e-5
    assert relative_error(b.grad, exact[2].grad) < 1e-5


def test_a_broken_promise_is_refused():
    h, w, _, target = problem(n=16, dtype=torch.float32, bias=False)
    loss = fused(h, w, target, main_grad=torch.zeros(w.shape), main_grad_upstream=1.0)
    with pytest.raises(InputError, match="promised an upstream gradient of 1.0 .* brought 4.0"):
        (loss * 4).backward()


def test_a_broken_promise_without_waiting_gives_nan(monkeypatch):
    """What a GPU does; a CPU is told here that it is none."""
    monkeypatch.setattr(ops_direct, "_is_free_to_read", lambda _: False)
    for scale, broken in ((4.0, True), (1.0, False)):
        h, w, b, target = problem(n=16, dtype=torch.float32)
        main_grad = torch.zeros(w.shape)
        (fused(h, w, target, b, main_grad=main_grad, main_grad_upstream=1.0) * scale).backward()
        assert torch.isnan(h.grad).all() == torch.isnan(b.grad).all() == torch.isnan(main_grad[0, 0]) == broken
        strict = fused(h, w, target, b, main_grad=main_grad, main_grad_upstream=1.0, strict=True) * scale
        if broken:
            with pytest.raises(InputError, match="promised an upstream gradient of 1.0 .* brought 4.0"):
                strict.backward()
        else:
            strict.backward()


def test_a_backward_twice_gives_the_same(monkeypatch):
    for name in WAYS:
        monkeypatch.setattr(plan, "choose_way", lambda *_, name=name: name)
        h, w, b, target = problem(dtype=torch.float32)
        loss = fused(h, w, target, b)
        first = torch.autograd.grad(loss, (h, w, b), retain_graph=True)
        for a, e in zip(torch.autograd.grad(loss, (h, w, b)), first, strict=True):
            assert torch.equal(a, e)


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_a_second_derivative_raises(way):
    h, w, _, target = problem(dtype=torch.float32, bias=False)
    with pytest.raises(InputError, match="no second derivative"):
        torch.autograd.grad(fused(h, w, target), h, create_graph=True)


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_a_target_outside_the_vocabulary(way):
    h, w, _, target = problem(dtype=torch.float32, bias=False)
    target[0] = 37
    assert torch.isnan(fused(h, w, target))
    losses = fused(h, w, target, reduction="none")
    assert torch.isnan(losses[0]) and torch.isfinite(losses[1:]).all()
    with pytest.raises(InputError, match=r"target 37 at position 0 is outside the vocabulary \[0, 37\)"):
        fused(h, w, target, strict=True)


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_padding_rows_of_the_weight_are_left_out(way):
    h, w, b, target = problem(vocab=37, dtype=torch.float64)
    target = target.clamp(max=29)
    got = fused(h, w, target, b, vocab_start_index=0, vocab_end_index=30, label_smoothing=0.1)
    expected = dense_loss(h, w[:30], target, b[:30], smoothing=0.1)
    pairs = zip(gradients(got, torch.ones(()), (h, w, b)), gradients(expected, torch.ones(()), (h, w, b)), strict=True)
    for g, e in pairs:
        assert relative_error(g, e) < 1e-11


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_masked_columns_and_wild_rows(way):
    h = torch.eye(3, dtype=torch.float32).requires_grad_()
    w = torch.tensor([[3e38, 1.0, 0.0], [-3e38, 2.0, 0.0], [0.0, 3.0, 0.0]]).requires_grad_()
    b = torch.tensor([0.0, float("-inf"), 0.0])
    target = torch.tensor([0, 2, 0])
    got = fused(h, w, target, b, reduction="none")
    expected = F.cross_entropy(F.linear(h, w, b), target, reduction="none")
    torch.testing.assert_close(got, expected)
    assert all(torch.isfinite(g[1:]).all() for g in gradients(got, torch.ones(3), (h,)))


def test_offset_of_a_thousand_loses_nothing():
    h, w, _, target = problem(dtype=torch.float32, bias=False)
    b = torch.full((37,), 1000.0)
    near = fused(h, w, target, torch.zeros(37), label_smoothing=0.1)
    # The logits themselves are rounded at 1000 (2^-14): the loss may move by that, not more.
    assert abs(fused(h, w, target, b, label_smoothing=0.1) - near) < 2e-4


def test_leading_dimensions_and_strides():
    h = torch.randn(2, 5, 8).transpose(0, 1)
    w, target = torch.randn(8, 19).t(), torch.randint(0, 19, (5, 2))
    got = fused(h, w, target, reduction="none")
    torch.testing.assert_close(got, dense_loss(h, w, target, reduction="none"))


def test_sum_and_count_for_the_compiler():
    h, w, b, target = problem(dtype=torch.float32)
    total, count = linear_cross_entropy_sum(h, w, target, b)
    assert total.dtype == count.dtype == torch.float32 and count == 11
    torch.testing.assert_close(total, dense_loss(h, w, target, b, "sum"))


def test_a_gradient_that_was_not_formed_is_refused(monkeypatch):
    monkeypatch.setattr(plan, "choose_way", lambda *_: "form")
    h, w, b, target = problem(dtype=torch.float32)
    total, _ = linear_cross_entropy_sum(h, w, target, b, needs=(True, False, False))
    with pytest.raises(InternalError, match="told not to form"):
        total.backward()


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_masked_instead_of_compacted(way, monkeypatch):
    """What a CUDA graph's capture does, where nothing may wait for the number of tokens that count."""

    class Masked(problem_module.Counting):
        def __init__(self, valid, total, device):
            self.total, self._known = total, True
            self.order = torch.arange(0 if valid is None else total)

    h, w, b, target = problem()
    mask = target != -100
    per_token = torch.rand(13, dtype=torch.float64)

    def results():
        yield fused(h, w, target, b), torch.ones((), dtype=torch.float64)
        yield fused(h, w, target, b, reduction="none"), per_token
        yield ll.vocab_parallel_linear_entropy(h, w, b, mask=mask), per_token
        yield ll.vocab_parallel_linear_logprobs(h, w, target, b), per_token
        yield ll.vocab_parallel_linear_token_stats(h, w, target, b).logsumexp, per_token
        for reduction in ("none", "sum"):
            value = ll.vocab_parallel_linear_kl_div(h, w, h.detach() * 2, w.detach(), b, mask=mask, reduction=reduction)
            yield value, per_token if reduction == "none" else torch.ones((), dtype=torch.float64)

    expected = [(v.detach(), *torch.autograd.grad(v, (h, w, b), g)) for v, g in results()]
    for module in (stats_impl, form_impl, pair_impl):
        monkeypatch.setattr(module, "Counting", Masked)
    for (value, upstream), wanted in zip(results(), expected, strict=True):
        for g, e in zip((value, *torch.autograd.grad(value, (h, w, b), upstream)), wanted, strict=True):
            assert relative_error(g, e) < 1e-11
