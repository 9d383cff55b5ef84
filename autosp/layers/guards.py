"""What must not meet vocabulary-sharded parameters unseen: installed once a process, when there is the first of them.

A rank's rows look like any other parameter. What computes over all parameters of a rank (the norm of gradients, an
optimizer that looks at a whole matrix) or takes ranks for replicas (DDP, FSDP) would go on and be wrong. Only public
hooks of torch are used here; the one place where there is none is in `clip`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..custom_ops._library import process_group
from ..errors import InputError
from . import clip, optimizers
from .registry import groups_in

_ENGINES = ("DistributedDataParallel", "FullyShardedDataParallel")
_installed = False


def install() -> None:
    """Install all of them; again is no work."""
    global _installed
    if _installed:
        return
    clip.install()
    # A compiled optimizer step runs the hook beside its graph.
    hook = torch.compiler.disable(optimizers.check_optimizer, reason="a check of autosp")
    register_optimizer_step_pre_hook(hook)
    register_module_module_registration_hook(_check_wrapper)
    _installed = True


def check_replicas(group: str, ranks: Sequence[int], engine: str) -> None:
    """Refuse an engine that takes the parameters of these (global) ranks for replicas or shards of one another.

    Args:
        group: name of a tensor-parallel group.
        ranks: those that the engine works on.
        engine: what it is called in the message.

    Raises:
        InputError: several ranks of the group, which hold different rows, are among them.
    """
    mixed = sorted(set(ranks) & set(dist.get_process_group_ranks(process_group(group))))
    if len(mixed) > 1:
        raise InputError(
            f"{engine} over ranks {sorted(ranks)} would average or share rows of the vocabulary that differ: ranks "
            f"{mixed} hold different shards of the head. Give it a group of ranks with one tp coordinate: "
            "state.mesh['dp'] of autosp.initialize"
        )


def _check_wrapper(parent: nn.Module, _name: str, child: nn.Module | None) -> None:
    """An engine takes a model as its submodule: its ranks must not hold different rows."""
    engine = next((base.__name__ for base in type(parent).__mro__ if base.__name__ in _ENGINES), None)
    members = getattr(parent, "process_group", None) if engine and child is not None else None
    if child is None or engine is None or not isinstance(members, dist.ProcessGroup):
        return
    for group in sorted(groups_in(child)):
        check_replicas(group, dist.get_process_group_ranks(members), engine)
