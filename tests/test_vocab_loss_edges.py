"""Vocabulary-parallel losses of whole logits at the edges: extreme values, strides, padding, dtypes, repeated use.

Runs on the plain path here, and once more on the Triton kernels in the interpreter from test_vocab_kernels.py.
"""

from __future__ import annotations

import pytest
import torch
import vocab_oracle as oracle
from test_vocab_losses import INF, NAMES, check, draw, draw_ids, losses

from autosp.custom_ops.vocab_parallel import (
    vocab_parallel_cross_entropy,
    vocab_parallel_entropy,
    vocab_parallel_jsd,
    vocab_parallel_kl_div,
    vocab_parallel_logprobs,
    vocab_parallel_token_stats,
    vocab_parallel_topk_kl_div,
)


def extreme_rows():
    x = torch.full((5, 40), -2.0)
    x[0, 3], x[0, 4] = 3e38, -3e38
    x[1] = -INF
    x[1, 5] = 2.0
    x[2, 7] = -INF
    x[3] += 1000.0
    x[4] = -3.3e38
    x[4, 1] = -3.4e38
    return x


def test_extreme_rows():
    x = extreme_rows().requires_grad_()
    h = vocab_parallel_entropy(x)
    assert h[0] == 0 and h[1] == 0
    torch.testing.assert_close(h[2:], torch.tensor([39.0, 40.0, 39.0]).log())
    gradient = torch.autograd.grad(h.sum(), x)[0]
    assert gradient.isfinite().all() and torch.equal(gradient[:2], torch.zeros(2, 40))
    for divergence in (
        vocab_parallel_kl_div(x, x),
        vocab_parallel_kl_div(x, x, True),
        vocab_parallel_jsd(x, x),
        vocab_parallel_jsd(x, x, 0.1),
    ):
        assert torch.equal(divergence, torch.zeros(5))
        assert torch.equal(torch.autograd.grad(divergence.sum(), x)[0], torch.zeros(5, 40))
    logp = vocab_parallel_logprobs(x, torch.tensor([3, 5, 7, 0, 0]))
    assert logp[:3].tolist() == [0.0, 0.0, -INF]
    torch.testing.assert_close(logp[3:], -torch.tensor([40.0, 39.0]).log())


def test_a_row_of_nothing_is_nan():
    x = torch.full((2, 9), -INF)
    x[1] = 1.0
    index = torch.tensor([2, 2])
    for got in (
        vocab_parallel_logprobs(x, index),
        vocab_parallel_entropy(x),
        vocab_parallel_kl_div(x, x),
        vocab_parallel_jsd(x, x),
    ):
        assert got.isnan().tolist() == [True, False]
    assert vocab_parallel_token_stats(x, index).lse[0] == -INF
    nothing = torch.zeros(2, 0)
    for got in (
        vocab_parallel_entropy(nothing),
        vocab_parallel_kl_div(nothing, nothing),
        vocab_parallel_jsd(nothing, nothing),
        vocab_parallel_logprobs(nothing, torch.zeros(2, dtype=torch.long)),
    ):
        assert got.isnan().all()


@pytest.mark.parametrize("value", [float("nan"), INF])
def test_nan_and_inf_are_not_hidden(value):
    x, y = draw((2,), 40), draw((2,), 40, seed=5)
    x[0, 17] = value
    index = torch.tensor([2, 2])
    for got in (
        vocab_parallel_logprobs(x, index),
        vocab_parallel_entropy(x),
        vocab_parallel_cross_entropy(x, index, reduction="none"),
        vocab_parallel_kl_div(x, y),
        vocab_parallel_kl_div(y, x),
        vocab_parallel_jsd(x, y),
        vocab_parallel_jsd(y, x),
    ):
        assert got.isnan().tolist() == [True, False]


