"""Vocabulary-parallel layers, operators and loss modules by themselves."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toys
from pool import RankPool
from test_vocab_head import head_config, rows
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import autosp
from autosp.custom_ops.vocab_linear import chunk_bounds
from autosp.errors import InputError
from autosp.layers.checkpoint import optimizer_state_with_rows

VOCAB, WIDTH = 50257, 6


def close(a: torch.Tensor, b: torch.Tensor, rtol: float = 1e-5) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= rtol * b.abs().max()) if b.numel() else a.shape == b.shape


def train_head(rank_info: Any, vocab: int, output: str) -> bool:
    """Three optimizer steps of a projection and a head, dense and vocabulary-parallel."""
    torch.manual_seed(1)
    trunk, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, vocab)
    group = dist.group.WORLD if rank_info.world_size > 1 else None
    layer = autosp.VocabParallelLinear.from_linear(head, group, output=output)
    mine = copy.deepcopy(trunk)
    dense, sharded = (
        torch.optim.SGD([*a.parameters(), *b.parameters()], lr=1.0, momentum=0.9)
        for a, b in ((trunk, head), (mine, layer))
    )
    loss_of = autosp.VocabParallelCrossEntropyLoss(group)
    bounds = {}
    if output == "local" and group is not None:
        bounds = dict(vocab_start_index=layer.vocab_start_index, vocab_end_index=layer.vocab_end_index)
    for step in range(3):
        x, target = torch.randn(5, WIDTH), torch.randint(0, vocab, (5,))
        target[step] = -100
        expected = F.cross_entropy(head(trunk(x)), target)
        found = loss_of(layer(mine(x)), target, **bounds)
        for optimizer, loss in ((dense, expected), (sharded, found)):
            optimizer.zero_grad()
            loss.backward()
        pairs = [(mine.weight.grad, trunk.weight.grad), (layer.weight.grad, rows(layer, head.weight.grad))]
        pairs.append((layer.bias.grad, rows(layer, head.bias.grad)))
        assert all(close(a, b) for a, b in pairs)
        assert abs(found.item() - expected.item()) < 1e-5 * expected.item()
        dense.step()
        sharded.step()
    torch.testing.assert_close(layer.weight, rows(layer, head.weight), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine.weight, trunk.weight, rtol=1e-4, atol=1e-5)
    gathered = [torch.empty_like(mine.weight) for _ in range(rank_info.world_size)]
    dist.all_gather(gathered, mine.weight.detach())
    return all(torch.equal(gathered[0], other) for other in gathered)


@pytest.mark.parametrize("ranks_", [1, 2, 4])
def test_training_steps_equal_those_of_the_dense_head(ranks: RankPool, ranks_: int) -> None:
    assert all(ranks.run(train_head, VOCAB, "dtensor", world_size=ranks_))


def test_local_columns_and_empty_shards(ranks: RankPool) -> None:
    assert all(ranks.run(train_head, 5, "local", world_size=4))


def a_layer(rank_info: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    dense = nn.Linear(4, 7, dtype=torch.bfloat16)
    torch.manual_seed(0)
    layer = autosp.VocabParallelLinear(4, 7, tp_group=dist.group.WORLD, dtype=torch.bfloat16)
    assert torch.equal(layer.weight, rows(layer, dense.weight)) and torch.equal(layer.bias, rows(layer, dense.bias))
    x = torch.randn(2, 3, 4, dtype=torch.bfloat16)
    logits = layer(x)
    assert isinstance(logits, DTensor) and logits.shape == (2, 3, 7)
    assert torch.equal(logits.full_tensor(), dense(x)) and torch.equal(
        logits.argmax(-1).full_tensor(), dense(x).argmax(-1)
    )
    layer.output = "full"
    whole = layer(x.requires_grad_())
    assert torch.equal(whole, dense(x.detach())) and torch.equal(copy.deepcopy(layer)(x), whole)
    whole.float().square().sum().backward()
    y = x.detach().requires_grad_()
    dense(y).float().square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=2e-2, atol=1e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.float()(x.detach().float()).dtype == torch.bfloat16
    return {"partition": layer.partition, "text": repr(layer)}


def test_a_layer_by_itself(ranks: RankPool) -> None:
    first, second = ranks.run(a_layer, world_size=2)
    assert [(p["partition"].start, p["partition"].end) for p in (first, second)] == [(0, 4), (4, 7)]
    assert "rows [4, 7) of 7, rank 1 of 2" in second["text"]
    assert [chunk_bounds(5, 4, rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]


def an_embedding(rank_info: Any, size: int) -> None:
    torch.manual_seed(0)
    dense = nn.Embedding(size, 3, padding_idx=1)
    torch.manual_seed(0)
    layer = autosp.VocabParallelEmbedding(size, 3, 1, dist.group.WORLD)
    assert torch.equal(layer.weight, rows(layer, dense.weight))
    ids = torch.randint(0, size, (2, 9))
    weights = torch.randn(2, 9, 3)
    assert torch.equal(layer(ids), dense(ids))
    (layer(ids) * weights).sum().backward()
    (dense(ids) * weights).sum().backward()
    assert layer.weight.grad is not None and close(layer.weight.grad, rows(layer, dense.weight.grad))
    nobody = layer(torch.tensor([size, -1, 0]))
    assert nobody[:2].isnan().all() and not nobody[2].isnan().any()


def test_an_embedding_by_itself(ranks: RankPool) -> None:
    ranks.run(an_embedding, 11, world_size=2)
    ranks.run(an_embedding, 5, world_size=4)


def operators(rank_info: Any) -> None:
    import autosp.custom_ops.vocab_softmax  # noqa: F401

    torch.manual_seed(0)
    name = dist.group.WORLD.group_name
    x, ids = torch.randn(2, 3, 4, requires_grad=True), torch.tensor([[0, 6, 3]])
    start, end = chunk_bounds(7, rank_info.world_size, rank_info.rank)
    weight = torch.randn(7, 4)[start:end].clone().requires_grad_()
    bias = torch.randn(7)[start:end].clone().requires_grad_()
    ops = torch.ops.autosp

    def check(op: Any, *args: Any) -> None:
        # torch's own wait_tensor returns its argument and does not say so: test_schema and test_faketensor fail on it.
        torch.library.opcheck(op, args, test_utils=["test_autograd_registration", "test_aot_dispatch_dynamic"])

    check(ops.vocab_linear.default, x, weight, bias, 7, name)
    check(ops.vocab_logits.default, x, weight, None, 7, name)
    check(ops.vocab_embedding.default, ids, weight, 7, 3, name)
    for log in (True, False):
        check(ops.vocab_softmax.default, x, log, torch.float32, name)
    wide = x.detach().bfloat16().requires_grad_()
    ops.enter_vocabulary(wide, name).backward(torch.full_like(wide, 1.0 + 2**-7 * rank_info.rank))
    assert torch.equal(wide.grad, torch.full((2, 3, 4), 2.0 + 2**-7).bfloat16())


def test_operators(ranks: RankPool) -> None:
    ranks.run(operators, world_size=2)


def sums_of_hidden_gradients(rank_info: Any, how: str) -> torch.Tensor:
    """One rank's part is 256 and the others' 1: 259, and a sum in bfloat16 in any order loses some of it."""
    layer = autosp.VocabParallelLinear(4, 4, False, dist.group.WORLD, output="local", dtype=torch.bfloat16)
    x = torch.zeros(1, 4, dtype=torch.bfloat16, requires_grad=True)
    parts = torch.ones(4)
    parts[rank_info.rank] = 256.0  # of the gradient's element r, rank r has the large part
    with torch.no_grad():
        layer.weight.copy_(parts.unsqueeze(0))
    if how == "full":
        layer.output = "full"
    layer(x).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("how", ["local", "full"])
def test_gradients_of_hidden_states_are_summed_in_fp32(ranks: RankPool, how: str) -> None:
    for grad in ranks.run(sums_of_hidden_gradients, how, world_size=4):
        assert torch.equal(grad, torch.full((1, 4), 259.0).bfloat16())


def clip(rank_info: Any, norm_type: float) -> None:
    model = toys.build(tied=norm_type == 2.0, vocab=49)
    reference = copy.deepcopy(model)
    autosp.initialize(head_config(2, **({"vocab_parallel_embedding": True} if norm_type == 2.0 else {})), model=model)
    torch.manual_seed(0)
    for (name, parameter), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        layer = model.get_submodule(name.rpartition(".")[0])
        whole.grad = torch.randn_like(whole)
        parameter.grad = (rows(layer, whole.grad) if hasattr(layer, "partition") else whole.grad).clone()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5, norm_type)
    torch.testing.assert_close(autosp.clip_grad_norm_(model, 0.5, norm_type), expected)
    for (name, parameter), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        layer = model.get_submodule(name.rpartition(".")[0])
        torch.testing.assert_close(
            parameter.grad, rows(layer, whole.grad) if hasattr(layer, "partition") else whole.grad
        )


@pytest.mark.parametrize("norm_type", [2.0, pytest.param(3.0, marks=pytest.mark.slow), float("inf")])
def test_clipping_counts_every_row_once(ranks: RankPool, norm_type: float) -> None:
    ranks.run(clip, norm_type, world_size=2)


def refusals_of_states(rank_info: Any) -> None:
    layer = autosp.VocabParallelLinear(3, 5, False, dist.group.WORLD)
    model = nn.Sequential(layer)
    with pytest.raises(InputError, match=r"0.weight has shape \(3, 3\); expected are all 5 rows"):
        model.load_state_dict({"0.weight": torch.zeros(3, 3)})
    other = layer.as_dtensor(layer.weight).redistribute(placements=[torch.distributed.tensor.Replicate()])
    with pytest.raises(InputError, match="placements"):
        model.load_state_dict({"0.weight": other})
    with pytest.raises(InputError, match="by parameter name is expected"):
        optimizer_state_with_rows(model, {"state": {0: {}}})
    factored = {"state": {"0.weight": {"exp_avg_sq_col": torch.zeros(3)}}, "param_groups": []}
    with pytest.raises(InputError, match="'exp_avg_sq_col' of 0.weight has shape"):
        optimizer_state_with_rows(model, factored)
    with pytest.raises(InputError, match=r"weight as a DTensor over ranks \[0, 1\] would average or share rows"):
        layer.weight = nn.Parameter(layer.as_dtensor(layer.weight))
    alone = dist.new_group([rank_info.rank], use_local_synchronization=True)
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(alone, "cpu")
    layer.weight = nn.Parameter(DTensor.from_local(layer.weight.detach(), mesh))
    with pytest.raises(InputError, match="a state dict of it would mix up the shards"):
        model.state_dict()


def test_states_that_would_mix_up_rows_are_refused(ranks: RankPool) -> None:
    ranks.run(refusals_of_states, world_size=2)


def states_of_one_rank(rank_info: Any, folder: str) -> None:
    model = nn.Sequential(autosp.VocabParallelLinear(3, 6, False, dist.group.WORLD))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model[0].weight.grad = torch.full((3, 3), 1.0 + rank_info.rank)
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/{rank_info.rank}.pt")
    dist.barrier()
    mine, first = (torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in (rank_info.rank, 0))
    model.load_state_dict(mine["model"])
    optimizer.load_state_dict(mine["optimizer"])
    optimizer.step()
    if rank_info.rank == 0:
        return
    before = model[0].weight.detach().clone()
    with pytest.raises(InputError, match=r"0.weight holds the rows of rank \[0\] of the group, and this is rank 1"):
        model.load_state_dict(first["model"])
    optimizer.load_state_dict(first["optimizer"])
    with pytest.raises(
        InputError, match=r"they are of rows \[0, 3\) of 6, rank 0 of 2, and this rank holds rows \[3, 6\)"
    ):
        optimizer.step()
    assert torch.equal(model[0].weight, before)


def test_states_that_one_rank_saved_are_refused_on_the_others(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(states_of_one_rank, str(tmp_path), world_size=2)


def test_bad_arguments_of_layers_and_losses() -> None:
    with pytest.raises(InputError, match="output is 'whole'; allowed: 'dtensor', 'full', 'local'"):
        autosp.VocabParallelLinear(3, 4, output="whole")
    with pytest.raises(InputError, match="out_features is 0"):
        autosp.VocabParallelLinear(3, 0)
    with pytest.raises(InputError, match="tp_group must be None"):
        autosp.VocabParallelLinear(3, 4, tp_group=3)
    with pytest.raises(InputError, match="a torch.nn.Linear is expected, got Bilinear"):
        autosp.VocabParallelLinear.from_linear(nn.Bilinear(2, 2, 2), None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a torch.nn.Embedding is expected, got Linear"):
        autosp.VocabParallelEmbedding.from_embedding(nn.Linear(3, 4), None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="padding_idx is 9"):
        autosp.VocabParallelEmbedding(4, 2, 9)
    with pytest.raises(InputError, match="reduction is 'avg'"):
        autosp.VocabParallelCrossEntropyLoss(reduction="avg")
    with pytest.raises(InputError, match="gather_losses=True gathers the losses over a sequence group, but sp_group"):
        autosp.VocabParallelCrossEntropyLoss(reduction="none", gather_losses=True)
    with pytest.raises(InputError, match="give labels, or shift_labels"):
        autosp.VocabParallelCausalLMLoss()(torch.randn(1, 2, 3))


def losses(rank_info: Any) -> None:
    state = autosp.initialize({"sequence_parallel_size": 2, **head_config(2)}, model=toys.build())
    tp, sp = state.mesh["tp"], state.mesh["sp"]
    with pytest.raises(InputError, match="use 'none'"):
        autosp.VocabParallelCrossEntropyLoss(tp, sp, gather_losses=True)
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 8, 11), torch.randint(0, 11, (2, 8))
    labels[0, 3] = -100
    logits.requires_grad_()
    start, end = chunk_bounds(11, 2, state.coordinates["tp"])
    tokens = slice(4 * state.sp_rank, 4 * state.sp_rank + 4)
    local = logits.detach()[:, tokens, start:end].requires_grad_()
    bounds = dict(vocab_start_index=start, vocab_end_index=end)
    each = autosp.VocabParallelCrossEntropyLoss(tp, sp, reduction="none", gather_losses=True, label_smoothing=0.1)
    found = each(local, labels[:, tokens], **bounds)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(found, expected.view(2, 8))
    weights = torch.rand(2, 8)
    (found * weights).sum().backward()
    (expected.view(2, 8) * weights).sum().backward()
    torch.testing.assert_close(local.grad, logits.grad[:, tokens, start:end])
    causal = autosp.VocabParallelCausalLMLoss(tp, sp, label_smoothing=0.1)
    with pytest.raises(InputError, match="give shift_labels"):
        causal(local, labels[:, tokens], **bounds)
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    mean = causal(local, shift_labels=shifted[:, tokens], **bounds)
    from transformers.trainer_pt_utils import LabelSmoother

    smoothed = LabelSmoother(epsilon=0.1)({"logits": logits}, labels, shift_labels=True)
    torch.testing.assert_close(mean, smoothed)
    items = causal(local, shift_labels=shifted[:, tokens], num_items_in_batch=5, **bounds)
    total = F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(items, total / 5)
    whole = autosp.VocabParallelCausalLMLoss()(logits, labels)
    torch.testing.assert_close(whole, F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))
    sharded = autosp.VocabParallelLinear(4, 11, tp_group=tp)(torch.randn(2, 8, 4))
    with pytest.raises(InputError, match="says its own bounds"):
        each(sharded, labels, **bounds)
    with pytest.raises(InputError, match="the loss was made for"):
        autosp.VocabParallelCrossEntropyLoss(sp)(sharded, labels)


def test_loss_modules_over_tokens_and_vocabulary(ranks: RankPool) -> None:
    ranks.run(losses, world_size=4)
