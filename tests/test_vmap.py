"""What a model computes under vmap comes to plain operators, with the gradients of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import toys
from pool import RankPool
from torch import nn

from autosp.errors import UnsupportedGraphError
from autosp.vmap_capture import vmap_regions


def _scaled(row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(row * weight) + row.square().mean()


def _scaled_by_constant(row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The factor is made of the row, and no gradient goes through it."""
    with torch.no_grad():
        factor = (row.contiguous() * weight).square().sum()
    return row * factor + row.tanh()


def _energy(x: torch.Tensor) -> torch.Tensor:
    """Its derivative is made of results that autograd saves, which a second derivative goes through."""
    return (x.tanh() * x.sigmoid()).sum() + x.exp().clamp(max=3.0).mean()


def _pulled_back(x: torch.Tensor) -> torch.Tensor:
    out, pullback = torch.func.vjp(torch.tanh, x)
    weights = torch.linspace(0.5, 1.5, x.shape[-1])
    return out + pullback(weights * x)[0] + pullback(torch.ones_like(x))[0]


DERIVATIVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "grad": lambda x: x + torch.func.grad(_energy)(x),
    "vjp": _pulled_back,
    "jvp": lambda x: x + torch.func.jvp(torch.tanh, (x,), (x.cos(),))[1],
    "grad under vmap": lambda x: x + torch.vmap(torch.func.grad(lambda row: row.sigmoid().square().sum()))(x),
}


class Mapped(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.toy = toys.build()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.weight.requires_grad_(how == "tokens")
        self.how = how

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> toys.Out:
        if self.how == "tokens":
            x = self.toy.hidden(input_ids, None, None, None)
            x = torch.vmap(torch.vmap(_scaled, (0, None)), (0, None))(x, self.weight)
            x = torch.vmap(torch.vmap(_scaled_by_constant, (0, None)), (0, None))(x, self.weight)
            logits = self.toy.head(x)
            return toys.Out(toys.pad_slice(self.toy, logits, labels), logits)
        if self.how in DERIVATIVES:
            x = self.toy.hidden(input_ids, None, None, None)
            logits = self.toy.head(DERIVATIVES[self.how](x))
            return toys.Out(toys.pad_slice(self.toy, logits, labels), logits)
        places = torch.arange(input_ids.shape[1])
        visible = torch.vmap(torch.vmap(lambda q, k: (k <= q) & (q - k < 5), (None, 0)), (0, None))(places, places)
        return self.toy(input_ids, labels, attention_mask=visible[None, None])


def run_mapped(rank_info: Any, how: str) -> list[parity.Result]:
    return parity.run_model(rank_info, lambda: Mapped(how), [toys.batch(16), toys.batch(17)])


@pytest.mark.parametrize("how", parity.mostly_slow(["tokens", "mask", *DERIVATIVES], ["tokens", "grad"]))
def test_values_and_gradients_under_vmap(ranks: RankPool, how: str):
    for results in ranks.run(run_mapped, how, timeout=200):
        for result in results:
            result.check()


def test_a_write_under_no_grad_is_refused():
    """Eager keeps the gradient of what was there before; the operators of a region cannot say so."""

    def write(row: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            row.mul_(2)
        return row

    def inspect(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        region = next(iter(vmap_regions(gm).values()))
        with pytest.raises(UnsupportedGraphError, match="in place under no_grad and vmap"):
            region.run([torch.ones(2, 3, requires_grad=True) * 1])
        return gm.forward

    torch._dynamo.reset()
    torch.compile(lambda x: torch.vmap(write)(x * 1), backend=inspect)(torch.ones(2, 3, requires_grad=True))


def test_a_detached_value_in_a_derivative_is_refused():
    """It cannot be told from one that autograd detaches to save it, without which a second derivative is wrong."""

    def inspect(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        region = next(iter(vmap_regions(gm).values()))
        with pytest.raises(UnsupportedGraphError, match="differentiates within its forward") as refused:
            region.run([torch.ones(2, 3, requires_grad=True) * 1])
        assert "torch.func.grad" in refused.value.location
        return gm.forward

    torch._dynamo.reset()
    torch.compile(lambda x: torch.func.grad(lambda x: (x.detach() * x.tanh()).sum())(x * 1), backend=inspect)(
        torch.ones(2, 3, requires_grad=True)
    )