def test_masked_columns():
    x, y = draw((3,), 30), draw((3,), 30, seed=5)
    x[:, 4] = y[:, 4] = -INF  # shared: no contribution
    check(lambda a, b: vocab_parallel_kl_div(a, b), lambda a, b: oracle.kl(b, a), x, y)
    check(lambda a, b: vocab_parallel_jsd(a, b), lambda a, b: oracle.jsd(a, b, 0.5), x, y)
    y[:, 9] = -INF  # in the teacher only
    assert vocab_parallel_kl_div(x, y, reverse=True).tolist() == [INF] * 3
    check(lambda a: vocab_parallel_kl_div(a, y), lambda a: oracle.kl(y, a), x)
    jsd = vocab_parallel_jsd(x, y)
    torch.testing.assert_close(jsd.double(), oracle.jsd(x, y, 0.5), rtol=1e-5, atol=1e-6)


def test_fp16_extremes_and_a_common_offset():
    x = torch.full((2, 50), -65504.0, dtype=torch.float16)
    x[0, 3] = 65504.0
    got = vocab_parallel_logprobs(x, torch.tensor([3, 3]))
    torch.testing.assert_close(got, torch.tensor([1.0, 1 / 50]).log())
    y = draw((3,), 60)
    shifted = (y.double() + 1000).float()
    torch.testing.assert_close(vocab_parallel_entropy(shifted).double(), oracle.entropy(shifted), rtol=1e-6, atol=1e-6)
    index = torch.tensor([1, 2, 3])
    torch.testing.assert_close(
        vocab_parallel_logprobs(shifted, index).double(), oracle.logprobs(shifted, index), rtol=1e-6, atol=1e-6
    )


def test_divergences_are_not_negative_beyond_rounding():
    x = draw((16,), 500)
    y = x + 1e-3 * draw((16,), 500, seed=9)
    assert vocab_parallel_kl_div(x, y).min() > -1e-6
    assert vocab_parallel_jsd(x, y).min() > -1e-6


@pytest.mark.parametrize("beta, reverse", [(0, False), (1.0, True)])
def test_jsd_at_its_ends_is_a_kl(beta, reverse):
    x, y = draw((3,), 30), draw((3,), 30, seed=5)
    assert torch.equal(vocab_parallel_jsd(x, y, beta), vocab_parallel_kl_div(x, y, reverse))


def test_a_small_tail_keeps_its_digits():
    x = torch.full((1, 100), -30.0)
    x[0, :2] = torch.tensor([1.0, 2.0])
    ids = torch.tensor([[0, 1]])
    teacher = torch.tensor([[0.3, 0.5]]).log()
    check(
        lambda a: vocab_parallel_topk_kl_div(a, teacher, ids),
        lambda a: oracle.topk_kl(a, teacher, ids),
        x,
    )


def test_top_k_over_the_whole_vocabulary_is_the_full_kl():
    x, y = draw((3,), 6), draw((3,), 6, seed=5)
    ids = y.topk(6).indices
    teacher = torch.log_softmax(y, -1).gather(-1, ids)
    torch.testing.assert_close(
        vocab_parallel_topk_kl_div(x, teacher, ids), vocab_parallel_kl_div(x, y), rtol=1e-5, atol=2e-6
    )


def test_top_k_kl_refuses_what_is_no_distribution():
    x = draw((3,), 20)
    ids = torch.tensor([[1, 1], [1, 2], [1, 2]])
    teacher = torch.tensor([[0.2, 0.2], [0.9, 0.9], [0.5, 0.2]]).log()
    assert vocab_parallel_topk_kl_div(x, teacher, ids).isnan().tolist() == [True, True, False]


def test_views_are_read_in_place_and_left_alone():
    whole = draw((2, 5), 48).requires_grad_()
    target = draw_ids((2, 4), 48)
    before = whole.detach().clone()
    check(
        lambda x: vocab_parallel_cross_entropy(x[:, :-1], target),
        lambda x: oracle.cross_entropy(x[:, :-1], target),
        whole,
    )
    check(vocab_parallel_entropy, oracle.entropy, whole.detach().transpose(0, 1))
    column_major = draw((48,), 6).t()
    check(vocab_parallel_entropy, oracle.entropy, column_major)
    check(lambda x: vocab_parallel_entropy(x.expand(3, 48)), lambda x: oracle.entropy(x.expand(3, 48)), draw((1,), 48))
    odd = draw((4,), 49)[:, 1:]
    check(lambda x: vocab_parallel_kl_div(x, odd), lambda x: oracle.kl(odd, x), draw((4,), 48, seed=6))
    assert torch.equal(whole, before)


