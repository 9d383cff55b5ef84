"""Which inputs of a model run over the sequence, and along which dimension.

A tensor is marked by an attribute ``tag = (key, dimension)``, the one that DeepSpeed's AutoSP uses (a bare string means
dimension 1). Dynamo carries a tensor's attributes into the graph as ``node.meta["tensor_dict"]``, where `read_tag`
finds it. Where no input is tagged, `recognise` goes by the argument names of Hugging Face forwards.

Keys are those argument names (``"input_ids"``); DeepSpeed's spellings (``"input_id"``) mean the same everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autosp import mesh
from autosp.dynamo_settings import ignore_transformers_warnings
from autosp.errors import InputError

TAG = "tag"
_ALIASES = {
    "input_id": "input_ids",
    "label_id": "labels",
    "label_ids": "labels",
    "position_id": "position_ids",
}
# How a tensor of a key lies on the token grid, i.e. on the dimensions of input_ids, (batch, sequence) as a rule.
_GRID = "the shape of input_ids"
_ROWS = "the shape of input_ids and one more dimension at the end"
_POSITIONS = "(sequence,), the shape of input_ids, or that with one more dimension in front"
_MASK = "the shape of input_ids, or (..., query, key) in 3 or 4 dimensions"
_LAYOUTS = {
    "input_ids": _GRID,
    "labels": _GRID,
    "shift_labels": _GRID,
    "token_type_ids": _GRID,
    "position_ids": _POSITIONS,
    "attention_mask": _MASK,
    "inputs_embeds": _ROWS,
}
_CONTAINERS = ("kwargs", "batch", "inputs")

SequenceDim = int | Mapping[str, int | None]


def prepare_autosp_inputs(
    input_id: torch.Tensor | None,
    label_id: torch.Tensor | None = None,
    position_id: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    seq_dim: SequenceDim = 1,
    **more: torch.Tensor | None,
) -> tuple[Any, ...]:
    """Tag the inputs of one step and mark their sequence dimensions dynamic, so that a new length does not recompile.

    The tensors themselves are returned, in order: ``(input_id, label_id, position_id, attention_mask)``, and when
    `more` is given a dict of those as a fifth element. A dimension of length 0 or 1, or not longer than the sequence
    group, is tagged but not marked dynamic, since torch always compiles those lengths separately.

    Args:
        input_id: token ids, any integer dtype, usually (batch, sequence). None only if ``inputs_embeds`` is in `more`.
        label_id, position_id, attention_mask, more: further inputs, None for one that is not there. `more` is by the
            model's argument names (``inputs_embeds=``, ``shift_labels=``, ...).
        seq_dim: the sequence dimension **of the token ids**, negative to count from the end; 0 for (sequence, batch).
            The other tensors follow it by what they are: position ids may be (sequence,) or, for multimodal rotary
            embeddings, (3, batch, sequence); ``inputs_embeds`` has one more dimension at the end; an attention mask of
            3 or 4 dimensions is (..., query, key), is tagged on its last dimension, and both are marked dynamic.
            A mapping gives the dimension of a tensor by its key instead (literally; negative counts from that tensor's
            end; None for a tensor that does not run over the sequence, such as one label for each text); keys that are
            missing from it are treated as with 1.

    Raises:
        InputError: something is not a tensor, lacks the dimension, or is given twice. Nothing is tagged then.
    """
    named = {"input_ids": input_id, "labels": label_id, "position_ids": position_id, "attention_mask": attention_mask}
    for name, value in more.items():
        key = canonical(name)
        if named.get(key) is not None:
            raise InputError(f"{name!r} is given twice: as an argument of its own and by name")
        named[key] = value
    if named["input_ids"] is None and named.get("inputs_embeds") is None:
        raise InputError("no token ids: give input_id, or inputs_embeds by name")
    _tag_all({key: value for key, value in named.items() if value is not None}, seq_dim)
    given = (input_id, label_id, position_id, attention_mask)
    return (*given, dict(more)) if more else given


def prepare_batch(batch: Mapping[str, Any], seq_dim: SequenceDim = 1) -> dict[str, Any]:
    """`prepare_autosp_inputs` for a mapping, so that ``model(**autosp.prepare_batch(batch))`` works.

    Returns a dict with every item of `batch`. The inputs known by name (input_ids, inputs_embeds, labels, shift_labels,
    position_ids, attention_mask, token_type_ids) and those that a mapping `seq_dim` names are tagged; other items and
    None pass through.

    Args:
        batch: the keyword arguments of the model's forward.
        seq_dim: as for `prepare_autosp_inputs`.

    Raises:
        InputError: `batch` is no mapping or holds no token ids, or an input lacks its sequence dimension. Nothing is
            tagged then.
    """
    if not isinstance(batch, Mapping):
        raise InputError(f"a batch is a mapping from argument names to tensors, not {type(batch).__name__}")
    named_dims = {canonical(name) for name in seq_dim} if isinstance(seq_dim, Mapping) else set()
    chosen: dict[str, Any] = {}
    for name, value in batch.items():
        key = canonical(name)
        if value is None or (key not in _LAYOUTS and key not in named_dims):
            continue
        if key in chosen:
            raise InputError(f"the batch holds {key!r} twice, under two spellings: {list(batch)}")
        chosen[key] = value
    if "input_ids" not in chosen and "inputs_embeds" not in chosen:
        raise InputError(f"the batch holds neither input_ids nor inputs_embeds; its keys: {list(batch)}")
    _tag_all(chosen, seq_dim)
    return dict(batch)


def canonical(key: str) -> str:
    """The one spelling of an input's key: ``"input_id"`` and ``"input_ids"`` are both ``"input_ids"``."""
    return _ALIASES.get(key, key)


