"""The order in which Inductor runs a graph, and which of its kernels are one: both decide what is in memory together.

Inductor joins elementwise kernels that run over as many elements and read the same large value, unless another kernel
must run between them, since one pass over memory is faster than two. The backward of a gated MLP is the case that
matters: what the forward gave (computed again under checkpointing) and the gradients of both factors come out of one
kernel, which holds six wide values where one after the other would hold four. Where collectives start early
(``overlap_communication``), what they wait for runs before what they do not: gradients of weights come late, and the
wide values that they are made of stay.
"""

from __future__ import annotations

import heapq
from itertools import pairwise

from torch import fx

from ..config import AutoSPConfig
from ..errors import InternalError
from ..gradient_sums import join_gradient_sums
from ..host_copy_order import order_with_copies
from .program import Program, Size, Work, read_program

_FAR = 64
"""Inductor joins no kernels that are further apart than this many."""


def scheduled_program(gm: fx.GraphModule, config: AutoSPConfig | None) -> Program:
    """Read a forward or backward graph of AOTAutograd as the program that Inductor makes of it; the graph stays.

    Args:
        config: ``overlap_communication`` joins sums of gradients and starts collectives early; ``token_tiles`` keeps
            matrix products in their order. None for the plain model.
    """
    raised = config is not None and config.overlap_communication
    in_order = config is not None and config.tiles != 1
    if not raised:
        program = read_program(gm.graph)
    else:
        graph = fx.Graph()
        graph.output(graph.graph_copy(gm.graph, {}))
        join_gradient_sums(graph)
        program = read_program(graph)
    groups = _fused(program, in_order)
    program.work = _with_copies(_ordered(program, groups, raised, in_order))
    return program


def _with_copies(works: list[Work]) -> list[Work]:
    """Copies to the host and back where `autosp.host_copy_order` puts them in the end."""
    kinds = {position: work.copies for position, work in enumerate(works) if work.copies is not None}
    if not kinds:
        return works
    maker = {number: position for position, work in enumerate(works) for number in work.made}
    needs = [sorted({maker[number] for number in work.read if number in maker} - {at}) for at, work in enumerate(works)]
    return [works[position] for position in order_with_copies(needs, kinds)]


def _fused(program: Program, in_order: bool) -> list[list[int]]:
    """Elementwise kernels that become one, by position."""
    works = program.work
    before = _dependencies(works, in_order)
    groups: list[list[int]] = []
    for position, work in enumerate(works):
        if work.elements is None:
            continue
        for members in reversed(groups):
            if position - members[-1] > _FAR or works[members[0]].elements != work.elements:
                continue
            if _share(program, works, members, position) and _may_join(before, members, position):
                members.append(position)
                _join(before, members)
                break
        else:
            groups.append([position])
    return groups


def _dependencies(works: list[Work], in_order: bool) -> list[int]:
    """For each work the set of those that must run before it, as the bits of a number."""
    maker: dict[int, int] = {}
    before: list[int] = []
    product: int | None = None
    for position, work in enumerate(works):
        found = 0
        if in_order and work.product:
            found = 0 if product is None else before[product] | 1 << product
            product = position
        for number in work.read:
            if number in maker:
                found |= before[maker[number]] | 1 << maker[number]
        before.append(found)
        maker.update(dict.fromkeys(work.made, position))
    return before


def _share(program: Program, works: list[Work], members: list[int], position: int) -> bool:
    """Whether a kernel reads what one of the others reads or makes, and that is no small thing."""
    touched = {number for member in members for number in (*works[member].read, *works[member].made)}
    large = {program.buffers[number].size for number in works[position].made}
    return any(program.buffers[number].size in large for number in touched & works[position].read)


def _may_join(before: list[int], members: list[int], position: int) -> bool:
    """Whether nothing outside the group must run after one of its kernels and before the new one."""
    group = sum(1 << member for member in members)
    between = before[position] & ~group
    while between:
        last = between.bit_length() - 1
        if last < members[0]:
            break
        if before[last] & group:
            return False
        between &= ~(1 << last)
    return True


def _join(before: list[int], members: list[int]) -> None:
    """What any of the group needs, all of it needs; what needs one of it needs all of it."""
    group = sum(1 << member for member in members)
    needs = 0
    for member in members:
        needs |= before[member]
    for member in members:
        before[member] = needs & ~group
    for position in range(members[0] + 1, len(before)):
        if before[position] & group:
            before[position] |= group | needs


def _ordered(program: Program, groups: list[list[int]], raised: bool, in_order: bool) -> list[Work]:
    """Joined work where the last of it was, and what waited for an earlier part of it right after."""
    works = program.work
    place = list(range(len(works)))
    for members in groups:
        for member in members:
            place[member] = members[-1]
    joined = {members[-1]: _merged(program, [works[member] for member in members]) for members in groups}
    left = {position: joined.get(position, work) for position, work in enumerate(works) if place[position] == position}
    maker = {number: place[position] for position, work in enumerate(works) for number in work.made}
    waits = {at: {maker[n] for n in work.read if n in maker} - {at} for at, work in left.items()}
    if in_order:
        for earlier, later in pairwise(at for at, work in left.items() if work.product):
            waits[later].add(earlier)
    urgency = _urgency(left, waits) if raised else {}
    followers: dict[int, list[int]] = {}
    for at, needed in waits.items():
        for other in needed:
            followers.setdefault(other, []).append(at)
    ready = [(urgency.get(at, 0), at) for at, needed in waits.items() if not needed]
    order: list[Work] = []
    heapq.heapify(ready)
    while ready:
        _, at = heapq.heappop(ready)
        order.append(left[at])
        for follower in followers.get(at, ()):
            waits[follower].remove(at)
            if not waits[follower]:
                heapq.heappush(ready, (urgency.get(follower, 0), follower))
    if len(order) != len(left):
        raise InternalError(f"{len(left) - len(order)} of {len(left)} kernels wait for each other")
    return order


def _urgency(left: dict[int, Work], waits: dict[int, set[int]]) -> dict[int, int]:
    """Which collective each work is needed for first, by number; work that none waits for comes last."""
    urgency = dict.fromkeys(left, len(left))
    number = 0
    for at, work in left.items():
        if not work.sent:
            continue
        pending = [at]
        while pending:
            current = pending.pop()
            if urgency[current] == len(left):
                urgency[current] = number
                pending.extend(waits[current])
        number += 1
    return urgency


def _merged(program: Program, works: list[Work]) -> Work:
    if len(works) == 1:
        return works[0]
    made = [number for work in works for number in work.made]
    read = set().union(*(work.read for work in works)) - set(made)
    moved: Size = sum((program.buffers[number].size for number in [*read, *made]), 0)
    return Work(works[-1].layer, made, read, moved=moved, elements=works[-1].elements)
