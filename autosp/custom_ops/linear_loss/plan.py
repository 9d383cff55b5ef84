"""How much of the logits exists at once, and which of the two ways a loss takes.

``fast``  three GEMMs: the gradient is formed beside the loss, or, for few tokens, the logits are kept in 16 bit
          (which needs no fp32 weight gradient).
``lean``  four GEMMs: only per-token statistics are kept; the logits are recomputed in the backward.
"""

from __future__ import annotations

import torch

GIB = 1 << 30
SCRATCH_BYTES = 5 * GIB // 16
"""Smallest block of logits of the lean way, and what is kept for a backward without being asked."""
LEAN_BYTES = 15 * GIB // 32
"""The block and the fp32 hidden gradient together, where that leaves more for the block."""
CHUNK_BYTES = 3 * GIB // 8
"""Chunk of logits of the fast way, beside what the weight's own gradient will take: the forward peaks at (fp32 weight
gradient + chunk), the backward at (fp32 + final weight gradient), so a chunk of that size costs nothing at the peak."""
MAX_CHUNK_BYTES = GIB
CHUNK_BYTES_IN_PLACE = 504 << 20
"""The same when the gradient goes straight into a ``main_grad``: nothing else hides the chunk. The chunk is nearly all
of half a GiB, since every chunk reads and writes the whole fp32 weight gradient."""
CHUNK_BYTES_IN_PLACE_GROUP = 15 * GIB // 32
"""Over a group, where the hidden gradient of a chunk is held in fp32 beside it."""
CHUNK_BYTES_PAIR = 2 * GIB
"""Chunk of both heads' logits of a divergence."""
MAX_ROWS = 4096
ROW_ALIGN = 64
ALIGN = 64
"""Row strides of the scratch are a multiple of this many elements: odd vocabularies keep aligned GEMMs."""


def aligned(columns: int) -> int:
    return -(-columns // ALIGN) * ALIGN


def chunk_budget(weight: torch.Tensor, largest: int, needs_weight: bool, in_place: bool, alone: bool) -> int:
    """Bytes of logits of the fast way at once, equal on all ranks.

    Args:
        weight: local head ``[V_local, H]``, of which only the width and the dtype are read.
        largest: vocabulary rows of the largest shard.
        alone: the vocabulary is not shared.
    """
    if in_place:
        return CHUNK_BYTES_IN_PLACE if alone else CHUNK_BYTES_IN_PLACE_GROUP
    hidden_by = largest * weight.shape[1] * weight.element_size() if needs_weight else 0
    return min(MAX_CHUNK_BYTES, CHUNK_BYTES + hidden_by)


def chunk_rows(chunk_size: int, tokens: int, largest: int, total: int, element_size: int, budget: int) -> int:
    """Tokens a chunk, equal on all ranks: it depends on the largest shard and the global vocabulary alone.

    Args:
        chunk_size: the caller's wish, 0 for the default.
        largest, total: vocabulary rows of the largest shard and of all shards.
        element_size: bytes of one logit of the chunk (all buffers together).
    """
    if chunk_size > 0:
        return min(chunk_size, max(1, tokens))
    fits = budget // max(1, aligned(largest) * element_size)
    # A tiny shard of a huge vocabulary would allow more rows than the per-row statistics are worth.
    fits = max(1, min(fits, MAX_ROWS if total > 4096 else 4 * MAX_ROWS))
    # As many chunks as that takes, of equal sizes: a short last one would be an inefficient GEMM.
    even = -(-tokens // max(1, -(-tokens // fits)))
    return max(1, min(fits, -(-even // ROW_ALIGN) * ROW_ALIGN))


def lean_block(tokens: int, width: int) -> int:
    """Bytes of the lean way's block of logits, beside the fp32 gradient of ``[tokens, width]`` hidden states."""
    return max(SCRATCH_BYTES, LEAN_BYTES - 4 * tokens * width)


def block_columns(chunk_size: int, tokens: int, local: int, total: int, element_size: int, budget: int) -> int:
    """Vocabulary rows a block of the lean way: no collective depends on it, so each rank may have its own."""
    limit = chunk_size * total * element_size if chunk_size > 0 else budget
    fits = max(1, min(limit // max(1, tokens * element_size), max(1, local)))
    even = -(-local // max(1, -(-local // fits)))
    return max(1, min(fits, -(-even // ALIGN) * ALIGN))


def device_memory(device: torch.device) -> int:
    """Bytes of the device's memory, or 16 GiB where it cannot be asked: the same on every rank of like machines."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return 16 * GIB


def choose_way(
    memory: str, tokens: int, weight: torch.Tensor, needs_weight: bool, itemsize: int, main_grad: bool, shared: bool
) -> str:
    """``keep``, ``form`` or ``lean`` for a loss whose upstream gradient is one number.

    Args:
        memory: the public argument: ``"auto"``, ``"fast"`` or ``"lean"``.
        tokens: number of local tokens.
        weight: local head ``[V_local, H]``.
        needs_weight: whether its gradient is needed.
        itemsize: bytes of one kept logit.
        main_grad: the weight gradient goes to a buffer of the caller's, in the backward.
        shared: a group shares the vocabulary. ``form`` has other collectives than the other two, so ranks whose shards
            differ in size must not differ in it: what is small is then told by the width alone. Whether a device has
            room is its own matter; ranks that differ in that are refused by ``groups.agree_on_shards``.
    """
    if memory == "lean":
        return "lean"
    fp32_gradient = 4 * weight.shape[0] * weight.shape[1] if needs_weight else 0
    # Few tokens: their logits are smaller than the fp32 gradient that forming in the forward would accumulate, and that
    # a main_grad would only be given afterwards.
    if shared:
        if needs_weight and itemsize * tokens <= (4 if main_grad else 2) * weight.shape[1]:
            return "keep"
    elif itemsize * tokens * weight.shape[0] <= (fp32_gradient if main_grad else fp32_gradient // 2) + GIB // 8:
        return "keep"
    if memory == "auto" and fp32_gradient + MAX_CHUNK_BYTES > device_memory(weight.device) // 8:
        return "lean"
    return "form"


def keep_per_token(memory: str, tokens: int, weight: torch.Tensor, itemsize: int) -> bool:
    """Whether a per-token result keeps its logits: when small, or when ``"fast"`` allows as much as for a mean."""
    kept = itemsize * tokens * weight.shape[0]
    if memory == "fast":
        return kept <= 4 * weight.shape[0] * weight.shape[1] + GIB // 8
    return memory == "auto" and kept <= SCRATCH_BYTES
