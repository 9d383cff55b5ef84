"""Whole steps of models of which stretches run in parts: what is exact, and how much is alive at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import toys
import zoo
from pool import RankInfo, RankPool
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import autosp


class Rows(TorchDispatchMode):
    """Largest number of rows of a value that is as wide as the MLP, of 320 or of gate and up together."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.dim() >= 2 and leaf.shape[-1] in WIDTHS:
                self.most = max(self.most, leaf.numel() // leaf.shape[-1])
        return out


WIDTHS = (320, 640)
ONE_LAYER: dict[str, dict[str, int]] = {
    "llama": {"num_hidden_layers": 1, "intermediate_size": 320},
    "phi3": {"num_hidden_layers": 1, "intermediate_size": 320},
    "gpt2": {"n_layer": 1, "n_inner": 320},
    "opt": {"num_hidden_layers": 1, "ffn_dim": 320},
}


def llama(**changed: Any) -> nn.Module:
    return zoo.build("llama", **{**ONE_LAYER["llama"], **changed})


def alive(name: str, tiles: int, *, open_batch: bool) -> tuple[int, int]:
    """Elements that the forward saves, and the most rows of a wide value in the backward."""
    from autosp.backend import autosp_backend

    torch._dynamo.reset()
    autosp.initialize({"autosp": {"inner_backend": "aot_eager", "token_tiles": tiles}})
    compiled = torch.compile(zoo.build(name, **ONE_LAYER[name]), backend=autosp_backend)
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        is_fake = isinstance(tensor, torch._subclasses.FakeTensor)
        # Weights have 64 rows.
        if not is_fake and tensor.shape[-1:] in [(width,) for width in WIDTHS] and tensor.numel() > 64 * 320:
            saved.append(tensor.numel())
        return tensor

    batch = zoo.batch(512)
    if open_batch:
        for tensor in batch.values():
            torch._dynamo.mark_dynamic(tensor, 0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compiled(**autosp.prepare_batch(batch)).loss
    with Rows() as rows:
        loss.backward()
    return sum(saved), rows.most


@pytest.mark.parametrize(
    ("name", "open_batch"),
    [
        pytest.param(*case, marks=() if case in [("llama", False), ("gpt2", True)] else pytest.mark.slow)
        for case in itertools.product(ONE_LAYER, (False, True))
    ],
)
def test_no_wide_value_is_saved_or_exists_for_all_tokens(name: str, open_batch: bool, fake_ranks: Callable[..., None]):
    """Also where the number of sequences is open, as it is from the second size of a batch on."""
    fake_ranks(2)
    rows = 2 * 512 // 2  # two sequences of the batch, half of the tokens
    saved, most = alive(name, 1, open_batch=open_batch)
    assert saved >= rows * 320
    assert most == rows
    assert alive(name, 4, open_batch=open_batch) == (0, rows // 4)


@pytest.mark.parametrize("checkpoint", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_exact_in_parts(ranks: RankPool, checkpoint: bool):
    config = {"autosp": {"inner_backend": "aot_eager", "token_tiles": 3}}
    # 33 rows over two ranks: parts of 5, 5 and 7 rows; at 5 tokens no parts at all.
    for results in ranks.run(run_llama, [zoo.batch(33), zoo.batch(5)], config, checkpoint, timeout=300):
        for result in results:
            result.check()


def run_views(rank_info: RankInfo, name: str) -> list[parity.Result]:
    config = {"autosp": {"inner_backend": "aot_eager", "token_tiles": 3}}
    batches = [zoo.batch(33), zoo.batch(37, rows=1)]
    return parity.run_model(rank_info, lambda: zoo.build(name, **ONE_LAYER[name]), batches, config=config)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world_size"), [("phi3", 2), ("gpt2", 2), ("opt", 2), ("phi3", 3), ("gpt2", 3)])
def test_exact_with_views_of_wide_values(ranks: RankPool, name: str, world_size: int):
    for results in ranks.run(run_views, name, world_size=world_size, timeout=300):
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


class Views(nn.Module):
    """Gate and up in one product, taken apart by chunk and by slices; and a product of batch and tokens as one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(toys.VOCAB, 8)
        self.gate_up, self.down = nn.Linear(8, 48), nn.Linear(24, 8)
        self.up, self.out = nn.Linear(8, 24), nn.Parameter(torch.randn(24, 8))
        self.head = nn.Linear(8, toys.VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> toys.Out:
        x = self.embed(input_ids.view(-1, input_ids.shape[-1]))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        x = x + self.down(F.silu(gate) * up)
        both = self.gate_up(x)
        x = x + self.down(torch.sigmoid(both[..., 24:]) * both[..., :24])
        wide = F.gelu(self.up(x.reshape(-1, 8)).view(*x.shape[:2], 24))
        x = x + torch.addmm(self.down.bias, wide.view(-1, 24), self.out).view(x.shape)
        logits = self.head(x)
        return toys.Out(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


def run_toy_views(rank_info: RankInfo, length: int) -> list[parity.Result]:
    config = {"autosp": {"inner_backend": "aot_eager", "token_tiles": 3}}
    # One sequence more, and the number of sequences is open.
    batches = [toys.batch(length), toys.batch(length, rows=3), toys.batch(length, rows=5)]
    return parity.run_model(rank_info, Views, batches, config=config)


def test_exact_with_chunks_slices_and_merged_tokens(ranks: RankPool):
    for results in ranks.run(run_toy_views, 37, timeout=300):
        for result in results:
            result.check()


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
