"""Logits that are not computed yet: what a head hands to a loss that is fused with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from .linear import VocabParallelLinear


class DeferredLogits:
    """The logits of a head on its way to the loss, with the scaling and soft cap that models put between.

    ``z = softcap * tanh(x @ W.T / softcap) / divided`` is kept as ``(x, softcap, divided)``. Anything else that is done
    with the object computes the logits, as a DTensor, and does it with them.

    Args:
        head: the layer.
        hidden: ``[..., width]``.
    """

    def __init__(
        self,
        head: VocabParallelLinear,
        hidden: torch.Tensor,
        *,
        divided: float = 1.0,
        capped: bool = False,
        softcap: float | None = None,
    ) -> None:
        self.head, self.hidden = head, hidden
        self._divided, self._capped = divided, capped
        self._softcap = softcap
        self._logits: Any = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size([*self.hidden.shape[:-1], self.head.out_features])

    @property
    def is_computed(self) -> bool:
        """Whether something asked for the logits themselves."""
        return self._logits is not None

    def fused_form(self) -> tuple[float | None, float] | None:
        """``(softcap, temperature)`` of a fused loss, or None when the logits are in no such form."""
        if self._logits is not None or self._capped:
            return None
        return self._softcap, self._divided

    def logits(self) -> Any:
        """The logits, computed when they are first asked for."""
        if self._logits is None:
            head = self.head
            head.deferred = False
            try:
                z = head(self.hidden)
            finally:
                head.deferred = True
            if self._softcap is not None:
                z = torch.tanh(z / self._softcap) * self._softcap
            if self._divided != 1.0:
                z = z / self._divided
            self._logits = torch.tanh(z) if self._capped else z
        return self._logits

    def _with(self, **changes: Any) -> DeferredLogits:
        state = dict(divided=self._divided, capped=self._capped, softcap=self._softcap)
        return DeferredLogits(self.head, self.hidden, **{**state, **changes})

    def __truediv__(self, other: Any) -> Any:
        if _is_positive(other) and not self._capped and self._logits is None:
            return self._with(divided=self._divided * other)
        return self.logits() / other

    def __mul__(self, other: Any) -> Any:
        if not _is_positive(other) or self._logits is not None:
            return self.logits() * other
        if not self._capped:
            return self._with(divided=self._divided / other)
        if other == self._divided:
            return self._with(capped=False, softcap=float(other), divided=1.0)
        return self.logits() * other

    __rmul__ = __mul__

    def tanh(self) -> Any:
        plain = self._softcap is None and not self._capped and self._logits is None
        return self._with(capped=True) if plain else torch.tanh(self.logits())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.logits(), name)

    def __getitem__(self, index: Any) -> Any:
        return self.logits()[index]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.tanh and len(args) == 1 and not kwargs:
            return args[0].tanh()
        args, kwargs = tree_map(lambda x: x.logits() if isinstance(x, DeferredLogits) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
