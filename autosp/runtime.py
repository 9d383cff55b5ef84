"""What runs around the compiled program at each step: DTensors in and out, and the checks that ranks got the same
inputs and, at the first step, hold the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .agreement import about, agree, digest_of
from .errors import InputError
from .layout.axis import Axis
from .layout.outputs import OutputSpec
from .layout.padding import pad_rows
from .mesh import AutoSPState
from .sequence_tensor import SequenceTensor, ToLocal, from_local
from .weights import check_drift, choose_watched, compare_weights


@dataclass(frozen=True)
class Checked:
    """An argument that every rank of the group must get alike: its place among the arguments and its key or name."""

    index: int
    key: str


class InputDigests:
    """Digests of the checked inputs of one step: dtype, shape and content.

    From a GPU the content is copied behind the work that is queued there already, and read when that is done, so that
    the step's own kernels can be queued in between and the device never waits for the comparison.
    """

    def __init__(self, args: Sequence[Any], checked: Sequence[Checked]) -> None:
        self._tensors = {item.key: args[item.index].detach() for item in checked}
        self.late = any(copies_behind(tensor) for tensor in self._tensors.values())
        self._host = {key: self._copy(tensor) for key, tensor in self._tensors.items()}
        # The stream of the tensor's own device, which need not be the current one.
        devices = {tensor.device for tensor in self._tensors.values() if tensor.is_cuda}
        self._copied = [torch.cuda.current_stream(device).record_event() for device in devices]

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cuda:
            return tensor.to("cpu")
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    def shapes(self) -> dict[str, bytes]:
        """Dtype and shape alone, known without waiting."""
        return {key: about(tensor) for key, tensor in self._tensors.items()}

    def whole(self) -> dict[str, bytes]:
        """Everything; waits for the copies."""
        for event in self._copied:
            event.synchronize()
        return {key: digest_of(tensor) for key, tensor in self._host.items()}


def copies_behind(tensor: torch.Tensor) -> bool:
    """Whether reading the tensor would wait for work that its device has queued."""
    return tensor.is_cuda


def describe(args: Sequence[Any], checked: Sequence[Checked]) -> str:
    """Keys, dtypes and shapes of the checked inputs, for an error message."""
    parts = [f"{c.key} {str(args[c.index].dtype).removeprefix('torch.')} {tuple(args[c.index].shape)}" for c in checked]
    return ", ".join(parts)


def check_rows(value: DTensor, ranks: int) -> None:
    """Refuse, on every rank alike, a sharded input of which some rank holds fewer than two rows.

    Dynamo makes a size of 0 or 1 a constant, so that rank would run a program of its own while the others wait for it.

    Raises:
        InputError: with the length that was got and the least that is allowed.
    """
    (placement,) = value.placements
    length = value.shape[placement.dim]  # type: ignore[attr-defined]
    last = length - (ranks - 1) * (-(-length // ranks))
    if last < 2:
        raise InputError(
            f"a value that crosses a graph break has {length} tokens, so a rank of {ranks} holds {max(last, 0)} of "
            f"them; at least 2 a rank are needed there. Use longer sequences, fewer ranks, or remove the graph break "
            '(TORCH_LOGS="graph_breaks" shows it)'
        )


class LocalProgram:
    """The compiled program of one rank, callable with the arguments of the graph that Dynamo made.

    Args:
        inner: the compiled local program.
        specs: how each of its outputs becomes what the user gets.
        axis: the sequence axis.
        state: the mesh state.
        checked: inputs compared over the group before each step; empty for none.
        outputs: "dtensor", "full" or "local".
        sharded_inputs: places of the arguments that arrive as DTensors, with the tensor dimension they are cut along.
        vocabulary: the axis of a vocabulary-parallel head, if there is one.
        vocabulary_specs: the same as `specs` for that axis; empty when nothing is cut over it.
        weights: parameters, compared over the group when they are first used.
    """

    def __init__(
        self,
        inner: Callable[..., Any],
        specs: Sequence[OutputSpec],
        axis: Axis,
        state: AutoSPState,
        checked: Sequence[Checked],
        outputs: str,
        sharded_inputs: Mapping[int, int],
        *,
        vocabulary: Axis | None = None,
        vocabulary_specs: Sequence[OutputSpec] = (),
        weights: Sequence[Checked] = (),
    ) -> None:
        self.inner = inner
        self.specs = list(specs)
        self.axis = axis
        self.state = state
        self.checked = list(checked)
        self.outputs = outputs
        self.sharded_inputs = dict(sharded_inputs)
        self.vocabulary = vocabulary
        self.vocabulary_specs = list(vocabulary_specs)
        self.weights = list(weights)
        self._watched: list[Checked] | None = None

    def __call__(self, *args: Any) -> list[Any]:
        for index, arg in enumerate(args):
            if index in self.sharded_inputs:
                check_rows(arg, self.axis.size)
            elif isinstance(arg, SequenceTensor):
                # A view made between two graphs looks whole to the one that is compiled for it.
                raise InputError(
                    f"a value of shape {tuple(arg.shape)} arrived sharded over the sequence where the compiled program "
                    "expects it whole: it is a view made outside of any graph. Make it inside the compiled model, or "
                    "clone it there"
                )
        if self.weights:
            self._check_weights(args)
        checked_args, digests = args, self._check_inputs(args) if self.checked else None
        if self.sharded_inputs:
            args = tuple(self._to_local(i, arg) if i in self.sharded_inputs else arg for i, arg in enumerate(args))
        results = self.inner(*args)
        if digests is not None and digests.late:
            agree(self.state, "step", digests.whole(), detail=describe(checked_args, self.checked))
        return [self._wrap(results, index, spec) for index, spec in enumerate(self.specs)]

    def _check_inputs(self, args: Sequence[Any]) -> InputDigests:
        """Before the step: everything, or dtypes and shapes where the content can only be read behind queued work."""
        digests = InputDigests(args, self.checked)
        payload = digests.shapes() if digests.late else digests.whole()
        agree(self.state, "step", payload, detail=describe(args, self.checked))
        return digests

    def _check_weights(self, args: Sequence[Any]) -> None:
        """At every step, since one program serves every layer, and every model, of the same code."""
        compare_weights(self.state, {item.key: args[item.index] for item in self.weights})
        if self.state.config.verify != "inputs" or not torch.is_grad_enabled():
            return
        if self._watched is None:
            name = choose_watched((item.key, args[item.index]) for item in self.weights)
            self._watched = [item for item in self.weights if item.key == name]
        for item in self._watched:
            check_drift(self.state, item.key, args[item.index])

    def _to_local(self, index: int, arg: Any) -> torch.Tensor:
        """Local rows of a DTensor, padded to the equal block that every rank holds inside."""
        local = ToLocal.apply(arg)
        dim = self.sharded_inputs[index]
        missing = self.axis.block(arg.shape[dim]) - local.shape[dim]
        if not missing:
            return local
        if not local.shape[dim]:
            shape = list(local.shape)
            shape[dim] = missing
            return local.sum() + local.new_ones(shape)
        return pad_rows(local.movedim(dim, 0), 0, missing).movedim(0, dim).contiguous()

    def _wrap(self, results: Sequence[Any], index: int, spec: OutputSpec) -> Any:
        """One output as the user gets it: whole, this rank's part, or a DTensor over the axes that it is cut over."""
        local = value = results[index]
        cuts: list[tuple[str, int]] = []
        shape = list(value.shape) if isinstance(value, torch.Tensor) else []
        specs = [(self.axis, spec)]
        if self.vocabulary is not None and self.vocabulary_specs:
            specs.append((self.vocabulary, self.vocabulary_specs[index]))
        for axis, each in specs:
            if each.shard is None:
                continue
            length, dim = int(results[each.length_index]), each.shard.dim
            block = axis.block(length)
            held = max(0, min(block, length - axis.rank * block))
            local = local if held == block else local.narrow(dim, 0, held)
            shape[dim] = length
            cuts.append((axis.name, dim))
        if not cuts or self.outputs == "local":
            return local
        mesh = self.state.mesh[tuple(name for name, _ in cuts)]
        return from_local(local, mesh, [dim for _, dim in cuts], shape)
