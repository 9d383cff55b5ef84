"""What is computed from a block of logits row by row: statistics, and the gradient of any function of them.

A block is ``[n, v]``: some rows (tokens) and some columns (vocabulary entries). The logit that counts is
``x = softcap * tanh(z / softcap) / temperature`` of the raw logit ``z``; both steps are taken here, in fp32 registers.

Statistics are centred on the running maximum ``m``: ``S = sum e^(x-m)``, ``W = sum e^(x-m) (x-m)`` (terms of weight
zero skipped) and ``Z = sum (x-m)``, so that a row spanning +-3e38 or a common offset of 1000 loses nothing. Blocks, and
the shards of a group, are merged by the same formula (Milakov and Gimelshein, "Online normalizer calculation for
softmax", arXiv:1805.02867, with W and Z carried along).

Every loss of one block of logits has a row gradient of one form. With ``lp_v = x_v - lse`` and ``p_v = e^lp_v``:
``dL/dx_v = a_k [v = t_k] + p_v (b + c lp_v) + d``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import dispatch
from .gemm import accumulator_dtype

_PLAIN_ELEMENTS = 1 << 22


@dataclass
class Shape:
    """How raw logits become the logits that count.

    softcap: 0 for none. inverse_temperature: ``None``, or ``[n]`` in the accumulation dtype.
    """

    softcap: float = 0.0
    inverse_temperature: torch.Tensor | None = None

    def rows(self, start: int, end: int) -> Shape:
        inverse = self.inverse_temperature
        return Shape(self.softcap, None if inverse is None else inverse[start:end])

    def apply(self, z: torch.Tensor) -> torch.Tensor:
        """``[n, k]`` raw logits, in the accumulation dtype already, to the logits that count."""
        if self.softcap:
            z = self.softcap * torch.tanh(z / self.softcap)
        if self.inverse_temperature is not None:
            z = z * self.inverse_temperature[:, None]
        return z


@dataclass
class State:
    """Statistics of rows over the ``count`` columns seen so far; each ``[n]`` in the accumulation dtype."""

    top: torch.Tensor
    total: torch.Tensor
    weighted: torch.Tensor
    centred: torch.Tensor
    count: int

    @staticmethod
    def empty(n: int, device: torch.device, dtype: torch.dtype) -> State:
        zeros = torch.zeros(3, n, device=device, dtype=dtype)
        return State(torch.full((n,), float("-inf"), device=device, dtype=dtype), *zeros.unbind(), 0)

    def moved_to(self, top: torch.Tensor) -> State:
        """The same sums centred on ``top >= self.top``."""
        shift = torch.where(self.total == 0, 0.0, self.top - top)
        scale = torch.where(self.total == 0, 0.0, torch.exp(shift))
        # A row whose part underflows to nothing relative to the new maximum drops out: 0 * -inf is no number.
        weighted = scale * torch.where(scale == 0, 0.0, self.weighted + self.total * shift)
        centred = self.centred if self.count == 0 else self.centred + self.count * (self.top - top)
        return State(top, scale * self.total, weighted, centred, self.count)

    def merged(self, other: State) -> State:
        top = torch.maximum(self.top, other.top)
        a, b = self.moved_to(top), other.moved_to(top)
        return State(top, a.total + b.total, a.weighted + b.weighted, a.centred + b.centred, a.count + b.count)

    @property
    def log_total(self) -> torch.Tensor:
        return torch.log(self.total)


def statistics(logits: torch.Tensor, shape: Shape, weighted: bool = False, centred: bool = False) -> State:
    """Statistics of the rows of ``logits`` (``[n, v]``, ``v`` may be 0), read once; W and Z are zeros unless wanted."""
    n, v = logits.shape
    running = Running(n, logits.device, accumulator_dtype(logits.dtype), shape, weighted, centred)
    running.add(logits)
    return running.state


class Running:
    """Statistics of rows whose columns come a block at a time, and the logits of one id a row (or several).

    picked: ``[n, k]``: the logits at ``ids``, zero for an id that no block held.
    """

    def __init__(
        self,
        n: int,
        device: torch.device,
        dtype: torch.dtype,
        shape: Shape,
        weighted: bool,
        centred: bool,
        ids: torch.Tensor | None = None,
    ) -> None:
        self._shape, self._weighted, self._centred, self._ids = shape, weighted, centred, ids
        self._table = torch.zeros(4, n, device=device, dtype=dtype)
        self._table[0] = float("-inf")
        self._seen = 0
        self.picked = torch.zeros(n, 0 if ids is None else ids.shape[1], device=device, dtype=dtype)

    @property
    def state(self) -> State:
        return State(*self._table.unbind(), self._seen)

    def add(self, logits: torch.Tensor) -> None:
        """The next block of columns, ``[n, v]``."""
        n, v = logits.shape
        if n == 0 or v == 0:
            return
        ids, shape = self._ids, self._shape
        if dispatch.triton_usable(logits):
            from . import kernels

            one = ids is not None and ids.shape[1] == 1
            picks = (ids, self._seen, self.picked) if one else ()
            flags = self._weighted, self._centred, self._table, self._seen
            kernels.row_statistics(logits, shape.softcap, shape.inverse_temperature, *flags, *picks)
            if ids is not None and not one:
                picked(logits, shape, ids - self._seen, self.picked)
        else:
            merged = self.state.merged(_plain_statistics(logits, shape, self._weighted, self._centred))
            for row, part in enumerate((merged.top, merged.total, merged.weighted, merged.centred)):
                self._table[row] = part
            if ids is not None:
                picked(logits, shape, ids - self._seen, self.picked)
        self._seen += v


def _plain_statistics(logits: torch.Tensor, shape: Shape, weighted: bool, centred: bool) -> State:
    n, v = logits.shape
    wide = accumulator_dtype(logits.dtype)
    out = torch.zeros(4, n, device=logits.device, dtype=wide)
    step = max(1, _PLAIN_ELEMENTS // v)
    for r in range(0, n, step):
        x = shape.rows(r, r + step).apply(logits[r : r + step].to(wide))
        top = x.amax(1)
        x = x - torch.where(top == float("-inf"), 0.0, top)[:, None]
        e = torch.exp(x)
        out[0, r : r + step] = top
        out[1, r : r + step] = e.sum(1)
        if centred:
            out[3, r : r + step] = x.sum(1)
        if weighted:
            out[2, r : r + step] = torch.where(e > 0, e * x, 0.0).sum(1)
    return State(*out.unbind(), v)


@dataclass
class Coefficients:
    """Row gradient ``a [v = target] + p (b + c lp) + d``; each ``[n]`` in the accumulation dtype, ``None`` means zero.

    target: ``[n]`` int64 columns of the *block*, anything outside it for none.
    """

    top: torch.Tensor
    log_total: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor | None = None
    target: torch.Tensor | None = None
    c: torch.Tensor | None = None
    d: torch.Tensor | None = None

    def rows(self, start: int, end: int) -> Coefficients:
        parts = (self.top, self.log_total, self.b, self.a, self.target, self.c, self.d)
        return Coefficients(*(None if part is None else part[start:end] for part in parts))


def gradient_into(out: torch.Tensor, logits: torch.Tensor, shape: Shape, coefficients: Coefficients) -> None:
    """Write ``dL/dz`` (``[n, v]``) of the raw logits to ``out``, which may be ``logits`` itself."""
    n, v = logits.shape
    if n == 0 or v == 0:
        return
    if dispatch.triton_usable(logits):
        from . import kernels

        kernels.row_gradient(out, logits, shape.softcap, shape.inverse_temperature, coefficients)
        return
    step = max(1, _PLAIN_ELEMENTS // v)
    for r in range(0, n, step):
        part = slice(r, r + step)
        out[part] = _plain_gradient(logits[part], shape.rows(r, r + step), coefficients.rows(r, r + step))


def _plain_gradient(logits: torch.Tensor, shape: Shape, co: Coefficients) -> torch.Tensor:
    z = logits.to(accumulator_dtype(logits.dtype))
    lp = (shape.apply(z) - co.top[:, None]) - co.log_total[:, None]
    p = torch.exp(lp)
    grad = p * co.b[:, None]
    if co.c is not None:
        grad += torch.where(p > 0, p * lp, 0.0) * co.c[:, None]
    if co.d is not None:
        grad += co.d[:, None]
    if co.target is not None:
        hit = (co.target >= 0) & (co.target < z.shape[1])
        column = co.target.clamp(0, z.shape[1] - 1)
        grad.scatter_add_(1, column[:, None], torch.where(hit, co.a, 0.0)[:, None])
    if shape.softcap:
        grad *= 1 - torch.tanh(z / shape.softcap) ** 2
    if shape.inverse_temperature is not None:
        grad *= shape.inverse_temperature[:, None]
    return grad


def picked(logits: torch.Tensor, shape: Shape, columns: torch.Tensor, into: torch.Tensor) -> None:
    """Add to ``into`` (``[n, k]``) the logits at ``columns`` (``[n, k]`` int64) that lie in this block."""
    if logits.numel() == 0 or columns.numel() == 0:
        return
    hit = (columns >= 0) & (columns < logits.shape[1])
    raw = logits.gather(1, columns.clamp(0, logits.shape[1] - 1)).to(into.dtype)
    into += torch.where(hit, shape.apply(raw), 0.0)


def add_at(grad: torch.Tensor, logits: torch.Tensor, shape: Shape, columns: torch.Tensor, values: torch.Tensor) -> None:
    """Add ``dL/dz`` of ``values`` (``[n, k]``, upstream of the picked logits) to ``grad``; duplicates add up.

    ``logits`` are the raw logits *at the columns*, ``[n, k]``, taken before ``grad`` overwrote them.
    """
    hit = (columns >= 0) & (columns < grad.shape[1])
    values = torch.where(hit, values, 0.0)
    if shape.softcap:
        values = values * (1 - torch.tanh(logits / shape.softcap) ** 2)
    if shape.inverse_temperature is not None:
        values = values * shape.inverse_temperature[:, None]
    column = columns.clamp(0, max(0, grad.shape[1] - 1))
    # Duplicates of one id in a row, and the softmax term already there, are summed in fp32 before they are narrowed.
    same = (column[:, :, None] == column[:, None, :]).to(values.dtype)
    summed = torch.einsum("nij,nj->ni", same, values)
    grad.scatter_(1, column, (grad.gather(1, column).to(values.dtype) + summed).to(grad.dtype))
