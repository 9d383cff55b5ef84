"""A compiled model under DistributedDataParallel over all ranks.

DDP averages gradients over its ranks. A model compiled by hand is right under it as it is: its backward has summed
over the sequence group. `wrap` saves that second reduction: gradients leave the backward as each rank's part times the
size of the sequence group ("engine_mean"), so that DDP's average over dp x sp ranks is the sum over sp and the average
over dp, and the bucketed all-reduce is the only traffic of the backward beside attention's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from autosp.errors import InputError
from autosp.integrations._prepare import check_model, compile_modules, find_state, reduction_for_mean
from autosp.mesh import AutoSPState

_NAME = "autosp.integrations.ddp"


def wrap(
    model: torch.nn.Module,
    *,
    state: AutoSPState | None = None,
    options: Mapping[str, Any] | None = None,
    **ddp: Any,
) -> DistributedDataParallel:
    """Compile `model` in place with the backend "autosp" and wrap it in DistributedDataParallel over all ranks.

    ``no_sync``, accumulation, communication hooks and clipping after the backward work as in plain DDP: after a
    backward outside ``no_sync`` every rank holds the gradient of the whole sequence, averaged over data parallelism.

    Args:
        model: the module, not compiled, on its device. Its parameters are those of rank 0 afterwards, as DDP does it.
        state: as `autosp.initialize` returns it; by default the latest.
        options: settings for this model, laid over those of `autosp.initialize`.
        ddp: arguments of DistributedDataParallel, ``process_group`` excepted unless it holds all ranks.

    Raises:
        InputError: the model is no module or is compiled already, `autosp.initialize` was not called, or
            ``process_group`` leaves ranks out.
        ConfigError: the settings ask for a gradient reduction that does not fit, or the mesh has a vocabulary axis.
    """
    found = find_state(state, _NAME)
    check_model(model, _NAME)
    reduction = reduction_for_mean(found, _NAME, options)
    group = ddp.get("process_group")
    if group is not None and dist.get_world_size(group) != dist.get_world_size():
        raise InputError(
            f"{_NAME}: process_group holds {dist.get_world_size(group)} of {dist.get_world_size()} ranks; gradients "
            "must be averaged over data and sequence parallel ranks together: leave process_group out"
        )
    compile_modules([model], found, reduction=reduction, options=options)
    return DistributedDataParallel(model, **ddp)