def read_tag(source: object, ndim: int | None = None) -> tuple[str, int] | None:
    """The ``(key, dimension)`` tag of a tensor, or of a dict of a tensor's attributes; None when it has none.

    Args:
        source: a tensor, or what Dynamo keeps in ``placeholder.meta["tensor_dict"]``.
        ndim: the tensor's number of dimensions, to turn a negative dimension into a plain one; a tensor's own is known.
    """
    if isinstance(source, Mapping):
        tag = source.get(TAG)
    else:
        tag = getattr(source, TAG, None)
        ndim = source.ndim if isinstance(source, torch.Tensor) else ndim
    if isinstance(tag, str):
        return canonical(tag), 1
    if not (isinstance(tag, (tuple, list)) and len(tag) == 2 and isinstance(tag[0], str) and type(tag[1]) is int):
        return None
    key, dim = tag
    return canonical(key), dim + ndim if dim < 0 and ndim is not None else dim


def recognise(name: str, ndim: int) -> tuple[str, int] | None:
    """The key and sequence dimension of an input by its argument name; None for a name that says nothing.

    Args:
        name: an argument name of a Hugging Face forward, or the name that Dynamo makes of one
            (``L_input_ids_``, ``L_kwargs_input_ids_``).
        ndim: the tensor's number of dimensions; the batch is taken to come before the sequence.
    """
    bare = name
    if name[:2] in ("L_", "l_"):
        bare = name[2:].rstrip("_")
        container, _, rest = bare.partition("_")
        if container in _CONTAINERS and canonical(rest) in _LAYOUTS:
            bare = rest
    key = canonical(bare)
    if key not in _LAYOUTS:
        return None
    dim = _follow(key, ndim, grid_ndim=2, grid_dim=1)
    return None if dim is None else (key, dim)


