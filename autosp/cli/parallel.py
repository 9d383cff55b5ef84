"""This rank's place in the run, and the few collectives that the training loop itself needs."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autosp.errors import ConfigError, RankMismatchError

# rank 0 reads and tokenizes the data while the others wait in a barrier
_CONTROL_TIMEOUT = datetime.timedelta(hours=2)
# within a sequence-parallel group the loss comes out of one all-reduce and is the same number on every rank
_LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Parallel:
    """Rank, sizes and groups of one process of the run."""

    rank: int
    world: int
    device: torch.device
    dp_size: int
    dp_rank: int
    dp_group: Any
    sp_size: int
    control: Any
    """A gloo group over all ranks, for what the host has to know each step without waiting for the GPU."""

    @property
    def first(self) -> bool:
        """Whether this is rank 0, the one that speaks and writes."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.control)

    def from_first(self, value: Any) -> Any:
        """Return rank 0's `value` on every rank."""
        box = [value if self.first else None]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the `value` of every rank, in rank order, on every rank."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.control)
        return values

    def exchange(self, values: list[float]) -> torch.Tensor:
        """Return every rank's numbers, float64 of shape (world, len(values)), on every rank."""
        mine = torch.tensor(values, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(rows, mine, group=self.control)
        return torch.stack(rows)

    def broadcast_parameters(self, model: torch.nn.Module) -> None:
        """Give every rank the weights and buffers of rank 0: data parallelism starts from equal models."""
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor, src=0)

    def average_gradients(self, model: torch.nn.Module) -> None:
        """Average the gradients over the data-parallel groups: one all-reduce in fp32, over all parameters at once.

        Over the sequence-parallel group the compiled program has summed them already.
        """
        if self.dp_size == 1:
            return
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        flat = torch.cat([_gradient_or_zeros(parameter).reshape(-1).float() for parameter in parameters])
        dist.all_reduce(flat, group=self.dp_group)
        flat /= self.dp_size
        offset = 0
        for parameter in parameters:
            mean = flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
            if parameter.grad is not None:
                parameter.grad.copy_(mean)
            elif mean.any():
                # used by another group only, such as an expert that no token of this one chose
                parameter.grad = mean.to(parameter.dtype)

    def check_same_loss(self, losses: torch.Tensor) -> None:
        """Check that the ranks of each sequence-parallel group got one loss.

        Args:
            losses: float64 of shape (world,), by rank.

        Raises:
            RankMismatchError: two ranks of a group differ, so that at least one is wrong.
        """
        groups = losses.view(self.dp_size, -1)
        spread = groups.amax(dim=1) - groups.amin(dim=1)
        if bool((spread > _LOSS_TOLERANCE * groups.abs().amax(dim=1)).any()):
            raise RankMismatchError(f"ranks of one sequence-parallel group got different losses: {losses.tolist()}")


def _gradient_or_zeros(parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def start(config: dict[str, Any], *, device: str) -> Parallel:
    """Initialise the process group and the mesh from the environment that a launcher set.

    Args:
        config: DeepSpeed-style settings; without sizes in them the whole world is one sequence-parallel group.
        device: "cpu" (gloo) or "cuda" (NCCL, one GPU a process).

    Raises:
        ConfigError: the sizes do not fit the world, or the mesh splits the vocabulary.
    """
    import autosp

    here = torch.device("cpu")
    if device == "cuda":
        here = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(here)
    state = autosp.initialize(config, device_type=device)
    if state.sizes["tp"] > 1:
        raise ConfigError('autosp train splits the sequence only: take "tensor_parallel" out of the configuration')
    # a mesh is missing only where no launcher's environment was found, and then there is no process group either
    assert state.mesh is not None
    return Parallel(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        device=here,
        dp_size=state.sizes["dp"],
        dp_rank=state.coordinates["dp"],
        dp_group=state.mesh.get_group("dp"),
        sp_size=state.sizes["sp"],
        control=dist.new_group(backend="gloo", timeout=_CONTROL_TIMEOUT),
    )
