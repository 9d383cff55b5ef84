"""Writes through views, as models fill a tensor part by part."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autosp.passes.functionalize_inplace import functional_form
from autosp.passes.scatter_views import scatter_views_pass


def filled(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(2, 3, 10)
    out[..., :4].copy_(x[..., :4])
    out[..., 4:].copy_(x[..., :6] * 2)
    return out


def shifted(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    out[..., 1:] = x[..., :-1].clone()
    out[..., 0] = 5
    return out + 1


def squeezed(x: torch.Tensor) -> torch.Tensor:
    out = torch.bmm(x, x.transpose(1, 2))[:, :, :1].clone().squeeze(-1)
    out.add_(1)
    return out * 2


def views_read_later(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = x + 0
    before, row = out[:, 1:], out.transpose(1, 2)
    seen = before * 1
    out[:, 1].mul_(3)
    return seen, before + 0, row + 0, out


def twice(x: torch.Tensor) -> torch.Tensor:
    out = x + 0
    part = out[:, :2]
    part.add_(1)
    part.mul_(2)
    return out + part.sum()


def reshaped_later(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for i in range(3):
        out[:, i] = x[:, i] + i
    return out.reshape(6, 10).contiguous() * 2


def broadcast(x: torch.Tensor) -> torch.Tensor:
    out = x + 0
    out[:, 0, 2:5] = 7.0
    out.permute(2, 0, 1)[3].fill_(1.0)
    return out


def traced(function: Callable[..., torch.Tensor]) -> fx.GraphModule:
    return make_fx(function, pre_dispatch=True, tracing_mode="fake")(torch.randn(2, 3, 10))


def run_pass(gm: fx.GraphModule) -> fx.GraphModule:
    return scatter_views_pass(gm, functional_form=functional_form)


@pytest.mark.parametrize("function", [filled, shifted, squeezed, views_read_later, twice, reshaped_later, broadcast])
def test_writes_become_scatters(function: Callable[..., torch.Tensor]):
    gm = run_pass(traced(function))
    assert not [n for n in gm.graph.nodes if n.op == "call_function" and n.target._schema.is_mutable]
    x, y = (torch.randn(2, 3, 10, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    mine, other = gm(x), function(y)
    pairs = zip(mine, other, strict=True) if isinstance(other, tuple) else [(mine, other)]
    for a, b in pairs:
        torch.testing.assert_close(a, b)
    total = lambda out: sum(o.square().sum() for o in out) if isinstance(out, tuple) else out.square().sum()  # noqa: E731
    total(mine).backward()
    total(other).backward()
    torch.testing.assert_close(x.grad, y.grad)
    text = str(gm.graph)
    assert str(run_pass(gm).graph) == text


def into_an_input(x: torch.Tensor) -> torch.Tensor:
    x[:, 1:].add_(1)
    return x * 2


def reshaped(x: torch.Tensor) -> torch.Tensor:
    out = x + 0
    flat = out.view(6, 10)
    out[:, 1:].add_(1)
    return flat * 2


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x + 0).mul_(2)


@pytest.mark.parametrize("function", [into_an_input, reshaped, whole])
def test_other_writes_are_left_alone(function: Callable[..., torch.Tensor]):
    gm = traced(function)
    before = str(gm.graph)
    assert str(run_pass(gm).graph) == before