def _tag_all(tensors: dict[str, Any], seq_dim: SequenceDim) -> None:
    """Check every tensor, then tag every tensor."""
    ignore_transformers_warnings()
    for key, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"{key} is a {type(tensor).__name__}; a torch.Tensor is expected")
    dims = _dims(tensors, seq_dim)
    # torch compiles sizes 0 and 1 separately, and so a length of which each rank gets at most one token.
    state = mesh.current()
    shortest = 1 if state is None else max(1, state.sp_size)
    first: dict[int, str] = {}
    for key, dim in dims.items():
        owner = first.setdefault(id(tensors[key]), key)
        if dims[owner] != dim:
            raise InputError(f"{owner} and {key} are one tensor, with sequence dimensions {dims[owner]} and {dim}")
    for key in first.values():  # a tensor that is labels too keeps its first key
        tensor, dim = tensors[key], dims[key]
        dynamic = (tensor.ndim - 2, tensor.ndim - 1) if _is_square_mask(key, tensor.ndim) else (dim,)
        for index in {dim, *dynamic}:
            if tensor.shape[index] > shortest:
                # Not enforced: a model may fix a length (a BlockMask, a loop over tokens) and compile anew for each.
                torch._dynamo.maybe_mark_dynamic(tensor, index)
        setattr(tensor, TAG, (key, dim))


def _dims(tensors: dict[str, torch.Tensor], seq_dim: SequenceDim) -> dict[str, int]:
    """The sequence dimension of each tensor that has one, in the tensors' order."""
    if isinstance(seq_dim, Mapping):
        exact = {canonical(key): dim for key, dim in seq_dim.items()}
        if unknown := sorted(set(exact) - set(tensors)):
            raise InputError(f"seq_dim names {unknown}, which are not among the inputs {sorted(tensors)}")
        common = 1
    else:
        exact, common = {}, seq_dim
    for key, dim in [*exact.items(), ("seq_dim", common)]:
        if dim is not None and type(dim) is not int:
            raise InputError(f"the sequence dimension of {key} is {dim!r}; an int is expected")
    grid_ndim = tensors["input_ids"].ndim if "input_ids" in tensors else tensors["inputs_embeds"].ndim - 1
    dims = {}
    for key, tensor in tensors.items():
        if key not in exact:
            dims[key] = _follow_or_raise(key, tensor, grid_ndim, common)
        elif (dim := exact[key]) is not None:
            dims[key] = _in_range(key, tensor, dim)
    return dims


def _follow_or_raise(key: str, tensor: torch.Tensor, grid_ndim: int, common: int) -> int:
    shape = tuple(tensor.shape)
    if not -grid_ndim <= common < grid_ndim:
        raise InputError(f"seq_dim is {common}, but {key} has shape {shape}: token ids have {grid_ndim} dimensions")
    if key not in _LAYOUTS:
        return _in_range(key, tensor, common)
    dim = _follow(key, tensor.ndim, grid_ndim, common % grid_ndim)
    if dim is None:
        raise InputError(
            f"{key} has shape {shape}; with token ids of {grid_ndim} dimensions, {_LAYOUTS[key]} is expected. Give its "
            f"sequence dimension by seq_dim={{{key!r}: dimension}}, or None if it has none"
        )
    return dim


def _follow(key: str, ndim: int, grid_ndim: int, grid_dim: int) -> int | None:
    """Where the sequence dimension of a known input is, given its place among the dimensions of the token ids."""
    layout = _LAYOUTS[key]
    if _is_square_mask(key, ndim) and ndim != grid_ndim:
        return ndim - 1
    if layout is _POSITIONS and ndim == 1:
        return 0
    if layout is _POSITIONS and ndim == grid_ndim + 1:
        return grid_dim + 1
    if ndim == grid_ndim + (layout is _ROWS):
        return grid_dim
    return None


def _is_square_mask(key: str, ndim: int) -> bool:
    return key == "attention_mask" and ndim in (3, 4)


def _in_range(key: str, tensor: torch.Tensor, dim: int) -> int:
    if not -tensor.ndim <= dim < tensor.ndim:
        raise InputError(f"{key} has shape {tuple(tensor.shape)} and no dimension {dim}; give its own in seq_dim")
    return dim % tensor.ndim
