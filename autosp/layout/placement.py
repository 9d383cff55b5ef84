"""Where the elements of a value live along one mesh axis.

A value is ``Replicate`` (whole on every rank), ``Shard`` (cut along one dimension) or ``Partial`` (the sum over the
group is the value). A ``Shard`` is written in terms of a *grid*: ``length`` positions, of which rank ``r`` of ``P``
holds the ``L = ceil(length / P)`` positions ``[r * L, (r + 1) * L)``, as ``torch.chunk`` cuts them. The tensor
dimension is the product ``outer x size x inner`` of row-major factors, where the middle factor covers the grid
positions ``[start, start + size)``: a window. Every rank's local tensor has ``outer * L * inner`` rows, whatever the
window and whether or not ``P`` divides ``length``; rows that lie outside the window are *padding rows*. Their content
is arbitrary but finite, no rule lets it reach a valid row, and so their gradient is exactly zero.

Two sharded dimensions fit together only when grid, window and factors are the same; lengths alone prove nothing about
which dimension of an operator they belong to, that is what the rules are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .exact_division import undivided

IntLike = int | torch.SymInt


def known_equal(a: IntLike, b: IntLike) -> bool:
    """True when ``a == b`` is certain for every size that the guards so far admit; installs no guard."""
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt) and a.node.expr == b.node.expr:
        return True  # the common case by far, a hundred times cheaper than asking the shape environment
    a, b = settled(a), settled(b)
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt) and a.node.expr == b.node.expr:
        return True
    with disable_proxy_modes_tracing():  # a comparison is no part of the program
        return bool(statically_known_true(a == b))


def known_divides(divisor: IntLike, value: IntLike) -> bool:
    """True when ``value`` is certainly a multiple of ``divisor``; installs no guard."""
    divisor, value = settled(divisor), settled(value)
    if isinstance(divisor, int) and divisor == 0:
        return False
    return bool(statically_known_true(value % divisor == 0))


def settled(value: IntLike) -> IntLike:
    """A symbolic size that is a number for certain, as that number: a trace follows symbols, not constant symbols.
    Divisions without a remainder are carried out.
    """
    if isinstance(value, torch.SymInt):
        number = value.node.maybe_as_int()
        return undivided(value) if number is None else number
    return value


def product(sizes: Sequence[IntLike]) -> IntLike:
    """Product of sizes; 1 for none."""
    result: IntLike = 1
    for size in sizes:
        if not isinstance(size, int) or size != 1:
            result = size if isinstance(result, int) and result == 1 else result * size
    return settled(result)


@dataclass(frozen=True)
class Replicate:
    """The whole value is on every rank of the axis, and so is its whole gradient."""

    def __str__(self) -> str:
        return "replicate"


@dataclass(frozen=True)
class Partial:
    """The value is the sum of what the ranks hold; its gradient is whole on every rank."""

    def __str__(self) -> str:
        return "partial(sum)"


@dataclass(frozen=True, eq=False)
class Shard:
    """One dimension is cut over the ranks.

    Args:
        dim: the cut dimension, counted from the front.
        length: number of positions of the grid that is cut into equal blocks of ``ceil(length / P)``.
        size: number of grid positions that the dimension covers (its window).
        start: first grid position that the dimension covers.
        outer: row-major factor of the dimension that varies more slowly than the grid.
        inner: row-major factor of the dimension that varies faster than the grid.
    """

    dim: int
    length: IntLike
    size: IntLike
    start: IntLike = 0
    outer: IntLike = 1
    inner: IntLike = 1

    def __post_init__(self) -> None:
        for name in ("length", "size", "start", "outer", "inner"):
            object.__setattr__(self, name, settled(getattr(self, name)))

    @property
    def is_plain(self) -> bool:
        """The dimension is the grid itself: no factors and no window."""
        return self.is_unfactored and self.is_full

    @property
    def is_unfactored(self) -> bool:
        return known_equal(self.outer, 1) and known_equal(self.inner, 1)

    @property
    def is_full(self) -> bool:
        """The window is the whole grid."""
        return known_equal(self.size, self.length) and known_equal(self.start, 0)

    @property
    def global_size(self) -> IntLike:
        return settled(self.outer * self.size * self.inner)

    def at(self, dim: int) -> Shard:
        """The same cut on another dimension."""
        return replace(self, dim=dim)

    def same_rows(self, other: Shard) -> bool:
        """Both cut their dimension in the same rows, whichever dimension that is."""
        factors = (self.outer, other.outer), (self.inner, other.inner)
        return self.same_window(other) and all(known_equal(a, b) for a, b in factors)

    def same_window(self, other: Shard) -> bool:
        """Both cover the same positions of the same grid, whatever their factors."""
        pairs = (self.length, other.length), (self.size, other.size), (self.start, other.start)
        return all(known_equal(a, b) for a, b in pairs)

    def __str__(self) -> str:
        text = f"shard(dim {self.dim}, {self.length}"
        if not self.is_full:
            text += f", window [{self.start}, {self.start + self.size})"
        if not self.is_unfactored:
            text += f", {self.outer} x {self.size} x {self.inner}"
        return text + ")"


Placement = Replicate | Partial | Shard
REPLICATE = Replicate()
PARTIAL = Partial()


def same_placement(a: Placement, b: Placement) -> bool:
    """True when ``a`` and ``b`` certainly describe the same local tensors."""
    if isinstance(a, Shard) and isinstance(b, Shard):
        return a.dim == b.dim and a.same_rows(b)
    return type(a) is type(b)


def shard_of_dim(shape: Sequence[IntLike], dim: int) -> Shard:
    """The plain cut of a whole dimension: the grid is the dimension itself."""
    return Shard(dim=dim, length=shape[dim], size=shape[dim])


def map_view(shard: Shard, source: Sequence[IntLike], target: Sequence[IntLike]) -> Shard | None:
    """Follow a cut through a row-major reshape from sizes ``source`` to sizes ``target``.

    The flat index of an element is ``((o * size) + n) * inner + i``; a reshape keeps it, so the target dimension that
    holds ``n`` is the one whose own strides leave whole factors of ``outer`` in front of ``n`` and of ``inner``
    behind it. This is index arithmetic, exact whatever the sizes are; when it cannot be proven with the symbols at
    hand, or ``n`` is split over two dimensions, the answer is None. Sizes are never divided by ``size``: symbolic
    windows do not divide provably.
    """
    outer = settled(product(source[: shard.dim]) * shard.outer)
    inner = settled(shard.inner * product(source[shard.dim + 1 :]))
    found: list[Shard] = []
    for dim in reversed(range(len(target))):
        before, after = product(target[:dim]), product(target[dim + 1 :])
        if not (known_divides(before, outer) and known_divides(after, inner)):
            continue
        new_outer, new_inner = outer // before, inner // after
        if known_equal(target[dim], new_outer * shard.size * new_inner):
            found.append(replace(shard, dim=dim, outer=new_outer, inner=new_inner))
    # A window of one position fits more than one dimension. All are exact; the one that is nothing but the window, at
    # its old place if it is still there, is the one that the model means.
    plain = [cut for cut in found if cut.is_unfactored]
    kept = [cut for cut in plain if cut.dim == shard.dim]
    rows = [cut for cut in found if known_equal(cut.inner, 1)]
    return next(iter(kept or plain or rows or found), None)
