"""Ranks that share a vocabulary must run the same step: other inputs on each would give a plausible and wrong loss.

A head takes some columns of the logits from every rank's hidden states. Where those belong to other tokens, or to other
dropout, nothing raises. The backend compares the inputs of its compiled programs by itself; this is for models that run
without the compiler.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..custom_ops._library import process_group
from ..errors import RankMismatchError
from ..randomness import draws_in_training

_RANDOM = "the random state that dropout is drawn from"


def install(model: nn.Module, group: str) -> None:
    """Have ``model`` compare what each call of it gets over the ranks of ``group``, where it is not compiled."""
    model._shares_vocabulary_over = group  # type: ignore[assignment]
    model.register_forward_pre_hook(_before_forward, with_kwargs=True)


def _before_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        _check_alike(model, args, kwargs)


def _check_alike(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise on every rank of the group unless all were given the same inputs. Collective.

    Raises:
        RankMismatchError: with the names of what differs.
    """
    group = process_group(model._shares_vocabulary_over)
    given = dict(_leaves({**{f"argument {index}": value for index, value in enumerate(args)}, **kwargs}))
    if dist.get_backend(group) == "fake" or any(isinstance(value, FakeTensor) for value in given.values()):
        return
    device = next(model.parameters()).device
    digests = {name: digest for name, value in given.items() if (digest := _digest(value))}
    if model.training and draws_in_training(model):
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        digests[_RANDOM] = _digest(state)
    whole = bytearray(hashlib.sha256(repr(sorted(digests.items())).encode()).digest())
    mine = torch.frombuffer(whole, dtype=torch.uint8).to(device)
    everyone = torch.stack([torch.empty_like(mine)] * group.size())
    dist.all_gather(list(everyone), mine, group=group)
    if bool((everyone == mine).all().cpu()):
        return
    reports: list[Any] = [None] * group.size()
    dist.all_gather_object(reports, digests, group=group)
    names = sorted(name for name in set().union(*reports) if len({one.get(name) for one in reports}) > 1)
    ranks = dist.get_process_group_ranks(group)
    raise RankMismatchError(
        f"ranks {ranks}, which share the vocabulary of one LM head, were given different inputs for the same step: "
        f"{', '.join(names)}. Every rank of a tensor-parallel group must get the same batch, sampled ids included: "
        "shard your data loader over the data parallel axis only (autosp.data.sequence_parallel_sampler), and seed "
        "these ranks alike"
    )


def _leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Everything in nested mappings and lists, but a cache of what was computed alike before."""
    for name, value in values.items():
        if name == "past_key_values":
            continue
        if isinstance(value, Mapping):
            yield from _leaves({f"{name}.{key}": each for key, each in value.items()})
        elif isinstance(value, (list, tuple)):
            yield from _leaves({f"{name}.{index}": each for index, each in enumerate(value)})
        else:
            yield name, value


def _digest(value: Any) -> str:
    """Of a tensor its dtype, shape and content; of a number or a word itself; nothing of any other object."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if type(value) not in (torch.Tensor, nn.Parameter) or value.is_meta or value.is_sparse:
        return ""
    plain = value.detach().to("cpu").contiguous()
    digest = hashlib.sha256(f"{plain.dtype}{tuple(plain.shape)}".encode())
    if plain.numel():
        digest.update(plain.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
