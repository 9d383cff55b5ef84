"""``activation_memory_budget: "auto"``: the largest budget with which the compiled step fits the device.

Torch's partitioner is run with one budget after the other, from all that is fast to keep down to almost nothing, and
each result is walked through as ``autosp plan`` does: what is live at the moment of most memory. The first that fits on
every rank of the group is compiled. Nothing is guessed from formulas, and nothing is tried on the device.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any, cast

import sympy
import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx.experimental.sym_node import SymNode

from .config import AutoSPConfig
from .offload import partition

log = logging.getLogger("autosp")

BUDGETS = (1.0, 0.7, 0.5, 0.35, 0.2, 0.1, 0.05, 0.0)


class StepTooLarge(Exception):
    """Not even the smallest budget fits; there may be other ways to save memory."""

    def __init__(self, needed: float, room: float) -> None:
        super().__init__(f"{needed / 2**30:.4g} GiB needed, {room / 2**30:.4g} GiB there")
        self.needed, self.room = needed, room


class FitMemory(CustomPartitionerFn):
    """A partitioner of joint graphs that chooses the budget.

    Args:
        room: bytes that activations, gradients and temporaries of a step may take.
        largest: the largest of a number over the ranks that must choose alike; collective.
        must_fit: raise `StepTooLarge` where nothing fits; otherwise the one that needs least is taken.
        config: settings that decide what is in memory together; see `autosp.plan.schedule.scheduled_program`.
    """

    def __init__(
        self, room: float, largest: Callable[[float], float], *, must_fit: bool, config: AutoSPConfig | None = None
    ) -> None:
        self.room = room
        self.config = config
        self.largest = largest
        self.must_fit = must_fit
        self.budget: float | None = None
        self.needed = 0.0
        """Bytes of the chosen partition at its moment of most memory, on the rank that needs most."""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **settings: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        offload = self.config is not None and self.config.activation_offloading is True
        best: Any = None
        self.needed = float("inf")
        for budget in BUDGETS:
            trial = fx.GraphModule(gm, copy.deepcopy(gm.graph))
            trial.meta.update(gm.meta)
            parts = partition(trial, joint_inputs, offload=offload, budget=budget, **settings)
            needed = self.largest(peak_bytes(*parts, config=self.config))
            if needed < self.needed:  # recomputing everything at once may need more than recomputing half
                best, self.budget, self.needed = parts, budget, needed
            if needed <= self.room:
                break
        if self.needed > self.room and self.must_fit:
            raise StepTooLarge(self.needed, self.room)
        log.info("activation_memory_budget auto: %s", self)
        if self.needed > self.room:
            log.warning(
                "a step needs %.4g GiB with the best activation budget, and %.4g GiB are there: it may run out of "
                "memory. More ranks for a sequence, a fused LM head (fuse_linear_cross_entropy), the model's own "
                "activation checkpointing (with checkpointing_keeps) or activation_offloading need less",
                self.needed / 2**30, self.room / 2**30,
            )  # fmt: skip
        return best

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: torch's cache of compiled graphs pickles its settings, and a graph is what was chosen."""
        return {}

    def uuid(self) -> None:
        """None: the choice depends on more than the graph. That alone keeps nothing out of a cache: `autosp.inner`
        switches that of whole joint graphs off."""

    def __str__(self) -> str:
        if getattr(self, "budget", None) is None:  # before the choice, and the copies that a cache prints its keys of
            return "no budget chosen"
        return f"{self.budget:g}, {self.needed / 2**30:.5g} of {self.room / 2**30:.5g} GiB"


def peak_bytes(forward: fx.GraphModule, backward: fx.GraphModule, *, config: AutoSPConfig | None = None) -> float:
    """Bytes of activations, gradients and temporaries at the moment of most memory, at the sizes of the compilation."""
    from .plan.schedule import scheduled_program
    from .plan.trace import Trace
    from .plan.walk import profile

    programs = []
    for gm in (forward, backward):
        program, env = scheduled_program(gm, config), _shape_env(gm)
        for buffer in program.buffers.values():
            buffer.size = _at_hint(buffer.size, env)
        for work in program.work:
            work.flops = work.moved = work.sent = 0
        programs.append(program)
    found = profile(Trace(programs[:1], programs[1:]), 0)
    return max((moment.total for moment in found.moments.values()), default=0.0)


def _shape_env(gm: fx.GraphModule) -> Any:
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        for size in (value, *value.shape) if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                return size.node.shape_env
    return None


def _at_hint(size: Any, env: Any) -> int:
    return int(cast(int, SymNode(size, env, int, None).hint)) if isinstance(size, sympy.Expr) else int(size)


def room_on_device(device: torch.device, weights: list[torch.Tensor]) -> float:
    """Bytes that a step may take: what is free or held by the allocator without use, less the headroom of a plan, less
    AdamW's states of the trained ``weights`` (a first step is compiled before an optimizer makes them).
    """
    from .plan.estimate import OPTIMIZERS, Hardware

    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    states = sum(w.numel() * OPTIMIZERS["adamw-fp32"](w.element_size()) for w in weights)
    return free + unused - Hardware.headroom * total - states