def test_stride_0_and_zero_upstream_gradients():
    x = draw((4,), 30)
    x[2] = float("nan")  # a row that nothing asks about has no gradient, whatever it holds
    for function in (
        lambda t: vocab_parallel_logprobs(t, torch.tensor([1, 2, 3, 4])),
        lambda t: vocab_parallel_entropy(t),
        lambda t: vocab_parallel_kl_div(t, draw((4,), 30, seed=8)),
        lambda t: vocab_parallel_kl_div(draw((4,), 30, seed=8), t),
        lambda t: vocab_parallel_jsd(t, draw((4,), 30, seed=8)),
    ):
        leaf = x.clone().requires_grad_()
        mask = torch.tensor([1.0, 0.0, 0.0, 1.0])
        function(leaf).backward(mask)
        assert torch.equal(leaf.grad[1:3], torch.zeros(2, 30)) and leaf.grad[0].abs().sum() > 0
        ones = x[:2].clone().requires_grad_()
        y = vocab_parallel_entropy(ones)
        torch.testing.assert_close(
            torch.autograd.grad(y, ones, torch.ones(1).expand(2), retain_graph=True)[0],
            torch.autograd.grad(y, ones, torch.ones(2))[0],
        )


def test_padding_columns_are_never_read():
    x = torch.full((3, 40), float("nan"))
    x[:, :33] = draw((3,), 33)
    other = x.roll(1, 0)
    target = draw_ids((3,), 33)
    bounds = dict(vocab_start_index=0, vocab_end_index=33)
    for padded, plain in (
        (
            lambda t: vocab_parallel_cross_entropy(t, target, label_smoothing=0.1, **bounds),
            lambda t: vocab_parallel_cross_entropy(t, target, label_smoothing=0.1),
        ),
        (
            lambda t: vocab_parallel_logprobs(t, target, global_vocab_size=33),
            lambda t: vocab_parallel_logprobs(t, target),
        ),
        (lambda t: vocab_parallel_entropy(t, vocab_end_index=33), lambda t: vocab_parallel_entropy(t)),
        (
            lambda t: vocab_parallel_kl_div(t, other[:, : t.shape[1]], **(bounds if t.shape[1] == 40 else {})),
            lambda t: vocab_parallel_kl_div(t, other[:, : t.shape[1]]),
        ),
        (
            lambda t: vocab_parallel_jsd(t, other[:, : t.shape[1]], **(bounds if t.shape[1] == 40 else {})),
            lambda t: vocab_parallel_jsd(t, other[:, : t.shape[1]]),
        ),
    ):
        wide, narrow = x.clone().requires_grad_(), x[:, :33].contiguous().requires_grad_()
        a, b = padded(wide), plain(narrow)
        torch.testing.assert_close(a, b)
        a.sum().backward()
        b.sum().backward()
        torch.testing.assert_close(wide.grad[:, :33], narrow.grad)
        assert torch.equal(wide.grad[:, 33:], torch.zeros(3, 7))
    assert vocab_parallel_logprobs(x, torch.tensor([33, 34, 39]), **bounds).isnan().all()


def test_mixed_dtypes_of_student_and_teacher():
    x, y = draw((3,), 64, torch.bfloat16), draw((3,), 64, torch.float32, seed=5)
    check(lambda a, b: vocab_parallel_kl_div(a, b), lambda a, b: oracle.kl(b, a), x, y, dtype=torch.bfloat16)


