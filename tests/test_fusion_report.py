"""The fusion of an LM head says what became of each loss, is told what it may hold, and works on one rank alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys
from test_fuse_linear_cross_entropy import (
    ALWAYS,
    FORMS,
    UNRELATED,
    fuse,
    head_without_gradient,
    head_written_afterwards,
    operands,
    returned,
    trace,
    with_gradients,
)
from torch import fx

from autosp import backend  # noqa: F401 - defines the operators
from autosp.custom_ops.linear_loss import plan
from autosp.layout.nodes import FUSION
from autosp.report.build import _note

REASONS = {
    "class weights": "it has class weights",
    "soft targets": "its targets are probabilities",
    "a loss a token": "it gives a loss a token",
    "classes second": "its logits are not [tokens, classes]",
    "cut classes": "aten.slice.Tensor changes the classes",
    "temperature": "aten.div.Tensor is no linear layer",
    "two caps": "its logits are capped more than once",
    "another cap": "aten.mul.Tensor is no linear layer",
    "negative cap": "aten.mul.Tensor is no linear layer",
    "cast to float64": "its logits are cast to float64",
    "classes split and joined": "changes the classes",
    "no linear": "aten.matmul.default is no linear layer",
    "one token": "its logits are not [tokens, classes]",
    "cap whose inside is used": "is no linear layer",
    "detached": "aten.detach.default is no linear layer",
    "logits with another user": "aten.logsumexp.default uses its logits too",
    "two losses of one head": "uses its logits too",
}


def said(gm: fx.GraphModule) -> list[str]:
    return [node.meta[FUSION] for node in gm.graph.nodes if FUSION in node.meta]


@pytest.mark.parametrize("form", UNRELATED)
def test_a_loss_that_stays_says_why(form: str, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO", logger="autosp"):
        sentences = said(fuse(trace(UNRELATED[form], *operands())))
    assert sentences and all(x.startswith("not fused with its LM head: ") and REASONS[form] in x for x in sentences)
    logged = [record.getMessage() for record in caplog.records if record.name == "autosp"]
    assert all(line.endswith(x) for line, x in zip(logged, sentences, strict=True))


def test_a_fused_loss_says_so():
    assert said(fuse(trace(FORMS["merged rows"], *operands()))) == ["fused with its LM head; the logits are not made"]
    assert said(fuse(trace(returned, *operands()), "always")) == [
        "fused with its LM head; the returned logits are None"
    ]
    (kept,) = said(fuse(trace(returned, *operands()), "auto"))
    assert "the model returns its logits" in kept
    (shown,) = [_note(node) for node in fuse(trace(returned, *operands()), "always").graph.nodes if _note(node)]
    assert shown == "fused with its LM head; the returned logits are None", "a line of the compile report"
    for form in (head_without_gradient, head_written_afterwards):
        (barred,) = said(fuse(trace(form, *operands())))
        assert "border of a no_grad or autocast region" in barred


@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_what_the_operator_may_hold(memory: str, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    choose_way = plan.choose_way
    monkeypatch.setattr(plan, "choose_way", lambda memory, *rest: asked.append(memory) or choose_way(memory, *rest))
    inputs = operands()
    gm = fuse(trace(FORMS["merged rows"], *inputs), memory=memory)
    expected = with_gradients(FORMS["merged rows"], inputs)
    for value, other in zip(with_gradients(gm, inputs), expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)
    assert set(asked) == {memory}


class Tripled(toys.Toy):
    """A toy with an operator that cannot be captured."""

    def forward(self, *args: Any, labels: torch.Tensor, input_ids: torch.Tensor) -> toys.Out:  # type: ignore[override]
        x = self.hidden(input_ids, None, None, None)
        logits = self.head(torch.cond(labels.sum() > 0, torch.sin, torch.cos, (x,)))
        return toys.Out(self.loss(self, logits, labels), logits)


@pytest.mark.parametrize("ignored", [0.3, 2.0])
def test_one_rank_alone(ignored: float, fake_ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch):
    """No sequence group is needed; nothing is sharded, and the choice of memory arrives."""
    import autosp

    fake_ranks(1)
    asked: list[str] = []
    choose_way = plan.choose_way
    monkeypatch.setattr(plan, "choose_way", lambda memory, *rest: asked.append(memory) or choose_way(memory, *rest))
    autosp.initialize({"autosp": {**ALWAYS["autosp"], "linear_cross_entropy_memory": "lean"}})
    model = toys.build("pad_slice")
    batch = toys.batch(9, ignored=ignored)
    plain = model(**batch)
    expected = torch.autograd.grad(plain.loss, list(model.parameters()), allow_unused=True)
    out = torch.compile(model, backend="autosp")(**batch)
    assert out.logits is None and set(asked) == {"lean"}
    torch.testing.assert_close(out.loss, plain.loss, equal_nan=True)
    got = torch.autograd.grad(out.loss, list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_one_rank_alone_keeps_what_cannot_be_captured(
    fake_ranks: Callable[..., None], caplog: pytest.LogCaptureFixture
):
    import autosp

    fake_ranks(1)
    autosp.initialize(ALWAYS)
    torch.manual_seed(0)
    model = Tripled("two_slices")
    batch = toys.batch(8)
    out = torch.compile(model, backend="autosp")(**batch)
    torch.testing.assert_close(out.loss, model(**batch).loss)
    assert out.logits is not None
    assert "the LM head is not fused into its loss in this graph" in caplog.text and "higher-order" in caplog.text
