"""What vocabulary-parallel layers have in common: rows of a table, and a state dict that says which ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ..errors import InputError
from . import guards, registry
from .partition import VocabGroup, VocabPartition


class VocabShardedModule(nn.Module):
    """A module whose parameters hold some rows of a vocabulary.

    In its state dict they are DTensors, ``Shard(0)`` over the tensor-parallel group: torch.distributed.checkpoint
    knows from them which rows a rank holds. Loading takes such DTensors, or tensors of the whole vocabulary.
    """

    partition: VocabPartition

    def __init__(self, vocab_size: int, tp_group: Any) -> None:
        super().__init__()
        self._shard(vocab_size, tp_group)

    def _shard(self, vocab_size: int, tp_group: Any) -> None:
        """Make this module, which is one already, hold rows of a vocabulary."""
        self._group = tp_group if isinstance(tp_group, VocabGroup) else VocabGroup(tp_group)
        self.partition = VocabPartition.of(vocab_size, self._group.ranks, self._group.rank)
        self.register_state_dict_post_hook(_name_rows)
        self.register_load_state_dict_pre_hook(_take_rows)
        self._guard()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._guard()  # a copy is watched as well

    def __setattr__(self, name: str, value: Any) -> None:
        # fully_shard comes by here too, with the DTensors that it puts in place of parameters.
        if isinstance(value, DTensor) and isinstance(value, nn.Parameter) and self._group.name:
            guards.check_replicas(self._group.name, value.device_mesh.mesh.flatten().tolist(), f"{name} as a DTensor")
        # A model that ties its weights by its configuration would put a whole table here.
        if name in ("weight", "bias") and type(value) is nn.Parameter and value.shape[:1] != (self.partition.rows,):
            raise InputError(
                f"{name} of a vocabulary-parallel layer became a parameter {tuple(value.shape)}, and this rank holds "
                f"{self.partition}: tie or exchange weights before autosp.initialize(config, model=model), and set "
                "config.tie_word_embeddings=False where they are not tied"
            )
        super().__setattr__(name, value)

    def set_deepspeed_parallelism(self, *_: Any) -> None:
        """Refuse DeepSpeed's engine, which asks every module that has this method before it touches a parameter.

        Raises:
            InputError: always, with a tensor-parallel group.
        """
        if self._group.name:
            raise InputError(
                "DeepSpeed's engine gives every rank the parameters of rank 0 and averages their gradients over all "
                "ranks, but this head holds other rows of the vocabulary on each; use DistributedDataParallel over "
                "state.mesh['dp'], or leave vocab_parallel_lm_head out"
            )

    def _guard(self) -> None:
        if self._group.name:
            registry.watch(self)
            guards.install()

    @property
    def tp_group(self) -> str | None:
        """Name of the tensor-parallel group; None without one."""
        return self._group.name or None

    @property
    def vocab_start_index(self) -> int:
        """First id of this rank."""
        return self.partition.start

    @property
    def vocab_end_index(self) -> int:
        """One past the last id of this rank."""
        return self.partition.end

    def sharded_names(self) -> list[str]:
        """Names of the parameters that hold rows."""
        return [name for name, value in self._parameters.items() if value is not None]

    def take_rows_of(self, whole: nn.Module) -> None:
        """Make the parameters copies of this rank's rows of those of ``whole``: dtype, device, ``requires_grad``."""
        for name in self.sharded_names():
            value = getattr(whole, name)
            rows = self.rows_of(value.detach(), name).clone()
            setattr(self, name, nn.Parameter(rows, requires_grad=value.requires_grad))

    def as_dtensor(self, rows: torch.Tensor) -> DTensor:
        """A tensor of this rank's rows ``[rows, ...]`` as a DTensor of the whole vocabulary, no gradient."""
        shape = torch.Size([self.partition.size, *rows.shape[1:]])
        stride = torch.empty(shape, device="meta").stride()
        mesh = self._group.mesh(rows.device.type)
        return DTensor.from_local(rows.detach(), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def rows_of(self, value: torch.Tensor, name: str) -> torch.Tensor:
        """This rank's rows of a whole tensor or of a DTensor of the same partition.

        Raises:
            InputError: neither; the message says which shapes are allowed.
        """
        size, part = self.partition.size, self.partition
        if isinstance(value, DTensor):
            if value.shape[0] == size and value.placements == (Shard(0),) and value.device_mesh.size() == part.ranks:
                # A DTensor out of a file is what the rank that wrote it held, wherever it is read.
                holder = list(value.device_mesh.get_coordinate() or ())  # a list in some versions, a tuple in others
                if holder != [part.rank]:
                    raise InputError(
                        f"{name} holds the rows of rank {holder} of the group, and this is rank {part.rank}: a state "
                        "dict that one rank saved has that rank's rows only. Save autosp.dense_state_dict(model), or "
                        "use torch.distributed.checkpoint, which saves all of them"
                    )
                return value.to_local()
            raise InputError(
                f"{name} is a DTensor {tuple(value.shape)} with placements {value.placements}; expected are {size} "
                f"rows, Shard(0) over {part.ranks} ranks. torch.distributed.checkpoint loads from any other number"
            )
        if value.shape[:1] != (size,):
            raise InputError(
                f"{name} has shape {tuple(value.shape)}; expected are all {size} rows of the vocabulary, or a DTensor "
                f"that says which it holds (this rank holds {part})"
            )
        return value[part.start : part.end]


def _name_rows(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    if not module._group.name:
        return
    for name in module.sharded_names():
        value = state_dict.get(prefix + name)
        if isinstance(value, DTensor):
            raise InputError(
                f"{prefix}{name} is sharded over the vocabulary and, as a DTensor, over {value.device_mesh}: a state "
                "dict of it would mix up the shards. Keep the head out of fully_shard (ignored_params)"
            )
        if value is not None:
            state_dict[prefix + name] = module.as_dtensor(value)


def _take_rows(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in module.sharded_names():
        value = state_dict.get(prefix + name)
        if isinstance(value, torch.Tensor):
            state_dict[prefix + name] = module.rows_of(value, prefix + name)


def vocab_sharded_modules(model: nn.Module) -> dict[str, VocabShardedModule]:
    """The vocabulary-parallel layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, VocabShardedModule)}


def vocab_sharded_parameters(model: nn.Module) -> Mapping[str, VocabShardedModule]:
    """The layer that each vocabulary-sharded parameter belongs to, by the parameter's name; tied ones once."""
    found, seen = {}, set()
    for prefix, module in vocab_sharded_modules(model).items():
        for name in module.sharded_names():
            parameter = getattr(module, name)
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found[f"{prefix}.{name}" if prefix else name] = module
    return found
