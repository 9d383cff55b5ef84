"""Token-wise stretches that run in parts: what is marked, and what a part holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_passes import annotated, localized
from torch.nn import functional as F

import autosp
from autosp.layout.axis import Axis
from autosp.layout.placement import Shard
from autosp.layout.stretch import TILED, join_parts, part_of
from autosp.passes.tile_tokens import tile_tokens_pass

WIDE = 40


@pytest.fixture
def axis(fake_ranks: Callable[..., None]) -> Axis:
    fake_ranks(2, 1)
    state = autosp.initialize({"autosp": {"inner_backend": "eager"}})
    return Axis("sp", 2, state.sp_rank, state.sp_group)


INPUTS = (
    torch.ones(2, 24, dtype=torch.long),
    torch.randn(5, 4),
    torch.randn(WIDE, 4),
    torch.randn(WIDE, 4),
    torch.randn(4, WIDE),
)


def gated(ids: torch.Tensor, table: Any, gate: Any, up: Any, down: Any) -> torch.Tensor:
    x = F.embedding(ids, table)
    g = F.linear(x, gate)
    wave = torch.cos(torch.arange(ids.shape[1]).unsqueeze(-1) * 0.5)
    return (x + wave + F.linear(F.silu(g) * F.linear(x, up), down)).sum()


def names(nodes: Any) -> list[str]:
    return [node.target._schema.name.split("::")[1] for node in nodes]


def test_marks_an_mlp_and_puts_its_nodes_side_by_side(axis: Axis):
    gm = tile_tokens_pass(annotated(axis, gated, INPUTS), tiles=3)
    marked = [node for node in gm.graph.nodes if TILED in node.meta]
    assert sorted(names(marked)) == ["linear", "linear", "linear", "mul", "silu"]
    (stretch,) = {node.meta[TILED] for node in marked}
    assert list(stretch.nodes) == marked
    assert names([stretch.last]) == ["linear"]
    order = {node: index for index, node in enumerate(gm.graph.nodes)}
    assert order[marked[-1]] - order[marked[0]] == len(marked) - 1
    gm.graph.lint()


def test_runs_in_parts(axis: Axis):
    gm = tile_tokens_pass(annotated(axis, gated, INPUTS), tiles=3)
    local, _ = localized(axis, gm)
    wide = [tuple(n.meta["val"].shape) for n in local.graph.nodes if "silu" in str(n.target)]
    assert wide == [(2, 4, WIDE)] * 3, "12 local rows in three parts"


def test_one_tile_changes_nothing(axis: Axis):
    gm = tile_tokens_pass(annotated(axis, gated, INPUTS), tiles=1)
    assert not any(TILED in node.meta for node in gm.graph.nodes)


def uses_a_wide_value_twice(ids: torch.Tensor, table: Any, gate: Any, up: Any, down: Any) -> torch.Tensor:
    x = F.embedding(ids, table)
    wide = F.silu(F.linear(x, gate))
    return F.linear(wide, down).sum() + wide.mean()


def sums_over_tokens(ids: torch.Tensor, table: Any, gate: Any, up: Any, down: Any) -> torch.Tensor:
    wide = F.silu(F.linear(F.embedding(ids, table), gate))
    return F.linear(wide.softmax(dim=1), down).sum()


def draws(ids: torch.Tensor, table: Any, gate: Any, up: Any, down: Any) -> torch.Tensor:
    wide = F.dropout(F.linear(F.embedding(ids, table), gate), 0.5)
    return F.linear(wide, down).sum()


def gate_without_gradient(ids: torch.Tensor, table: Any, gate: Any, up: Any, down: Any) -> torch.Tensor:
    """Moved out of its region, the gate would get a gradient that it has not."""
    x = F.embedding(ids, table)
    with torch.no_grad():
        gated = F.silu(F.linear(x, gate))
    return F.linear(gated * F.linear(x, up), down).sum()


def gate_in_low_precision(ids: torch.Tensor, table: Any, gate: Any, up: Any, down: Any) -> torch.Tensor:
    x = F.embedding(ids, table)
    with torch.autocast("cpu", torch.bfloat16):
        gated = F.linear(x, gate)
    return F.linear(F.silu(gated).float() * F.linear(x, up), down).sum()


def merged_sequence_first(ids: torch.Tensor, table: Any, gate: Any, up: Any, down: Any) -> torch.Tensor:
    """A token's rows lie side by side, one a sequence: an inner factor, as that of the experts of a token."""
    x = F.embedding(ids, table).transpose(0, 1).reshape(-1, 4)
    return F.linear(F.silu(F.linear(x, gate)), down).sum()


def each_token_for_two_experts(ids: torch.Tensor, table: Any, gate: Any, up: Any, down: Any) -> torch.Tensor:
    x = F.embedding(ids, table).reshape(-1, 4).repeat_interleave(2, dim=0)
    return F.linear(F.silu(F.linear(x, gate)), down).sum()


def keeps_a_part(ids: torch.Tensor, table: Any, gate: Any, up: Any, down: Any) -> torch.Tensor:
    """The queries, keys and values of one product go their own ways."""
    q, k = F.linear(F.embedding(ids, table), gate).chunk(2, dim=-1)
    return (q.sum(dim=1) * k.sum(dim=1)).sum()


