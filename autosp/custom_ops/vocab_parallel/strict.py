"""The strict mode: ids are looked at on the host, and what one rank refuses, every rank of its groups refuses."""

from __future__ import annotations

import torch

from ...errors import InputError, RankMismatchError
from .checks import Bounds
from .groups import gather_packed


def check_targets_strictly(
    logits: torch.Tensor,
    index: torch.Tensor,
    ignore_index: int,
    bounds: Bounds,
    name: str,
    tp_group: str,
    sp_group: str = "",
) -> None:
    """Look at the ids, which waits for the device and costs up to three small collectives.

    Ranks that share a vocabulary must hold the same ids: a rank answers for the ids of its own shard only, so that ids
    that differ would give numbers of different tokens.

    Args:
        logits: ``[..., V_local]``.
        index: int64 ids.
        ignore_index: the id that stands for "no target".
        bounds: this rank's shard.
        name: the argument's name, for the message.
        tp_group, sp_group: names of the groups over which vocabulary and tokens are sharded; "" for none.

    Raises:
        InputError: an id that is neither ``ignore_index`` nor in the vocabulary, here or on another rank of
            ``sp_group``; under torch.compile.
        RankMismatchError: other ids on another rank of ``tp_group``.
    """
    if torch.compiler.is_compiling():
        raise InputError("strict=True looks at the ids on the host; leave it False under torch.compile.")
    total = _vocabulary_size(logits, bounds, tp_group)
    bad = (index != ignore_index) & ((index < 0) | (index >= total))
    flat = index.flatten()
    # An odd factor per place, modulo 2**64: any one id that differs shows.
    checksum = (flat * (2 * torch.arange(flat.numel(), device=flat.device) + 1)).sum()
    shared = gather_packed(torch.stack([checksum, torch.full_like(checksum, flat.numel())]), tp_group)
    differ = (shared != shared[0]).any()
    refusals = gather_packed((bad.any() | differ).to(torch.int64).reshape(1), sp_group).flatten().tolist()
    if bool(bad.any()):
        values = sorted(set(index[bad].tolist()))[:5]
        raise InputError(f"{name} holds ids outside [0, {total}) that are not ignore_index={ignore_index}: {values}.")
    if bool(differ):
        raise RankMismatchError(
            f"{name} differs between the ranks of tp_group; ranks that share a vocabulary must get the same ids."
        )
    if any(refusals):
        ranks = [rank for rank, refused in enumerate(refusals) if refused]
        raise InputError(
            f"{name} was refused on rank(s) {ranks} of sp_group, whose own error says why: ids outside [0, {total}),"
            " or ids that differ over tp_group."
        )


def _vocabulary_size(logits: torch.Tensor, bounds: Bounds, group: str) -> int:
    """Size of the vocabulary, by one small collective where only the other ranks know it."""
    if bounds.total >= 0:
        return bounds.total
    columns = bounds.end - bounds.start if bounds.start >= 0 else logits.shape[-1]
    counts = gather_packed(torch.tensor([columns], dtype=torch.int64, device=logits.device), group)
    return int(counts.sum())
