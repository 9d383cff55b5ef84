"""One process that stands for a rank of any group: nothing is allocated, computed or sent.

torch's "fake" process group takes part in every collective without a peer, and fake tensors have sizes and no
values. Both live in torch (``torch.testing._internal.distributed.fake_pg``, used so by torchtitan; looked at in 2.11
to 2.13); this file is the one place that uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .. import mesh
from ..errors import ConfigError


@contextmanager
def fake_ranks(world_size: int, config: Mapping[str, Any], rank: int = 0) -> Iterator[mesh.AutoSPState]:
    """This process as ``rank`` of a group of ``world_size``, initialised with ``config``.

    Raises:
        ConfigError: the process has a process group already, or the configuration does not fit the group.
    """
    if dist.is_initialized():
        raise ConfigError("this process belongs to a group already; run this command without torchrun")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield mesh.initialize(config, device_type="cpu")
    finally:
        mesh.reset()
        dist.destroy_process_group()
        torch._dynamo.reset()


@contextmanager
def fake_tensors(dtype: torch.dtype = torch.float32) -> Iterator[FakeTensorMode]:
    """Tensors made inside have sizes and no values; floating-point ones are ``dtype`` unless said."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        torch.set_default_dtype(before)


def run_step(
    model: torch.nn.Module,
    compiled: Callable[..., Any],
    batch: Mapping[str, Any],
    *,
    autocast: torch.dtype | None = None,
    backward: bool = True,
) -> None:
    """One training step on fake tensors: compiles the forward and the backward."""
    from ..inputs import prepare_batch

    enabled = autocast is not None
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=enabled):
        out = compiled(**prepare_batch(batch))
    loss = out["loss"] if isinstance(out, Mapping) and "loss" in out else getattr(out, "loss", out)
    if backward:
        loss.backward()
    model.zero_grad(set_to_none=True)
