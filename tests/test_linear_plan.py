"""How much of the logits exists at once, at the sizes of the benchmarks: arithmetic, no device."""

from __future__ import annotations

import pytest
import torch

from autosp.custom_ops.linear_loss import plan

HALF_GIB = plan.GIB // 2
SHAPES = [(8192, 4096, 128256), (16384, 4096, 131072), (8192, 2304, 256000)]


def head(width: int, vocabulary: int) -> torch.Tensor:
    return torch.empty(vocabulary, width, dtype=torch.bfloat16, device="meta")


def rows(tokens: int, vocabulary: int, budget: int) -> int:
    return plan.chunk_rows(0, tokens, vocabulary, vocabulary, 2, budget)


@pytest.mark.parametrize("shape, expected", list(zip(SHAPES, (2048, 1856, 1024), strict=True)))
def test_a_chunk_into_a_main_grad_is_less_than_half_a_gib(shape: tuple[int, int, int], expected: int) -> None:
    tokens, width, vocabulary = shape
    step = rows(tokens, vocabulary, plan.chunk_budget(head(width, vocabulary), vocabulary, True, True, alone=True))
    assert step == expected
    assert HALF_GIB - 2 * step * plan.aligned(vocabulary) > 1 << 22, "room for what is kept of every token"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_chunk_over_a_group_leaves_room_for_its_hidden_gradient(shape: tuple[int, int, int]) -> None:
    tokens, width, vocabulary = shape
    step = rows(tokens, vocabulary, plan.chunk_budget(head(width, vocabulary), vocabulary, True, True, alone=False))
    assert 2 * step * plan.aligned(vocabulary) + 4 * step * width < HALF_GIB


@pytest.mark.parametrize("shape", SHAPES)
def test_the_lean_block_beside_the_hidden_gradient_is_less_than_half_a_gib(shape: tuple[int, int, int]) -> None:
    """The fp32 hidden gradient stands where the final one, of half its size, will: only the rest counts."""
    tokens, width, vocabulary = shape
    columns = plan.block_columns(0, tokens, vocabulary, vocabulary, 2, plan.lean_block(tokens, width))
    assert 2 * tokens * plan.aligned(columns) + 2 * tokens * width < HALF_GIB


@pytest.mark.parametrize("shape", SHAPES)
def test_a_fast_chunk_hides_behind_the_gradient_of_the_weight(shape: tuple[int, int, int]) -> None:
    """Chunk and fp32 gradient of the forward stay below the fp32 gradient, the final one and half a GiB."""
    tokens, width, vocabulary = shape
    step = rows(tokens, vocabulary, plan.chunk_budget(head(width, vocabulary), vocabulary, True, False, alone=True))
    assert 2 * step * plan.aligned(vocabulary) <= 2 * vocabulary * width + HALF_GIB


@pytest.mark.parametrize("tokens, way", [(1024, "keep"), (4096, "keep"), (4160, "form"), (16384, "form")])
def test_no_rank_of_a_group_chooses_by_the_size_of_its_own_shard(tokens: int, way: str) -> None:
    """A rank that forms the gradient in the forward issues other collectives than one that keeps its logits."""
    for rows_ in (0, 100, 16000, 64128):
        assert plan.choose_way("auto", tokens, head(4096, rows_), True, 2, False, True) == way
        assert plan.choose_way("lean", tokens, head(4096, rows_), True, 2, False, True) == "lean"