def test_second_use_and_in_place_backward():
    leaf = draw((3,), 32).requires_grad_()
    target = draw_ids((3,), 32)

    def run(**options):
        logits = leaf * 1.0
        loss = vocab_parallel_cross_entropy(logits, target, **options)
        loss.backward()
        gradient, leaf.grad = leaf.grad, None
        return logits.detach(), gradient

    kept, expected = run()
    assert torch.equal(kept, leaf.detach() * 1.0)
    overwritten, gradient = run(inplace_backward=True)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(overwritten, expected)

    logits = leaf * 1.0
    both = vocab_parallel_entropy(logits).sum() + vocab_parallel_cross_entropy(logits, target, inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        both.backward()


def test_double_backward_is_refused():
    from autosp.errors import UnsupportedGraphError

    x, y = draw((2,), 16).requires_grad_(), draw((2,), 16, seed=5)
    for loss in (vocab_parallel_entropy(x), vocab_parallel_kl_div(x, y), vocab_parallel_jsd(x, y)):
        gradient = torch.autograd.grad(loss.sum(), x, create_graph=True)[0]
        with pytest.raises(UnsupportedGraphError, match="cannot be differentiated again"):
            gradient.square().sum().backward()


def test_the_gradient_where_a_soft_cap_saturates():
    x = torch.tensor([[40.0, 0.0, -3.0, -60.0]])
    ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    index = torch.tensor([1])
    vocab_parallel_logprobs(ours, index, softcap=5.0).sum().backward()
    oracle.logprobs(theirs, index, softcap=5.0).sum().backward()
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=0)


def test_a_view_is_not_copied():
    from autosp.custom_ops.vocab_parallel.rows import lane_view, row_view

    whole = draw((2, 5), 48)
    home = whole.untyped_storage().data_ptr()
    for logits in (whole[:, :-1], whole[:, 1:], whole[..., :40]):
        assert row_view(logits).tensor.untyped_storage().data_ptr() == home
    for logits in (whole[:, :-1], whole[:, 1:]):
        assert lane_view(logits)[0].tensor.untyped_storage().data_ptr() == home


def test_autocast_changes_nothing():
    x, target = draw((3,), 32), draw_ids((3,), 32)
    plain = vocab_parallel_cross_entropy(x, target)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(vocab_parallel_cross_entropy(x, target), plain)
        leaf = x.clone().requires_grad_()
        weight = torch.eye(32).requires_grad_()
        loss = vocab_parallel_cross_entropy(torch.nn.functional.linear(leaf, weight), target)
        assert loss.dtype == torch.float32
    loss.backward()
    assert leaf.grad.dtype == weight.grad.dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_float64_gradients_by_finite_differences(name):
    x, y = draw((2,), 6, torch.float64), draw((2,), 6, torch.float64, seed=5)
    ids = torch.tensor([[0, 3, 5], [1, 2, -100]])
    teacher = torch.full((2, 3), 0.2, dtype=torch.float64).log()
    ours, _, number = losses(torch.tensor([4, -100]), ids, ids, teacher, softcap=4.0, temperature=0.8)[name]
    inputs = [t.requires_grad_() for t in (x, y)[:number]]
    assert ours(*inputs).dtype == torch.float64
    torch.autograd.gradcheck(ours, inputs)


def test_int32_ids_and_one_dimension():
    x, target = draw((2,), 12), torch.tensor([3, 4], dtype=torch.int32)
    assert torch.equal(vocab_parallel_logprobs(x, target), vocab_parallel_logprobs(x, target.long()))
    assert vocab_parallel_logprobs(x[0], target[0]).shape == ()
    torch.testing.assert_close(vocab_parallel_entropy(x[0]), vocab_parallel_entropy(x)[0])


def test_a_temperature_that_is_not_positive_is_nan():
    x = draw((3,), 12)
    assert vocab_parallel_entropy(x, temperature=torch.tensor([1.0, 0.0, -1.0])).isnan().tolist() == [False, True, True]


def test_the_same_call_gives_the_same_bits():
    x, y, target = draw((4,), 200), draw((4,), 200, seed=5), draw_ids((4,), 200)
    for function in (
        lambda: vocab_parallel_logprobs(x, target),
        lambda: vocab_parallel_entropy(x),
        lambda: vocab_parallel_kl_div(x, y),
        lambda: vocab_parallel_jsd(x, y),
    ):
        assert torch.equal(function(), function())
