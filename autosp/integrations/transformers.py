"""The Trainer of transformers, and Accelerate, with sequence groups.

Both split data over all ranks and gather metrics from all of them. With sequence groups, data is split over data
parallelism only, and one rank of each group brings its metrics. `SequenceParallelAccelerator` changes these two public
methods; `SequenceParallelTrainerMixin` lets a Trainer use it and compiles its model.

What needs no change: both average gradients over all ranks (DistributedDataParallel), the logged loss is the mean over
all ranks, and ``num_items_in_batch``, counted over all ranks, is too large by the size of the sequence group exactly as
the factor by which the Trainer scales the loss is.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import get_sampler, prepare_data_loader
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import (
    DistributedType,
    DynamoBackend,
    RNGType,
    broadcast_object_list,
    recursively_apply,
    synchronize_rng_state,
)
from torch.distributed.tensor import DTensor
from torch.utils.data import RandomSampler

from autosp.errors import ConfigError
from autosp.integrations._prepare import check_model, compile_modules, compiled_modules, find_state, reduction_for_mean
from autosp.mesh import AutoSPState

_NAME = "autosp.integrations.transformers"
_SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class SequenceParallelAccelerator(Accelerator):
    """An ``Accelerator`` whose loaders are split over data parallelism only, so that a sequence group shares a batch.

    Call `autosp.initialize` first. Give the uncompiled model to `compile_model`, then prepare it as usual.

    Raises:
        InputError: `autosp.initialize` was not called.
        ConfigError: an engine of another integration is asked for, or the mesh has a vocabulary axis.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adopt()

    def adopt(self) -> None:
        """Bind this accelerator to the current mesh."""
        self._autosp_for_metrics = False
        self._autosp_state = find_state(None, _NAME, alone=True)
        if self.distributed_type not in _SUPPORTED:
            raise ConfigError(
                f"{_NAME}: {self.distributed_type.value} is asked for; only DistributedDataParallel is served here. "
                "Use autosp.integrations.fsdp or autosp.integrations.deepspeed in a loop of your own"
            )
        if self.dispatch_batches:
            raise ConfigError(
                f"{_NAME}: dispatch_batches hands each rank another slice of a batch; set it to False or None"
            )
        if self.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise ConfigError(
                f"{_NAME}: Accelerate is told to compile with {self.state.dynamo_plugin.backend.value}; leave "
                "dynamo_backend (or ACCELERATE_DYNAMO_BACKEND) out: compile_model compiles"
            )
        parallelism = getattr(self, "parallelism_config", None)
        if parallelism is not None and parallelism.total_size > 1:
            raise ConfigError(
                f"{_NAME}: Accelerate has a parallelism_config of {parallelism.total_size} ranks; leave it out, the "
                "mesh is that of autosp.initialize"
            )

    def compile_model(self, model: torch.nn.Module, options: Mapping[str, Any] | None = None) -> torch.nn.Module:
        """Compile `model` in place with the backend "autosp", for gradients that DDP averages over all ranks.

        Raises:
            InputError, ConfigError: as `autosp.integrations.ddp.wrap`.
        """
        check_model(model, _NAME)
        state = self._autosp_state
        reduction = reduction_for_mean(state, _NAME, options)
        compile_modules([model], state, reduction=reduction, options=options)
        return model

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """As in Accelerate; warns of a model to be trained of which nothing is compiled, so that every rank computes
        whole sequences.
        """
        if self._autosp_state.sp_size > 1 and not evaluation_mode and not compiled_modules(model):
            warnings.warn(
                f"{_NAME}: prepare got a {type(model).__name__} that is not compiled, so every rank computes the whole "
                "sequence; give it to compile_model first",
                stacklevel=3,
            )
        return super().prepare_model(model, device_placement, evaluation_mode)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """As in Accelerate, but this rank's part is that of its data-parallel group, in an order that all ranks of the
        group draw alike.
        """
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        state: AutoSPState = self._autosp_state
        _seed_workers_by_group(data_loader, state.coordinates["dp"])
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=state.sizes["dp"],
            process_index=state.coordinates["dp"],
            split_batches=self.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,
            even_batches=self.even_batches,
            use_seedable_sampler=True,
            data_seed=_share_order(data_loader, self.dataloader_config.data_seed),
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As in Accelerate, but the schedule moves on as the batch grew: by the number of data-parallel groups."""
        prepared = super().prepare_scheduler(scheduler)
        if type(prepared) is AcceleratedScheduler:
            prepared.__class__ = _GroupScheduler
            prepared.groups = self._autosp_state.sizes["dp"]
        return prepared

    def gather(self, tensor: Any) -> Any:
        """As in Accelerate, from all ranks."""
        if not self._autosp_for_metrics:
            return super().gather(tensor)
        return recursively_apply(self._gather_groups, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As in Accelerate, from one rank of each sequence group: every sample once, in order."""
        self._autosp_for_metrics = True
        try:
            if use_gather_object and self._autosp_state.sp_rank:
                input_data = []
            return super().gather_for_metrics(input_data, use_gather_object)
        finally:
            self._autosp_for_metrics = False

    def _gather_groups(self, tensor: torch.Tensor) -> torch.Tensor:
        state: AutoSPState = self._autosp_state
        if state.mesh is None:
            return super().gather(tensor)
        mine = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach().contiguous()
        parts = [torch.empty_like(mine) for _ in range(state.sizes["dp"])]
        dist.all_gather(parts, mine, group=state.mesh.get_group("dp"))
        return torch.cat(parts)


