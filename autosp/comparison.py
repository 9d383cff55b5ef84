"""How far two runs of one model are from each other: loss, outputs, and every gradient by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_FULL_PRECISION = 1e-5
_HALF_PRECISION = 2e-2


def tolerance(model: torch.nn.Module) -> float:
    """Allowed relative error: 2e-2 with half precision or autocast, 1e-5 where everything is in fp32 or fp64."""
    half = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    cast = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return _HALF_PRECISION if half or cast else _FULL_PRECISION


def relative_error(value: torch.Tensor, reference: torch.Tensor, floor: float = 0.0) -> float:
    """Largest difference relative to the largest reference value, or to `floor` where that is larger.

    NaN where one side alone has a NaN; 0 where both are NaN in the same places and equal elsewhere.
    """
    if value.numel() == 0:
        return 0.0
    value, reference = value.detach().double(), reference.detach().double()
    both = value.isnan() & reference.isnan()
    value, reference = value.masked_fill(both, 0.0), reference.masked_fill(both, 0.0)
    same = value == reference  # infinities of one sign; their difference would be NaN
    difference = torch.where(same, 0.0, value - reference).abs().max().item()
    return difference / (max(reference.abs().max().item(), floor) or 1.0)


class Comparison:
    """Takes the steps of the plain model first (`expect`), then those of the compiled one (`compare`).

    Args:
        rows: of a parameter's name and its whole gradient, the rows that this rank's compiled model has; None: all.
    """

    def __init__(self, rows: Callable[[str, torch.Tensor], torch.Tensor] | None = None) -> None:
        self._rows = rows or (lambda name, whole: whole)
        self._losses: list[torch.Tensor] = []
        self._gradients: list[dict[str, torch.Tensor]] = []
        self._outputs: list[torch.Tensor | None] = []
        self.loss, self.reference = float("nan"), float("nan")
        self.loss_error = self.gradient_error = self.output_error = 0.0
        self.worst = ""
        self.missing: list[str] = []
        self.not_finite = ""
        """A loss of the plain model that is NaN or infinite."""

    def expect(self, step: int, loss: torch.Tensor, model: torch.nn.Module, out: Any) -> None:
        """Keep a step of the plain model."""
        self._losses.append(loss)
        if not bool(loss.isfinite().all()):
            self.not_finite = str(float(loss))
        self._gradients.append(_gradients(model, clone=True))
        self._outputs.append(_logits(out))

    def compare(self, step: int, loss: torch.Tensor, model: torch.nn.Module, out: Any) -> None:
        """Compare a step of the compiled model; the worst error of all steps stays."""
        self.loss, self.reference = float(loss), float(self._losses[step])
        self.loss_error = _worse(self.loss_error, relative_error(loss, self._losses[step]))
        found, expected = _gradients(model, clone=False), self._gradients[step]
        self.missing = sorted({*self.missing, *(set(found) ^ set(expected))})
        floor = _floor(expected)
        for name in sorted(set(found) & set(expected)):
            error = self._gradient_error(name, found[name], expected[name], floor)
            is_number = self.gradient_error == self.gradient_error
            if not self.worst or (is_number and not error <= self.gradient_error):
                self.worst, self.gradient_error = name, error
        reference, logits = self._outputs[step], _logits(out)
        if reference is not None and logits is not None:
            whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
            error = relative_error(whole, reference) if whole.shape == reference.shape else float("inf")
            self.output_error = _worse(self.output_error, error)

    def _gradient_error(self, name: str, found: torch.Tensor, expected: torch.Tensor, floor: float) -> float:
        """Relative to the largest value of the whole gradient, of which a rank may have some rows."""
        rows = self._rows(name, expected)
        if rows is expected:
            return relative_error(found, expected, floor)
        if rows.shape != found.shape:
            return float("inf")
        largest = expected.abs().nan_to_num(posinf=0.0).max().item() if expected.numel() else 0.0
        return relative_error(found, rows, max(floor, largest))

    def fill(self, result: Any) -> None:
        """Write what was found into a `autosp.checking.CheckResult`."""
        result.loss, result.reference = self.loss, self.reference
        result.loss_error, result.gradient_error, result.output_error = (
            self.loss_error,
            self.gradient_error,
            self.output_error,
        )
        result.worst_gradient, result.missing = self.worst, self.missing
        errors = (self.loss_error, self.gradient_error, self.output_error)
        result.ok = not self.missing and all(error <= result.tolerance for error in errors)


def _worse(a: float, b: float) -> float:
    """The larger, a NaN being larger than any number."""
    return a if a != a or a >= b else b


def _gradients(model: torch.nn.Module, *, clone: bool) -> dict[str, torch.Tensor]:
    return {
        name: p.grad.detach().clone() if clone else p.grad.detach()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def _floor(gradients: Mapping[str, torch.Tensor]) -> float:
    """What a gradient that is zero but for rounding is measured against (a key bias under softmax): the model's
    largest gradient, a thousandth of it, or one rounding step of it where the dtype's steps are coarser than that."""
    devices = ("cpu", "cuda")
    casts = [torch.finfo(torch.get_autocast_dtype(d)).eps for d in devices if torch.is_autocast_enabled(d)]
    step = {g.dtype: max([1e-3, torch.finfo(g.dtype).eps, *casts]) for g in gradients.values()}
    return max(
        (step[g.dtype] * g.abs().nan_to_num().max().item() for g in gradients.values() if g.numel()), default=0.0
    )


def _logits(out: Any) -> torch.Tensor | None:
    logits = out.get("logits") if isinstance(out, Mapping) else getattr(out, "logits", None)
    return logits.detach() if isinstance(logits, torch.Tensor) else None
