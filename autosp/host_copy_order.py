"""The places of copies to the host and back in a scheduled program.

Inductor orders kernels by an estimate of memory in which the host's counts as the device's, so it has no reason to move
a value early or to fetch it late. The last word is here: a copy to the host starts where its value is made and ends
before the one after the next starts; a copy back ends right before its first use, and each end starts one more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from torch._inductor.ir import MultiOutput

from .custom_ops.host_copy import COPIES, FROM_HOST, FROM_HOST_DONE, TO_HOST, TO_HOST_DONE

AHEAD = 2
"""Values whose copies may be on their way while the device computes."""


def place_host_copies(snodes: list[Any]) -> list[Any]:
    """Order Inductor's scheduler nodes, as an entry of ``reorder_for_compute_comm_overlap_passes``.

    Args:
        snodes: the scheduler's nodes in an order that keeps their dependencies.

    Returns:
        The same nodes in another such order; all but those that copy stay in theirs.
    """
    items = _items(snodes)
    makers = {name: number for number, item in enumerate(items) for snode in item for name in snode.get_buffer_names()}
    needs = []
    for number, item in enumerate(items):
        names = sorted({str(dependency.name) for snode in item for dependency in snode.unmet_dependencies})
        needs.append([makers[name] for name in names if makers.get(name, number) != number])
    kinds = {number: operator for number, item in enumerate(items) if (operator := _operator(item[0])) is not None}
    return [snode for number in order_with_copies(needs, kinds) for snode in items[number]]


def _items(snodes: list[Any]) -> list[list[Any]]:
    """The nodes, and those that copy each with the node that takes the tensor out of what the operator gives."""
    items: list[list[Any]] = []
    copies: dict[str, list[Any]] = {}
    for snode in snodes:
        needed = [str(dependency.name) for dependency in snode.unmet_dependencies]
        if isinstance(getattr(snode, "node", None), MultiOutput) and len(needed) == 1 and needed[0] in copies:
            copies[needed[0]].append(snode)
            continue
        items.append([snode])
        if _operator(snode) is not None:
            copies.update(dict.fromkeys(snode.get_buffer_names(), items[-1]))
    return items


def _operator(snode: Any) -> Any:
    operator = getattr(getattr(snode, "node", None), "op_overload", None)
    return operator if operator in COPIES else None


def order_with_copies(needs: Sequence[Sequence[int]], kinds: Mapping[int, Any]) -> list[int]:
    """The places of a program's items.

    Args:
        needs: for each item, in an order that keeps dependencies, those that must run before it.
        kinds: the operator of each item that copies.

    Returns:
        The items in their new order.
    """
    return _Placing(needs, kinds).run()


class _Placing:
    def __init__(self, needs: Sequence[Sequence[int]], kinds: Mapping[int, Any]) -> None:
        self.needs = needs
        self.kinds = kinds
        self.order: list[int] = []
        self.done: set[int] = set()
        self.leaving: deque[int] = deque()
        """What ends the copies to the host that have started."""
        self.coming: deque[int] = deque()
        """Starts of copies from the host, in the order of their use."""

    def run(self) -> list[int]:
        others = [number for number in range(len(self.needs)) if number not in self.kinds]
        self.coming.extend(self._starts_by_use(others))
        waiting = [number for number, kind in self.kinds.items() if kind is TO_HOST]
        self._start_coming(AHEAD)
        for number in others:
            self._place(number)
            ready = [start for start in waiting if self.done.issuperset(self.needs[start])]
            for start in ready:
                waiting.remove(start)
                self._place(start)
        for number in range(len(self.needs)):  # the ends that are left
            self._place(number)
        return self.order

    def _place(self, number: int) -> None:
        if number in self.done:
            return
        for need in self.needs[number]:
            self._place(need)
        if self.kinds.get(number) is TO_HOST:
            if len(self.leaving) >= AHEAD:
                self._place(self.leaving.popleft())
            ends = (end for end, kind in self.kinds.items() if kind is TO_HOST_DONE and number in self.needs[end])
            self.leaving.extend(ends)
        self.done.add(number)
        self.order.append(number)
        if self.kinds.get(number) is FROM_HOST_DONE:
            self._start_coming(1)

    def _start_coming(self, count: int) -> None:
        while self.coming and count:
            start = self.coming.popleft()
            if start not in self.done:
                self._place(start)
                count -= 1

    def _starts_by_use(self, others: list[int]) -> list[int]:
        found: dict[int, None] = {}
        for number in others:
            for end in self.needs[number]:
                if self.kinds.get(end) is FROM_HOST_DONE:
                    found.update((start, None) for start in self.needs[end] if self.kinds.get(start) is FROM_HOST)
        return list(found)