class _GroupScheduler(AcceleratedScheduler):
    """Accelerate's scheduler takes as many steps as there are processes, since each brings a batch; a sequence group
    brings one.
    """

    groups: int

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self.split_batches or not self.step_with_optimizer or not self.gradient_state.sync_gradients:
            return super().step(*args, **kwargs)
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return None
        for _ in range(self.groups):
            # A schedule with an end raises past it.
            if self.scheduler._step_count <= getattr(self.scheduler, "total_steps", math.inf):
                self.scheduler.step(*args, **kwargs)
        return None


class SequenceParallelTrainerMixin:
    """Put before ``Trainer``: ``class MyTrainer(SequenceParallelTrainerMixin, Trainer)``, after `autosp.initialize`.

    The model is compiled in place. The same script on one process and on sequence groups logs the same losses, provided
    a step sees the same samples: ``per_device_train_batch_size`` counts for each data-parallel group, not each rank.
    Predictions are whole, (batch, sequence, vocabulary), each sample once and in order.

    Raises:
        InputError: `autosp.initialize` was not called, or the model is compiled already.
        ConfigError: a setting that would be wrong with sequence groups.
    """

    # What the Trainer that this is mixed into has.
    accelerator: Any
    args: Any
    model: Any
    state: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if getattr(self, "model_init", None) is None:
            self.accelerator.compile_model(self.model)

    def create_accelerator_and_postprocess(self) -> None:
        """As in Trainer, with an accelerator that knows sequence groups."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        _check_arguments(self.args)
        # The Trainer makes its accelerator itself and takes no other one.
        self.accelerator.__class__ = SequenceParallelAccelerator
        self.accelerator.adopt()
        self.gather_function = self.accelerator.gather_for_metrics
        if self.args.eval_use_gather_object:
            self.gather_function = functools.partial(self.gather_function, use_gather_object=True)

    def call_model_init(self, trial: Any = None) -> torch.nn.Module:
        """As in Trainer; the new model is compiled."""
        return self.accelerator.compile_model(super().call_model_init(trial))  # type: ignore[misc]

    def get_total_train_batch_size(self, args: Any) -> int:
        """As in Trainer; the ranks of a sequence group share their samples."""
        return super().get_total_train_batch_size(args) // self._ranks_of_a_group()  # type: ignore[misc]

    def floating_point_ops(self, inputs: Any) -> int:
        """As in Trainer, of this rank's part of a sequence."""
        return super().floating_point_ops(inputs) // self._ranks_of_a_group()  # type: ignore[misc]

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """As in Trainer (5.17 to 5.24), which sums over all ranks: each sequence group counts once."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // (
            self._ranks_of_a_group()
        )

    def _ranks_of_a_group(self) -> int:
        return self.accelerator._autosp_state.sp_size

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer, with whole predictions."""
        loss, logits, labels = super().prediction_step(*args, **kwargs)  # type: ignore[misc]
        return loss, _whole(logits), labels


def _whole(value: Any) -> Any:
    """Every DTensor in nested outputs gathered."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, (tuple, list)):
        return type(value)(_whole(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _whole(item) for key, item in value.items()}
    return value


def _check_arguments(args: Any) -> None:
    problems = {
        "label_smoothing_factor": args.label_smoothing_factor != 0,
        "train_sampling_strategy": getattr(args, "train_sampling_strategy", None) == "batch_rebalance",
        "torch_compile": bool(args.torch_compile),
        "fsdp": bool(args.fsdp),
        "deepspeed": bool(args.deepspeed),
        "auto_find_batch_size": bool(args.auto_find_batch_size),
    }
    found = [f"{name}={getattr(args, name)!r}" for name, wrong in problems.items() if wrong]
    if found:
        raise ConfigError(
            f"{_NAME}: {', '.join(found)} would be wrong with sequence groups, or is not built; leave it out (a "
            "smoothed loss belongs into the model; the model is compiled here; FSDP2 and DeepSpeed have integrations "
            "of their own)"
        )


def _share_order(data_loader: Any, seed: int | None) -> int:
    """The seed of the order of samples, rank 0's on every rank; a sampler with a generator of its own gets one that is
    rank 0's too. Ranks with other seeds would take samples of another order: some twice, some never.
    """
    shared = [torch.initial_seed() if seed is None else seed]
    broadcast_object_list(shared)
    sampler = get_sampler(data_loader)
    if hasattr(sampler, "generator") and not isinstance(sampler, RandomSampler):
        if sampler.generator is None:
            sampler.generator = torch.Generator().manual_seed(shared[0])
        else:
            synchronize_rng_state(RNGType.GENERATOR, sampler.generator)
    return shared[0]


def _seed_workers_by_group(data_loader: Any, group: int) -> None:
    """The Trainer seeds its workers by the rank; ranks of one group must draw alike."""
    init = getattr(data_loader, "worker_init_fn", None)
    if isinstance(init, functools.partial) and "rank" in init.keywords:
        data_loader.worker_init_fn = functools.partial(init.func, *init.args, **{**init.keywords, "rank": group})
