"""What is computed from two blocks of logits, student and teacher, row by row: divergences and their gradients.

With ``s``, ``t`` the log-probabilities and ``m = log(beta e^t + (1 - beta) e^s)``:

forward  ``A = KL(teacher || student) = sum e^t (t - s)``;  ``d/ds = p_s - p_t``;       ``d/dt = p_t ((t - s) - A)``
reverse  ``B = KL(student || teacher) = sum e^s (s - t)``;  ``d/ds = p_s ((s - t) - B)``; ``d/dt = p_t - p_s``
jsd      ``beta A + (1 - beta) B`` with ``A = sum e^t (t - m)``, ``B = sum e^s (s - m)`` (generalized Jensen-Shannon,
         Agarwal et al., arXiv:2306.13649); ``d/ds = (1 - beta) p_s ((s - m) - B)``; ``d/dt = beta p_t ((t - m) - A)``

(derivatives with respect to the logits that count; terms of probability zero are zero). Equal logits give exactly 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .. import dispatch
from .gemm import accumulator_dtype
from .rows import Shape

FORWARD, REVERSE, JSD = 0, 1, 2
_PLAIN_ELEMENTS = 1 << 21


@dataclass(frozen=True)
class Kind:
    """Which divergence: ``code`` is FORWARD, REVERSE or JSD; ``beta`` is read for JSD only."""

    code: int
    beta: float = 0.5

    @property
    def log_weights(self) -> tuple[float, float]:
        """``log beta`` and ``log(1 - beta)``; zeros where they are not read."""
        return (math.log(self.beta), math.log1p(-self.beta)) if self.code == JSD else (0.0, 0.0)

    def value(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if self.code == JSD:
            return self.beta * a + (1 - self.beta) * b
        return a if self.code == FORWARD else b


@dataclass
class Side:
    """One model's block: raw logits ``[n, v]``, how they count, and its rows' maximum and log of the sum."""

    logits: torch.Tensor
    shape: Shape
    top: torch.Tensor
    log_total: torch.Tensor

    def rows(self, part: slice) -> Side:
        shape = self.shape.rows(part.start, part.stop)
        return Side(self.logits[part], shape, self.top[part], self.log_total[part])

    def logprobs(self) -> torch.Tensor:
        z = self.logits.to(accumulator_dtype(self.logits.dtype))
        return (self.shape.apply(z) - self.top[:, None]) - self.log_total[:, None]


def values(student: Side, teacher: Side, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """This block's part of ``A`` and ``B``, ``[n]`` each (the one that the kind does not use is zero)."""
    n, v = student.logits.shape
    wide = accumulator_dtype(student.logits.dtype)
    out = torch.zeros(2, n, device=student.logits.device, dtype=wide)
    if n == 0 or v == 0:
        return out[0], out[1]
    if dispatch.triton_usable(student.logits):
        from . import pair_kernels

        pair_kernels.pair_values(out, student, teacher, kind)
        return out[0], out[1]
    step = max(1, _PLAIN_ELEMENTS // v)
    for r in range(0, n, step):
        part = slice(r, r + step)
        s, t = student.rows(part).logprobs(), teacher.rows(part).logprobs()
        a, b = _log_ratios(s, t, kind)
        out[0, part] = _expected(t, a)
        out[1, part] = _expected(s, b)
    return out[0], out[1]


def _log_ratios(s: torch.Tensor, t: torch.Tensor, kind: Kind) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The logs whose expectations under teacher and student are ``A`` and ``B``."""
    if kind.code == FORWARD:
        return t - s, None
    if kind.code == REVERSE:
        return None, s - t
    log_beta, log_rest = kind.log_weights
    # Against the larger of the two, so that equal inputs give log(beta + 1 - beta) = 0 up to one rounding.
    m = torch.logaddexp(t + log_beta, s + log_rest)
    same = s == t
    return torch.where(same, 0.0, t - m), torch.where(same, 0.0, s - m)


def _expected(logprob: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor | float:
    if value is None:
        return 0.0
    p = torch.exp(logprob)
    return torch.where(p == 0, 0.0, p * value).sum(1)


@dataclass
class PairGradient:
    """``upstream`` ``[n]`` (a scale included), and the totals ``a``, ``b`` of the rows over the whole vocabulary."""

    upstream: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor


def gradients_into(
    student_out: torch.Tensor | None,
    teacher_out: torch.Tensor | None,
    student: Side,
    teacher: Side,
    kind: Kind,
    gradient: PairGradient,
) -> None:
    """Write ``dL/dz`` of the raw logits of each side that is wanted; the outputs may be the logits themselves."""
    n, v = student.logits.shape
    if n == 0 or v == 0:
        return
    if dispatch.triton_usable(student.logits):
        from . import pair_kernels

        pair_kernels.pair_gradients(student_out, teacher_out, student, teacher, kind, gradient)
        return
    step = max(1, _PLAIN_ELEMENTS // v)
    for r in range(0, n, step):
        part = slice(r, r + step)
        side_s, side_t = student.rows(part), teacher.rows(part)
        s, t = side_s.logprobs(), side_t.logprobs()
        up = gradient.upstream[part, None]
        ds, dt = _plain_gradients(s, t, kind, gradient.a[part, None], gradient.b[part, None])
        wide = [(student_out, side_s, ds), (teacher_out, side_t, dt)]
        # Both slopes read the logits, so both are formed before either output may overwrite them.
        done = [(out, grad * up * _slope(side)) for out, side, grad in wide if out is not None]
        for out, grad in done:
            out[part] = grad


def _plain_gradients(s, t, kind: Kind, a, b) -> tuple[torch.Tensor, torch.Tensor]:
    p_s, p_t = torch.exp(s), torch.exp(t)
    left, right = _log_ratios(s, t, kind)
    if kind.code == FORWARD:
        return p_s - p_t, torch.where(p_t == 0, 0.0, p_t * (left - a))
    if kind.code == REVERSE:
        return torch.where(p_s == 0, 0.0, p_s * (right - b)), p_t - p_s
    ds = (1 - kind.beta) * torch.where(p_s == 0, 0.0, p_s * (right - b))
    return ds, kind.beta * torch.where(p_t == 0, 0.0, p_t * (left - a))


def _slope(side: Side) -> torch.Tensor | float:
    slope = 1.0
    if side.shape.softcap:
        z = side.logits.to(side.top.dtype)
        slope = 1 - torch.tanh(z / side.shape.softcap) ** 2
    if side.shape.inverse_temperature is not None:
        slope = slope * side.shape.inverse_temperature[:, None]
    return slope
