"""Token-wise stretches that run in parts: what is marked, what is exact, and how much is alive at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import toys
import zoo
from pool import RankInfo, RankPool
from test_passes import annotated, localized
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import autosp
from autosp.layout.axis import Axis
from autosp.layout.stretch import TILED
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


@pytest.mark.parametrize("function", [uses_a_wide_value_twice, draws, gate_without_gradient, gate_in_low_precision])
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


class Rows(TorchDispatchMode):
    """Largest number of rows of a value that is as wide as the MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.most = width, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.dim() >= 2 and leaf.shape[-1] == self.width:
                self.most = max(self.most, leaf.numel() // self.width)
        return out


def llama(**changed: Any) -> nn.Module:
    return zoo.build("llama", **{"num_hidden_layers": 1, "intermediate_size": 320, **changed})


def alive(tiles: int) -> tuple[int, int]:
    """Elements that the forward saves, and the most rows of a wide value in the backward."""
    from autosp.backend import autosp_backend

    torch._dynamo.reset()
    autosp.initialize({"autosp": {"inner_backend": "aot_eager", "token_tiles": tiles}})
    compiled = torch.compile(llama(), backend=autosp_backend)
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch._subclasses.FakeTensor) and tensor.shape[-1:] == (320,) and tensor.dim() > 2:
            saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compiled(**autosp.prepare_batch(zoo.batch(512))).loss
    with Rows(320) as rows:
        loss.backward()
    return sum(saved), rows.most


def test_no_wide_value_is_saved_or_exists_for_all_tokens(fake_ranks: Callable[..., None]):
    fake_ranks(2)
    rows = 2 * 512 // 2  # two sequences of the batch, half of the tokens
    saved, most = alive(1)
    assert saved >= 2 * rows * 320
    assert most == rows
    assert alive(4) == (0, rows // 4)


@pytest.mark.parametrize("checkpoint", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_exact_in_parts(ranks: RankPool, checkpoint: bool):
    config = {"autosp": {"inner_backend": "aot_eager", "token_tiles": 3}}
    # 33 rows over two ranks: parts of 5, 5 and 7 rows; at 5 tokens no parts at all.
    for results in ranks.run(run_llama, [zoo.batch(33), zoo.batch(5)], config, checkpoint, timeout=300):
        for result in results:
            result.check()


def run_llama(rank_info: RankInfo, batches: list[Any], config: Any, checkpoint: bool) -> list[parity.Result]:
    def build() -> nn.Module:
        model = llama()
        if checkpoint:
            model.gradient_checkpointing_enable()
        return model

    return parity.run_model(rank_info, build, batches, config=config)


class Unusual(nn.Module):
    """An MLP with an adapter beside its second weight, and one whose gate has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(toys.VOCAB, 8)
        self.up, self.gate, self.down = nn.Linear(8, 48), nn.Linear(8, 48), nn.Linear(48, 8)
        self.a, self.b = nn.Linear(48, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.head = nn.Linear(8, toys.VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> toys.Out:
        x = self.embed(input_ids)
        wide = F.gelu(self.up(x))
        x = x + self.down(wide) + 0.5 * self.b(self.a(wide))
        with torch.no_grad():
            gate = torch.sigmoid(self.gate(x))
        x = x + self.down(self.up(x) * gate)
        logits = self.head(x)
        return toys.Out(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


def run_unusual(rank_info: RankInfo) -> list[parity.Result]:
    """``check`` finds gradients that one side alone has: the gate's."""
    return parity.run_model(rank_info, Unusual, [toys.batch(37)], config={"autosp": {"token_tiles": 3}})


def test_exact_beside_an_adapter_and_a_gate_without_gradient(ranks: RankPool):
    for results in ranks.run(run_unusual, timeout=300):
        for result in results:
            result.check()


@pytest.mark.parametrize(("wide", "said"), [(24, True), (96, False)])  # 64 wide without
def test_tiles_without_effect_are_told(
    wide: int, said: bool, fake_ranks: Callable[..., None], caplog: pytest.LogCaptureFixture
):
    from autosp.backend import autosp_backend

    fake_ranks(2)
    torch._dynamo.reset()
    autosp.initialize({"autosp": {"inner_backend": "aot_eager", "token_tiles": 4, "verify": "compile"}})
    model = llama(intermediate_size=wide)
    torch.compile(model, backend=autosp_backend)(**autosp.prepare_batch(zoo.batch(64)))
    assert ("token_tiles has no effect in this graph" in caplog.text) is said


class Shared(nn.Module):
    """One MLP used twice, and a sequence-first one behind a transpose."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(toys.VOCAB, 8)
        self.up, self.down = nn.Linear(8, 48), nn.Linear(48, 8)
        self.head = nn.Linear(8, toys.VOCAB)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> toys.Out:
        x = self.embed(input_ids)
        x = x + self.mlp(x)
        x = x + self.mlp(x.transpose(0, 1)).transpose(0, 1)
        logits = self.head(x)
        return toys.Out(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


@pytest.mark.slow
def test_exact_for_a_shared_mlp_and_a_transposed_one(ranks: RankPool):
    config = {"autosp": {"inner_backend": parity.INNER, "token_tiles": 4}}
    for results in ranks.run(parity.run_model, Shared, [toys.batch(40), toys.batch(41)], config=config, world_size=3):
        for result in results:
            result.check()
