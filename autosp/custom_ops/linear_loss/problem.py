"""What every implementation starts with: the rows that count, the head in the compute dtype, its buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autosp.errors import InputError

from . import gemm, groups
from .rows import Shape


@dataclass
class Rows:
    """The tokens that take part: the first ``count`` of ``order``, or all of ``total`` when ``index`` is ``None``."""

    index: torch.Tensor | None
    count: int
    total: int

    @staticmethod
    def of(order: torch.Tensor, count: int, total: int) -> Rows:
        """``order``: ``[total]`` with the rows that count first, in their order; not read when all do."""
        return Rows(None if count == total else order[:count], count, total)

    def take(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """The rows that count of a ``[N, ...]`` tensor."""
        return tensor if tensor is None or self.index is None else tensor.index_select(0, self.index)

    def chunk(self, tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Rows ``[first, last)`` of those that count."""
        return tensor[first:last] if self.index is None else tensor.index_select(0, self.index[first:last])

    def put(self, part: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """``[count, ...]`` back to ``[N, ...]``, ``fill`` elsewhere."""
        if self.index is None:
            return part
        whole = part.new_full((self.total, *part.shape[1:]), fill)
        return whole.index_copy_(0, self.index, part)


class Counting:
    """Compacts tokens to those that count, so that ignored ones cost no GEMM.

    How many there are must reach the host. The copy is only started here: what is launched before :meth:`rows` keeps
    the device busy meanwhile. While a CUDA graph is captured nothing may wait: then all rows are computed and masked.
    """

    def __init__(self, valid: torch.Tensor | None, total: int, device: torch.device) -> None:
        self.total = total
        self._event = None
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        self._known = valid is None or capturing
        if self._known:
            size = 0 if valid is None else total
            self.order = torch.arange(size, device=device)
            return
        self.order = torch.argsort((~valid).to(torch.uint8), stable=True)
        count = valid.sum()
        if device.type == "cuda":
            self._count = torch.empty((), dtype=torch.int64, pin_memory=True)
            self._count.copy_(count, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._count = count

    def rows(self) -> Rows:
        """Wait for the count."""
        if self._known:
            return Rows(None, self.total, self.total)
        if self._event is not None:
            self._event.synchronize()
        return Rows.of(self.order, int(self._count), self.total)


@dataclass
class Head:
    """This rank's rows of the head, padding cut off: ``weight`` ``[local, H]``, ``bias`` ``[local]`` or ``None``."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    logits_dtype: torch.dtype

    @staticmethod
    def of(weight: torch.Tensor, bias: torch.Tensor | None, local: int, dtype: torch.dtype) -> Head:
        bias = None if bias is None else bias[:local]
        return Head(weight[:local].to(dtype), bias, gemm.logits_dtype(weight.device, dtype, bias is not None))

    def logits_into(self, out: torch.Tensor, hidden: torch.Tensor, first: int = 0) -> None:
        """Logits of the vocabulary rows ``[first, first + out.shape[1])``."""
        last = first + out.shape[1]
        gemm.logits_into(out, hidden, self.weight[first:last], None if self.bias is None else self.bias[first:last])


class Scratch:
    """One reused buffer, seen as ``[n, v]`` with a row stride that keeps GEMMs aligned."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        from .plan import aligned

        self._flat = torch.empty(rows * aligned(columns), dtype=dtype, device=device)
        self._stride = aligned(columns)

    def view(self, rows: int, columns: int) -> torch.Tensor:
        return self._flat.as_strided((rows, columns), (self._stride, 1))


def inverse_temperature(temperature: torch.Tensor | None, rows: Rows, dtype: torch.dtype) -> torch.Tensor | None:
    """``[count]`` contiguous ``1 / temperature`` of the rows that count, from ``None``, ``[1]`` or ``[N]``."""
    if temperature is None:
        return None
    inverse = temperature.to(dtype).reciprocal()
    if inverse.numel() == 1 and rows.total != 1:
        return inverse.expand(rows.count).contiguous()
    return rows.take(inverse).contiguous()


def row_shape(temperature: torch.Tensor | None, softcap: float, rows: Rows, dtype: torch.dtype) -> Shape:
    return Shape(softcap, inverse_temperature(temperature, rows, gemm.accumulator_dtype(dtype)))


def refuse_outside(index: torch.Tensor, valid: torch.Tensor | None, shards: groups.Shards) -> None:
    """Strict mode: one host synchronisation.

    Raises:
        InputError: an id that counts lies outside the vocabulary; every rank of the group raises.
    """
    low, high = (
        (0, shards.total)
        if shards.start == 0 or shards.total != shards.local
        else (shards.start, shards.start + shards.local)
    )
    bad = (index < low) | (index >= high)
    if valid is not None:
        bad &= valid[:, None]
    if bool(bad.any()):
        where = bad.nonzero()[0].tolist()
        raise InputError(
            f"target {int(index[tuple(where)])} at position {where[0]} is outside the vocabulary [{low}, {high}); "
            "use ignore_index for positions that do not count"
        )


def narrowing_scale(bound: torch.Tensor | float, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor | None:
    """A power of two that brings gradients of at most ``bound`` near fp16's largest number; ``None`` for other dtypes.

    fp16 has 15 binades above 1 and 24 below: softmax terms of a large vocabulary would lie in its subnormal range, a
    loss scale of 65536 above it. The scale is exact and is taken out again in fp32.
    """
    if dtype != torch.float16:
        return None
    bound = torch.as_tensor(bound, dtype=torch.float32, device=like.device)
    exponent = torch.floor(torch.log2(16384.0 / bound)).clamp(-100, 100)
    return torch.where(torch.isfinite(exponent), torch.exp2(exponent), 1.0)
