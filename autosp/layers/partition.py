"""Which rows of a vocabulary one rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..custom_ops._library import process_group
from ..custom_ops.vocab_linear import chunk_bounds
from ..errors import InputError


@dataclass(frozen=True)
class VocabPartition:
    """The shard of one rank: ids ``[start, end)`` of a vocabulary of ``size``, as ``torch.chunk`` cuts it.

    Args:
        size: ids in the whole vocabulary.
        start: first id of this rank.
        end: one past its last id; equal to ``start`` for an empty shard.
        rank: this rank's place in the tensor-parallel group.
        ranks: ranks of the group.
    """

    size: int
    start: int
    end: int
    rank: int
    ranks: int

    @classmethod
    def of(cls, size: int, ranks: int, rank: int) -> VocabPartition:
        """The shard of ``rank`` out of ``ranks``."""
        return cls(size, *chunk_bounds(size, ranks, rank), rank, ranks)

    @property
    def rows(self) -> int:
        """Ids that this rank holds."""
        return self.end - self.start

    def __str__(self) -> str:
        return f"rows [{self.start}, {self.end}) of {self.size}, rank {self.rank} of {self.ranks}"


class VocabGroup:
    """A tensor-parallel group as the layers need it: its name, this rank's place, and a mesh for DTensors.

    Args:
        group: a ProcessGroup, the name of one, a DeviceMesh of one dimension, or None for no group (never the world).

    Raises:
        InputError: anything else.
    """

    def __init__(self, group: Any) -> None:
        self._mesh: DeviceMesh | None = None
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise InputError(
                    f"tp_group is a mesh of dimensions {group.mesh_dim_names}; give one of them: mesh['tp']"
                )
            self._mesh, group = group, group.get_group()
        if isinstance(group, str) and group:
            group = process_group(group)
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise InputError(
                "tp_group must be None, a torch.distributed.ProcessGroup, the name of one or a DeviceMesh of one "
                f"dimension, got {group!r} (a rank outside a group gets no ProcessGroup from new_group)"
            )
        self.name: str = "" if group is None else group.group_name
        self.ranks: int = 1 if group is None else group.size()
        self.rank: int = 0 if group is None else group.rank()

    def mesh(self, device_type: str) -> DeviceMesh:
        """The group as a mesh of one dimension, "tp"."""
        if self._mesh is None or self._mesh.device_type != device_type:
            self._mesh = DeviceMesh.from_group(process_group(self.name), device_type, mesh_dim_names=("tp",))
        return self._mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabGroup:
        return self  # a copy of a layer works in the same group

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mesh": None}