@pytest.mark.parametrize(
    "function",
    [
        uses_a_wide_value_twice, draws, gate_without_gradient, gate_in_low_precision, merged_sequence_first,
        each_token_for_two_experts, keeps_a_part,
    ],
)  # fmt: skip
def test_leaves_alone_what_is_not_proven(axis: Axis, function: Callable[..., Any]):
    gm = tile_tokens_pass(annotated(axis, function, INPUTS), tiles=3)
    assert not any(TILED in node.meta for node in gm.graph.nodes)


def with_adapters(ids: torch.Tensor, table: Any, gate: Any, up: Any, down: Any) -> torch.Tensor:
    """Low-rank adapters beside both weights: the wide value is narrowed twice, and the results are added."""
    x = F.embedding(ids, table)
    wide = F.silu(F.linear(x, gate) + 2.0 * F.linear(F.linear(x, table[:2]), up[:, :2]))
    return (x + (F.linear(wide, down) + 2.0 * F.linear(F.linear(wide, gate[:, :2].t()), table[:4, :2]))).sum()


def test_adapters_run_in_parts_with_the_weights_beside_them(axis: Axis):
    gm = tile_tokens_pass(annotated(axis, with_adapters, INPUTS), tiles=3)
    (stretch,) = {node.meta[TILED] for node in gm.graph.nodes if TILED in node.meta}
    assert names(stretch.nodes).count("linear") == 5, "all but the adapter that reads what is narrow"
    assert names([stretch.last]) == ["add"]
    local, _ = localized(axis, gm)
    wide = [tuple(n.meta["val"].shape) for n in local.graph.nodes if "silu" in str(n.target)]
    assert wide == [(2, 4, WIDE)] * 3


def chunked(ids: torch.Tensor, table: Any, gate: Any, up: Any, down: Any) -> torch.Tensor:
    """One product for gate and up, as Phi-3 has it."""
    x = F.embedding(ids, table)
    g, u = F.linear(x, torch.cat([gate, up])).chunk(2, dim=-1)
    return (x + F.linear(F.silu(g) * u, down)).sum()


def sliced(ids: torch.Tensor, table: Any, gate: Any, up: Any, down: Any) -> torch.Tensor:
    x = F.embedding(ids, table)
    both = F.linear(x, torch.cat([gate, up]))
    return (x + F.linear(F.silu(both[..., :WIDE]) * both[..., WIDE:], down)).sum()


def merged(ids: torch.Tensor, table: Any, gate: Any, up: Any, down: Any) -> torch.Tensor:
    """Batch and tokens are one dimension from here to there, as in OPT."""
    x = F.embedding(ids, table)
    y = F.linear(F.silu(F.linear(x.reshape(-1, 4), gate)), down)
    return (x + y.view(x.shape)).sum()


def merged_for_each_product(ids: torch.Tensor, table: Any, gate: Any, up: Any, down: Any) -> torch.Tensor:
    """As GPT-2 has it; ids that are viewed first do not make the embedding a wide value."""
    x = F.embedding(ids.view(-1, ids.shape[-1]), table)
    wide = torch.addmm(gate[:, 0], x.view(-1, 4), gate.t()).view(*ids.shape, WIDE)
    wide = 0.5 * wide * (1 + torch.tanh(wide))
    y = torch.addmm(down[:, 0], wide.view(-1, WIDE), down.t())
    return (x + y.view(x.shape)).sum()


@pytest.mark.parametrize("function", [chunked, sliced, merged, merged_for_each_product])
@pytest.mark.parametrize("rows", [1, 2])
def test_views_of_wide_values_run_in_parts(axis: Axis, function: Callable[..., Any], rows: int):
    gm = tile_tokens_pass(annotated(axis, function, (INPUTS[0][:rows], *INPUTS[1:])), tiles=3)
    (stretch,) = {node.meta[TILED] for node in gm.graph.nodes if TILED in node.meta}
    gm.graph.lint()
    local, _ = localized(axis, gm)
    assert names([stretch.last])[0] in ("linear", "addmm")
    values = [node.meta.get("val") for node in local.graph.nodes if node.op == "call_function"]
    wide = [v.numel() // WIDE for v in values if isinstance(v, torch.Tensor) and v.dim() > 1 and v.shape[-1] == WIDE]
    # Weights of 4 rows aside, no value is as wide but with the 4 positions of a part.
    assert set(wide) <= {4, 4 * rows}
    assert wide.count(4 * rows) >= 6


def test_parts_hold_the_same_positions_of_each_sequence():
    x = torch.arange(2 * 5 * 3).reshape(1, 2 * 5, 3)
    shard = Shard(dim=1, length=10, size=10, outer=2)
    parts = [part_of(x, shard, 0, 2), part_of(x, shard, 2, 3)]
    torch.testing.assert_close(parts[0], x.reshape(2, 5, 3)[:, :2].reshape(1, 4, 3), rtol=0, atol=0)
    torch.testing.assert_close(join_parts(parts, shard), x, rtol=0, atol=0)
