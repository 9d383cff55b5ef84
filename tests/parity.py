"""One process with the whole sequence against the ranks of a group: loss, every gradient, outputs."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

# The many small cases show what the passes make and what the operators' adjoints give, for which running the local
# program as it is suffices, in half the time. One model of each kind, the engines and the slow tier go through
# AOTAutograd, and `make test-slow` sends the cases through it as well.
INNER = os.environ.get("AUTOSP_TEST_INNER", "eager")
CASE = {"autosp": {"inner_backend": INNER}}
AOT_EAGER = {"autosp": {"inner_backend": "aot_eager"}}


@dataclass
class Result:
    """What one rank found for one batch: the two losses and the worst gradient, relative to its own maximum."""

    loss: float
    reference: float
    worst: float = 0.0
    worst_name: str = ""
    missing: list[str] = field(default_factory=list)
    logits_error: float = 0.0
    graphs: int = 0

    def check(self, rtol: float = 1e-5) -> None:
        assert not self.missing, f"gradients on one side only: {self.missing}"
        if self.reference != self.reference:
            assert self.loss != self.loss, (self.loss, self.reference)
            return
        assert abs(self.loss - self.reference) <= rtol * abs(self.reference), (self.loss, self.reference)
        assert self.worst <= rtol, (self.worst_name, self.worst)
        assert self.logits_error <= rtol, self.logits_error


def mostly_slow(values: Iterable[Any], default: Container[Any]) -> list[Any]:
    """Parameters of which those in ``default`` run in every test run and the others in the slow tier."""
    return [pytest.param(value, marks=() if value in default else pytest.mark.slow) for value in values]


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def error(value: torch.Tensor, reference: torch.Tensor, floor: float = 0.0) -> float:
    """Largest difference relative to the largest reference value, or to ``floor`` where that is larger.

    Infinite where a difference is not a number: a NaN among errors is lost by ``max``.
    """
    if value.numel() == 0:
        return 0.0
    scale = max(reference.abs().max().item(), floor)
    found = (value - reference).abs().max().item() / (scale or 1.0)
    return found if found == found else math.inf


def is_rounding(
    model: torch.nn.Module,
    batch: Mapping[str, Any],
    loss_of: Callable[[Any], torch.Tensor],
    name: str,
    expected: Mapping[str, torch.Tensor],
) -> bool:
    """Whether an fp32 gradient of the plain model is nothing but rounding: in double precision it is gone.

    That of a key bias under softmax is zero; how much of it a sum in fp32 leaves depends on the CPU.
    """
    if torch.is_autocast_enabled("cpu") or any(g.dtype != torch.float32 for g in expected.values()):
        return False
    exact = copy.deepcopy(model).double()
    exact.zero_grad()
    # Detached: inputs of the caller that require gradients have theirs already.
    wide = {k: v.detach().double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in batch.items()}
    loss_of(exact(**wide)).backward()
    gradient = dict(exact.named_parameters())[name].grad
    return gradient is not None and bool(gradient.abs().max() <= 1e-3 * expected[name].abs().max())


def compare(
    model: torch.nn.Module,
    compiled: Callable[..., Any],
    batch: Mapping[str, Any],
    *,
    prepare: Callable[[dict[str, Any]], Mapping[str, Any]],
    loss_of: Callable[[Any], torch.Tensor] = lambda out: out.loss,
) -> Result:
    """Run a batch through the plain model and through the compiled one, forward and backward."""
    reference_out = model(**batch)
    reference_loss = loss_of(reference_out)
    reference_loss.backward()
    expected = gradients(model)
    out = compiled(**prepare({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}))
    loss = loss_of(out)
    loss.backward()
    found = gradients(model)
    result = Result(loss=loss.item(), reference=reference_loss.item())
    result.missing = sorted(set(expected) ^ set(found))
    # Some gradients are zero but for rounding (a key bias under softmax): measured against the model's largest
    # gradient, a thousandth of it, or one rounding step of it where the dtype's steps are coarser than that.
    # Under autocast the steps are those of its dtype.
    cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
    steps = {g.dtype: max(1e-3, torch.finfo(g.dtype).eps, torch.finfo(cast).eps) for g in expected.values()}
    floor = max(steps[g.dtype] * g.abs().max().item() for g in expected.values())
    for name in set(expected) & set(found):
        difference = error(found[name], expected[name], floor)
        if difference > 1e-5 and is_rounding(model, batch, loss_of, name, expected):
            # It may be wrong by one rounding step of the largest gradient; the usual tolerance, 1e-5, is that step.
            largest = max(g.abs().max().item() for g in expected.values())
            difference = error(found[name], expected[name], torch.finfo(torch.float32).eps * largest / 1e-5)
        if difference > result.worst:
            result.worst, result.worst_name = difference, name
    if getattr(out, "logits", None) is not None and reference_out.logits is not None:
        result.logits_error = error(full(out.logits).detach(), reference_out.logits.detach())
    result.graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return result


def run_model(
    rank_info: Any,
    build: Callable[[], torch.nn.Module],
    batches: list[dict[str, Any]],
    *,
    config: dict[str, Any] | None = None,
    seq_dim: Any = 1,
    dynamic: bool | None = None,
) -> list[Result]:
    """Body of a rank: compile the model for the mesh of ``config`` and compare it on every batch in turn."""
    import autosp

    state = autosp.initialize({**CASE, **(config or {})})
    model = build()
    compiled = torch.compile(model, backend="autosp", dynamic=dynamic)
    offset = 1000 * state.coordinates["dp"]
    results = []
    for index, batch in enumerate(batches):
        if offset:
            generator = torch.Generator().manual_seed(offset + index)
            ids = torch.randint(1, 128, batch["input_ids"].shape, generator=generator)
            batch = {**batch, "input_ids": ids}
            if batch.get("labels") is not None:
                batch["labels"] = torch.where(batch["labels"] == -100, -100, ids)
        prepare = lambda b: autosp.prepare_batch(b, seq_dim=seq_dim)  # noqa: E731
        results.append(compare(model, compiled, batch, prepare=prepare))
    return results
