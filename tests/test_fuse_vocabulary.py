"""The pass that reads formulas over a sharded vocabulary, on small graphs in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import autosp
from autosp import backend  # noqa: F401
from autosp.passes.fuse_vocabulary import fuse_vocabulary_pass, has_vocabulary_head

V = 6
Function = Callable[..., torch.Tensor]


@pytest.fixture
def group(fake_ranks: Any) -> str:
    fake_ranks(1)
    name = autosp.initialize({"autosp": {"inner_backend": "eager"}}).group_names["tp"]
    assert name is not None
    return name


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, 3, 4, generator=generator), torch.randn(V, 4, generator=generator)
    ids, teacher = torch.randint(0, V, (2, 3), generator=generator), torch.randn(2, 3, V, generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), ids, teacher.to(dtype)


def trace(function: Function, group: str, dtype: torch.dtype = torch.float32, head: bool = True) -> fx.GraphModule:
    def model(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        z = torch.ops.autosp.vocab_linear(hidden, weight, None, V, group) if head else F.linear(hidden, weight)
        return function(z, ids, teacher)

    return make_fx(model, tracing_mode="fake", pre_dispatch=True)(*inputs(dtype))


def run_pass(gm: fx.GraphModule) -> fx.GraphModule:
    fake_mode = next(node.meta["val"] for node in gm.graph.nodes if "val" in node.meta).fake_mode
    return fuse_vocabulary_pass(gm, fake_mode=fake_mode)


def operators(gm: fx.GraphModule) -> list[str]:
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    return [str(node.target).removeprefix("aten.").removeprefix("autosp.") for node in calls]


def entropy(z, ids, teacher):
    p, logp = torch.softmax(z, -1), torch.log_softmax(z, -1)
    return -(p * logp).sum(-1)


def no_grad_between(z, ids, teacher):
    with torch.no_grad():
        logp = torch.log_softmax(z, -1)
    return logp.gather(-1, ids[..., None]) * z[..., :1]


def written_between(z, ids, teacher):
    logp = torch.log_softmax(z, -1)
    teacher.add_(1)
    return logp.gather(-1, ids[..., None]) * teacher[..., :1]


STATS, KL = "vocab_row_stats.default", "vocab_kl.default"
FORMULAS: dict[str, tuple[Function, str]] = {
    "log-probabilities": (lambda z, i, t: torch.log_softmax(z, -1).gather(-1, i[..., None]).squeeze(-1), STATS),
    "of slices": (lambda z, i, t: torch.log_softmax(z[:, :-1].float(), -1).gather(-1, i[:, 1:, None]), STATS),
    "entropy": (entropy, STATS),
    "entropy by exp, kept": (
        lambda z, i, t: (torch.log_softmax(z, -1).exp() * torch.log_softmax(z, -1)).sum(-1, keepdim=True),
        STATS,
    ),
    "entropy of logits": (lambda z, i, t: torch.logsumexp(z, -1) - (torch.softmax(z, -1) * z).sum(-1), STATS),
    "kl_div": (
        lambda z, i, t: F.kl_div(z.log_softmax(-1), t.log_softmax(-1), reduction="sum", log_target=True),
        KL,
    ),
    "kl_div of probabilities": (lambda z, i, t: F.kl_div(z.log_softmax(-1), t.softmax(-1), reduction="mean"), KL),
    "kl_div, rows": (lambda z, i, t: F.kl_div(z.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1), KL),
    "reverse kl by hand": (
        lambda z, i, t: (z.softmax(-1) * (z.log_softmax(-1) - t.log_softmax(-1))).sum(-1),
        KL,
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_it_rewrites(name: str, group: str) -> None:
    function, operator = FORMULAS[name]
    gm = trace(function, group)
    expected = gm(*inputs())
    fused = run_pass(gm)
    assert operator in operators(fused)
    assert not [name for name in operators(fused) if "softmax" in name or "kl_div" in name]
    torch.testing.assert_close(fused(*inputs()), expected)
    text = str(fused.graph)
    assert str(run_pass(fused).graph) == text


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_cast_of_a_loss_is_not_made(reduction: str, group: str) -> None:
    def loss(z, ids, teacher):
        target = torch.where(ids == 1, -100, ids).flatten()
        return F.cross_entropy(z.flatten(0, 1).float(), target, reduction=reduction, label_smoothing=0.1)

    gm = trace(loss, group, torch.bfloat16)
    expected = gm(*inputs(torch.bfloat16))
    fused = run_pass(gm)
    assert "cross_entropy_loss.default" not in operators(fused) and STATS in operators(fused)
    torch.testing.assert_close(fused(*inputs(torch.bfloat16)), expected)


def test_the_cast_before_rows_are_chosen_is_not_made(group: str) -> None:
    """As transformers writes it (cast, then merge) and as older code does (shift and copy in between)."""

    def merged(z, ids, teacher):
        return F.cross_entropy(z.float().view(-1, z.shape[-1]), ids.flatten())

    def shifted(z, ids, teacher):
        rows = z.float()[:, :-1].contiguous()
        return F.cross_entropy(rows.view(-1, z.shape[-1]), ids[:, 1:].flatten())

    for loss in (merged, shifted):
        gm = trace(loss, group, torch.bfloat16)
        expected = gm(*inputs(torch.bfloat16))
        fused = run_pass(gm)
        assert STATS in operators(fused)
        sizes = [n.meta["val"] for n in fused.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        logits = [x for x in sizes if x.dim() > 1 and x.dtype == torch.float32 and x.is_floating_point()]
        assert not logits, logits
        torch.testing.assert_close(fused(*inputs(torch.bfloat16)), expected)


def test_some_classes_are_not_all(group: str) -> None:
    gm = trace(lambda z, i, t: torch.logsumexp(z.float()[..., :5], -1), group, torch.bfloat16)
    assert "logsumexp.default" in operators(run_pass(gm))


def test_the_cast_of_a_log_sum_exp_is_not_made(group: str) -> None:
    gm = trace(lambda z, i, t: torch.logsumexp(z.float(), -1, keepdim=True), group, torch.bfloat16)
    expected = gm(*inputs(torch.bfloat16))
    fused = run_pass(gm)
    assert "logsumexp.default" not in operators(fused)
    torch.testing.assert_close(fused(*inputs(torch.bfloat16)), expected)


LEFT_ALONE: dict[str, Function] = {
    "a region's border": no_grad_between,
    "a write": written_between,
    "another dimension": lambda z, i, t: torch.log_softmax(z, 1).gather(1, i[..., None]),
    "other logits": lambda z, i, t: (torch.softmax(z, -1) * torch.log_softmax(2 * z, -1)).sum(-1),
    "a sum of all": lambda z, i, t: (torch.softmax(z, -1) * torch.log_softmax(z, -1)).sum(),
    "fewer rows": lambda z, i, t: torch.log_softmax(z, -1).gather(-1, i[:1, :, None]),
    "fp32 logits": lambda z, i, t: F.cross_entropy(z.flatten(0, 1), i.flatten()),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_it_leaves_alone(name: str, group: str) -> None:
    gm = trace(LEFT_ALONE[name], group)
    before = str(gm.graph)
    run_pass(gm)
    assert str(gm.graph) == before


def test_graphs_without_a_sharded_head_are_left_alone(group: str) -> None:
    gm = trace(entropy, group, head=False)
    before = str(gm.graph)
    assert not has_vocabulary_head(gm) and has_vocabulary_head(trace(entropy, group))
    run_pass(gm)
    assert str(gm.graph) == before
