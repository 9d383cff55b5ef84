"""The fused losses under torch.compile(fullgraph=True), and the registered operators under opcheck."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_linear_oracle import dense_loss, leaves, relative_error

from autosp.custom_ops.linear_loss import (
    linear_cross_entropy_sum,
    ops,
    ops_direct,
    ops_pair,
    plan,
    vocab_parallel_linear_cross_entropy,
    vocab_parallel_linear_jsd,
    vocab_parallel_linear_logprobs,
    vocab_parallel_linear_token_stats,
)


def inputs(n=9, hidden=6, vocab=23, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    h, w, b = (torch.randn(*s, generator=g).to(dtype) for s in ((n, hidden), (vocab, hidden), (vocab,)))
    target = torch.randint(0, vocab, (n,), generator=g)
    target[2] = -100
    return h, w, b, target


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("way", ["keep", "form", "lean"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_cross_entropy(monkeypatch, way, reduction):
    monkeypatch.setattr(plan, "choose_way", lambda *_: way)

    def model(h, w, target, b):
        losses = vocab_parallel_linear_cross_entropy(
            h.tanh(), w * 2, target, b, reduction=reduction, label_smoothing=0.1, temperature=0.7
        )
        return (losses * 3).sum()

    run = compiled(model)
    for n in (9, 12, 17):
        h, w, b, target = inputs(n=n)
        ours, theirs = leaves(h, w, b), leaves(h, w, b)
        value = run(ours[0], ours[1], target, ours[2])
        value.backward()
        expected = (
            dense_loss(theirs[0].tanh(), theirs[1] * 2, target, theirs[2], reduction, 0.1, temperature=0.7) * 3
        ).sum()
        expected.backward()
        assert relative_error(value, expected) < 1e-5
        for o, t in zip(ours, theirs, strict=True):
            assert relative_error(o.grad, t.grad) < 1e-5


def test_inductor():
    def model(h, w, target):
        return vocab_parallel_linear_cross_entropy(h * 2, w, target, z_loss=0.01) * 0.5

    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True)
    h, w, _, target = inputs()
    ours, theirs = leaves(h, w), leaves(h, w)
    run(*ours, target).backward()
    (dense_loss(theirs[0] * 2, theirs[1], target, z_loss=0.01) * 0.5).backward()
    for o, t in zip(ours, theirs, strict=True):
        assert relative_error(o.grad, t.grad) < 1e-5


def test_the_rest_of_the_family_and_main_grad():
    def model(h, w, target, main_grad):
        stats = vocab_parallel_linear_token_stats(h, w, target)
        value = stats.logprobs.sum() + stats.entropy.sum() + stats.is_argmax.sum()
        value = value + vocab_parallel_linear_logprobs(h, w, target, reduction="mean", main_grad=main_grad)
        return value + vocab_parallel_linear_jsd(h, w, h.detach() * 2, w.detach(), reduction="mean")

    h, w, _, target = inputs()
    results = []
    for run in (model, compiled(model)):
        local, main_grad = leaves(h, w), torch.zeros(w.shape)
        value = run(*local, target, main_grad)
        value.backward()
        results.append((value.detach(), *(x.grad for x in local), main_grad))
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager)


@pytest.mark.parametrize("settings", [{"main_grad_upstream": 0.5}, {"memory": "fast"}, {"memory": "lean"}])
def test_main_grad(settings):
    def model(h, w, target, main_grad):
        return vocab_parallel_linear_cross_entropy(h * 2, w, target, main_grad=main_grad, **settings) * 0.5

    h, w, _, target = inputs()
    results = []
    for run in (model, compiled(model)):
        local, main_grad = leaves(h, w), torch.ones(w.shape)
        run(*local, target, main_grad).backward()
        assert local[1].grad is None
        results.append((local[0].grad, main_grad))
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager)


@pytest.mark.parametrize("way", ["keep", "form", "lean"])
def test_under_autocast_and_no_grad(monkeypatch, way):
    monkeypatch.setattr(plan, "choose_way", lambda *_: way)
    h, w, b, target = inputs()

    def model(h, w, target, b):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return vocab_parallel_linear_cross_entropy(h, w, target, b)

    local = leaves(h, w, b)
    run = compiled(model)
    eager = model(local[0], local[1], target, local[2])
    value = run(local[0], local[1], target, local[2])
    torch.testing.assert_close(value, eager)
    value.backward()
    assert all(x.grad.dtype == torch.float32 for x in local)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(local[0], local[1], target, local[2]), eager)


def group_body(info):
    tp = dist.group.WORLD
    h, w, b, target = inputs()
    part = slice(0, 12) if info.rank == 0 else slice(12, 23)

    def model(h, w, target, b):
        return vocab_parallel_linear_cross_entropy(h, w, target, b, tp_group=tp, sp_group=tp) * 2

    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    local, dense = leaves(h, w[part], b[part]), leaves(h, w, b)
    run(local[0], local[1], target, local[2]).backward()
    # Every rank holds all tokens here, so sum and count over "sp" double alike and each token weighs half.
    dense_loss(dense[0], dense[1], target, dense[2]).backward()
    for o, t in zip(local, (dense[0].grad, dense[1].grad[part], dense[2].grad[part]), strict=True):
        if not relative_error(o.grad, t) < 1e-5:
            raise AssertionError(f"gradient off by {relative_error(o.grad, t)}")


def test_over_a_group(ranks):
    ranks.run(group_body, world_size=2, timeout=180)


def test_the_compiler_entry_traces_to_one_operator_with_said_needs():
    from torch.fx.experimental.proxy_tensor import make_fx

    h, w, _, target = inputs()
    graph = make_fx(
        lambda *a: linear_cross_entropy_sum(*a, needs=(True, True, False)), tracing_mode="fake", pre_dispatch=True
    )(h, w, target)
    fused = [n for n in graph.graph.nodes if "linear" in str(n.target)]
    assert len(fused) == 1
    for value, expected in zip(graph(h, w, target), linear_cross_entropy_sum(h, w, target), strict=True):
        torch.testing.assert_close(value, expected)


CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static")
TAIL = ("", -1, -1, 4)


def check(op, *args, checks=CHECKS):
    torch.library.opcheck(op, args, test_utils=checks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_of_the_loss_operators(dtype):
    h, w, b, target = inputs(dtype=dtype)
    temperature = torch.full((1,), 0.7)
    for grad in (False, True):
        leaf = leaves(h, w, b) if grad else [h, w, b]
        for bias in (leaf[2], None):
            needs = (grad, grad, grad and bias is not None)
            check(
                ops.linear_cross_entropy, leaf[0], leaf[1], bias, target, temperature, None, -100, 0.1, 0.01, 5.0,
                *TAIL, dtype, *needs, False, False,
            )  # fmt: skip
            for valid, keep in ((target != -100, True), (None, False)):
                index = target.clamp(min=0)[:, None].expand(9, 2).contiguous()
                check(
                    ops.linear_stats, leaf[0], leaf[1], bias, index, valid, temperature, None, 5.0, *TAIL, dtype, True,
                    keep, keep, False, False,
                )  # fmt: skip


def test_opcheck_of_the_pair_operators():
    h, w, b, target = inputs()
    sides = [*leaves(h, w, b), h * 2, w * 0.5, None]
    for code in (0, 2):
        check(ops_pair.linear_pair, *sides, target != -100, None, code, 0.3, 0.0, 5.0, *TAIL, torch.float32, False)
        needs = [True, True, True, False, False, False]
        check(
            ops_pair.linear_pair_sum, *sides, None, None, code, 0.3, 0.0, 5.0, *TAIL, torch.float32, needs, False
        )  # fmt: skip


def test_opcheck_of_the_small_operators():
    forward_only = ("test_schema", "test_faketensor")
    h, w, b, target = inputs()
    check(ops.scale_gradient, torch.tensor(2.0), torch.randn(3, 4), torch.bfloat16, checks=forward_only)
    check(ops.add_scaled, torch.zeros(3, 4), torch.tensor(2.0), torch.randn(3, 4), checks=forward_only)
    check(
        ops_direct.linear_cross_entropy_into, h, w, b, target, None, torch.zeros(w.shape), torch.tensor(0.5), -100, 0.0,
        0.0, 0.0, *TAIL, torch.float32, True, True, False, False, checks=forward_only,
    )  # fmt: skip
    promise = torch.tensor(1.0), torch.zeros(w.shape), True
    check(ops_direct.attach, torch.tensor(1.0), *leaves(h, w, b), h * 0, b * 0, *promise, checks=CHECKS[:3])
    check(ops_direct.check_promise, torch.zeros(w.shape), *promise[:1] * 2, False, checks=forward_only)
    check(ops_direct.as_promised, torch.tensor(1.0), torch.tensor(1.0), h * 0, checks=forward_only)
