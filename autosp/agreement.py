"""Ranks of a sequence group compare notes on the host, before a difference between them can hang or go unnoticed.

A rank that was given other tokens, other shapes or other code than its peers would otherwise wait for ever in a
collective, or worse, give a plausible loss. Every comparison costs one gloo all-gather of 64 bytes a rank; only when it
fails does a second one fetch what the error message tells.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from autosp.errors import InputError, RankMismatchError

if TYPE_CHECKING:
    from autosp.mesh import AutoSPState

_KIND_BYTES = 32
_DIGEST_BYTES = 32
_WHAT_DIFFERS = {
    "compile": "compiled different programs",
    "step": "were given different inputs for the same step",
    "model": "hold different models",
}
_COMPILES_WHILE_ANOTHER_STEPS = "One rank compiles while another runs what it has compiled already"
_REMEDY = {
    "compile": "Give every rank of the group the same model, the same code and inputs of the same shapes and dtypes.",
    "step": (
        "Every rank of a sequence group, and of a tensor-parallel one, must get the same batch (autosp cuts it): shard "
        "your data loader over the data parallel axis only."
    ),
    "model": "Seed every rank alike before the model is made, or broadcast its parameters over the group.",
}


def agree(state: AutoSPState, kind: str, payload: bytes | Mapping[str, bytes], *, detail: str = "") -> None:
    """Raise on every rank of `state.check_ranks` (the sequence group) unless all came here with the same payload.

    Does nothing when the group has one rank or moves no data (torch's "fake" backend). Collective: the ranks of the
    group must call it the same number of times.

    Args:
        state: as `autosp.initialize` returns it.
        kind: where in its life the program is: "compile", "refused" (in place of "compile", by a rank that is about to
            raise), "step", "model" or another word of at most 32 bytes.
        payload: what must be equal; with a mapping, the error names the entries that differ.
        detail: a few words about this rank's payload for the error message ("input_ids int64 (2, 16)").

    Raises:
        RankMismatchError: payloads or kinds differ (on every rank), or another rank did not come within
            ``config.verify_timeout`` seconds or is gone (on the ranks that came).
        InputError: `kind` is empty or too long.
    """
    if not 0 < len(kind.encode()) <= _KIND_BYTES:
        raise InputError(f"kind is {kind!r}; a word of 1 to {_KIND_BYTES} bytes is expected")
    if state.check_group is None:
        return
    parts = dict(payload) if isinstance(payload, Mapping) else {"": payload}
    digests = {name: hashlib.sha256(part).hexdigest() for name, part in parts.items()}
    whole = hashlib.sha256(repr(sorted(digests.items())).encode()).digest()
    record = kind.encode().ljust(_KIND_BYTES, b"\0") + whole
    if len(set(_gather(state, kind, record))) == 1:
        return
    reports = _gather_reports(state, kind, (kind, digests, detail))
    raise RankMismatchError(_describe(state, reports))


def about(tensor: torch.Tensor) -> bytes:
    """Dtype and shape, as a payload."""
    return f"{tensor.dtype}{tuple(tensor.shape)}".encode()


def digest_of(tensor: torch.Tensor) -> bytes:
    """Digest of dtype, shape and content; waits for the tensor's device."""
    plain = tensor.detach().to("cpu").contiguous()
    digest = hashlib.sha256(about(plain))
    if plain.numel():
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()


def largest(state: AutoSPState, kind: str, value: float) -> float:
    """The largest ``value`` of the ranks that check one another. Collective, as `agree` is.

    Raises:
        RankMismatchError: another rank did not come in time or is gone.
    """
    if state.check_group is None:
        return value

    def ask() -> float:
        agree(state, kind, b"")  # another rank may be elsewhere: what follows needs all of them here
        everyone = [torch.empty(1, dtype=torch.float64) for _ in state.check_ranks]
        try:
            dist.all_gather(everyone, torch.tensor([value], dtype=torch.float64), group=state.check_group)
        except RuntimeError as error:
            raise RankMismatchError(_nobody_came(state, kind, error)) from error
        return max(other.item() for other in everyone)

    # A compilation asks, in the middle of tracing, with modes that are Python objects in its thread-local state, which
    # gloo's threads take along. From that thread one compilation in three stood still: the main thread in the next
    # gather, one of gloo's waiting for the interpreter. A thread of its own has no modes.
    with ThreadPoolExecutor(max_workers=1) as one:
        return one.submit(ask).result()


def _gather(state: AutoSPState, kind: str, record: bytes) -> list[bytes]:
    mine = torch.frombuffer(bytearray(record), dtype=torch.uint8)
    everyone = [torch.empty(_KIND_BYTES + _DIGEST_BYTES, dtype=torch.uint8) for _ in state.check_ranks]
    try:
        dist.all_gather(everyone, mine, group=state.check_group)
    except RuntimeError as error:
        raise RankMismatchError(_nobody_came(state, kind, error)) from error
    return [bytes(other.tolist()) for other in everyone]


def _gather_reports(state: AutoSPState, kind: str, report: tuple[str, dict[str, str], str]) -> list[Any]:
    reports: list[Any] = [None for _ in state.check_ranks]
    try:
        dist.all_gather_object(reports, report, group=state.check_group)
    except RuntimeError as error:
        raise RankMismatchError(_nobody_came(state, kind, error)) from error
    return reports


def _nobody_came(state: AutoSPState, kind: str, error: RuntimeError) -> str:
    ranks = state.check_ranks
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return (
        f"rank {dist.get_rank()} is at the {kind!r} check of its sequence group {list(ranks)}, but at "
        f"least one other rank did not come within {state.config.verify_timeout:g} s (verify_timeout) or has ended: it "
        f"runs other code, makes another number of steps, or failed (see its own output). Reported by gloo: {reason}"
    )


def _describe(state: AutoSPState, reports: list[tuple[str, dict[str, str], str]]) -> str:
    ranks = state.check_ranks
    kinds = {kind for kind, _, _ in reports}
    if len(kinds) > 1:
        places = ", ".join(f"rank {rank} at {kind!r}" for rank, (kind, _, _) in zip(ranks, reports, strict=True))
        lines = [
            f"ranks of the sequence group {list(ranks)} are at different points of the program: {places}. "
            + ("A rank refused what another accepts" if "refused" in kinds else _COMPILES_WHILE_ANOTHER_STEPS)
            + ": they were given inputs of different shapes or dtypes, or run different code.",
            _REMEDY["compile"],
        ]
    else:
        kind = kinds.pop()
        reference, odd = _split(ranks, [digests for _, digests, _ in reports])
        lines = [f"ranks of the sequence group {list(ranks)} {_WHAT_DIFFERS.get(kind, f'differ at {kind!r}')}:"]
        lines += [f"  rank {rank} differs from rank {reference}{_where(names)}" for rank, names in odd.items()]
        if kind in _REMEDY:
            lines.append(_REMEDY[kind])
    lines += [f"  rank {rank}: {detail}" for rank, (_, _, detail) in zip(ranks, reports, strict=True) if detail]
    return "\n".join(lines)


def _split(ranks: tuple[int, ...], digests: list[dict[str, str]]) -> tuple[int, dict[int, list[str]]]:
    """The rank whose payload most ranks share (the lowest of a tie), and for each other payload what differs."""
    reference = max(digests, key=lambda one: digests.count(one))
    odd = {}
    for rank, one in zip(ranks, digests, strict=True):
        if one != reference:
            odd[rank] = sorted(name for name in {**one, **reference} if one.get(name) != reference.get(name))
    return ranks[digests.index(reference)], odd


def _where(names: list[str]) -> str:
    named = [name for name in names if name]
    return f" in {', '.join(named)}" if named else ""
