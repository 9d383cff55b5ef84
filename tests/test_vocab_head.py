"""The vocabulary-parallel LM head without the compiler: layers, losses, models of transformers, checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toys
import zoo
from pool import RankPool
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import autosp
from autosp.custom_ops.vocab_linear import chunk_bounds
from autosp.errors import ConfigError, InputError, RankMismatchError
from autosp.layers.checkpoint import optimizer_state_with_rows, optimizer_state_without_rows
from autosp.layers.lm_head import plan_lm_head

VOCAB, WIDTH = 50257, 6


def head_config(tp: int, **more: Any) -> dict[str, Any]:
    return {"tensor_parallel": {"autotp_size": tp, "vocab_parallel_lm_head": True, **more}}


def rows(layer: Any, whole: torch.Tensor) -> torch.Tensor:
    return whole[layer.vocab_start_index : layer.vocab_end_index]


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


MODELS = {
    "llama": dict(tie_word_embeddings=False, vocab_size=131),
    "gemma2": dict(tie_word_embeddings=False, vocab_size=131),
    "gpt2": dict(vocab_size=131),
    "bert": dict(vocab_size=131, tie_word_embeddings=False),
}


def against_dense(model: nn.Module, reference: nn.Module, batch: dict[str, Any]) -> None:
    expected, found = reference(**batch), model(**batch)
    expected.loss.backward()
    found.loss.backward()
    assert abs(found.loss.item() - expected.loss.item()) <= 1e-5 * abs(expected.loss.item())
    largest = max(p.grad.abs().max().item() for p in reference.parameters() if p.grad is not None)
    for name, parameter in reference.named_parameters():
        if parameter.grad is None:
            continue
        layer = model.get_submodule(name.rpartition(".")[0])
        grad = rows(layer, parameter.grad) if hasattr(layer, "partition") else parameter.grad
        mine = model.get_parameter(name).grad
        limit = 1e-5 * max(parameter.grad.abs().max().item(), 1e-3 * largest)
        assert mine.shape == grad.shape and ((mine - grad).abs() <= limit).all(), name
    reference.zero_grad()
    model.zero_grad()


def train_model(rank_info: Any, name: str, backend: str) -> None:
    model = zoo.build(name, num_hidden_layers=1, **MODELS[name]) if name != "gpt2" else zoo.build(name, **MODELS[name])
    if name == "bert":
        model.cls.predictions.decoder.bias = nn.Parameter(model.cls.predictions.decoder.bias.detach().clone())
    reference = copy.deepcopy(model)
    tied = name == "gpt2"
    extra = {"vocab_parallel_embedding": True} if tied else {}
    autosp.initialize(head_config(2, vocab_parallel_ce_backend=backend, **extra), model=model)
    if tied:
        assert model.lm_head.weight is model.transformer.wte.weight
    batch = zoo.batch(9)
    against_dense(model, reference, batch)
    if name in ("bert", "gemma2"):
        return
    against_dense(model, reference, {**batch, "num_items_in_batch": torch.tensor(11)})
    against_dense(model, reference, {**batch, "num_items_in_batch": 7})
    ids = batch["input_ids"]
    if name == "llama":
        against_dense(model, reference, {**batch, "shift_labels": torch.roll(ids, -1, 1)})
    logits = model(**batch).logits
    assert logits is None if backend == "fused_linear" else isinstance(logits, DTensor)
    with torch.no_grad():
        whole = model(ids).logits
        assert type(whole) is torch.Tensor
        torch.testing.assert_close(whole, reference(ids).logits)
        with autosp.sharded_logits(model):
            assert isinstance(model(ids).logits, DTensor)
        assert type(model(ids, return_dict=False)[0]) is torch.Tensor
    assert isinstance(model(ids).logits, DTensor)
    settings = dict(max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(ids, **settings), reference.generate(ids, **settings))
    # The ways to and from the dense model.
    dense = autosp.dense_state_dict(model)
    assert all(torch.equal(dense[key], value) for key, value in reference.state_dict().items())
    model.load_state_dict(reference.state_dict())
    model.load_state_dict(model.state_dict())
    with pytest.raises(InputError, match="layers already: "):
        autosp.initialize(head_config(2, **extra), model=model)


@pytest.mark.parametrize(("name", "backend"), [("llama", "torch"), ("gpt2", "torch"), ("gemma2", "fused_linear")])
def test_models_of_transformers(ranks: RankPool, name: str, backend: str) -> None:
    ranks.run(train_model, name, backend, world_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backend", ["torch", "liger", "fused_linear"])
def test_all_models_of_transformers(ranks: RankPool, name: str, backend: str) -> None:
    ranks.run(train_model, name, backend, world_size=2)


def save(rank_info: Any, folder: str) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = zoo.build("gpt2", n_layer=1, vocab_size=131)
    autosp.initialize(head_config(4, vocab_parallel_embedding=True), model=model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(**zoo.batch(9)).loss.backward()
    optimizer.step()
    state = optimizer_state_with_rows(model, get_optimizer_state_dict(model, optimizer))
    dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=folder)
    dense = autosp.dense_state_dict(model)
    if rank_info.rank == 0:
        model.save_pretrained(folder + "/dense", state_dict=dict(dense))
    moments = state["state"]["transformer.wte.weight"]["exp_avg"].full_tensor()
    return {**dense, "moments": moments}


def load(rank_info: Any, folder: str, expected: dict[str, torch.Tensor]) -> None:
    import torch.distributed.checkpoint as dcp
    import transformers
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    tp = rank_info.world_size
    model = zoo.build("gpt2", n_layer=1, vocab_size=131, seed=5)
    if tp > 1:
        autosp.initialize(head_config(tp, vocab_parallel_embedding=True), model=model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = optimizer_state_with_rows(model, get_optimizer_state_dict(model, optimizer))
    loaded = {"model": model.state_dict(), "optimizer": state}
    dcp.load(loaded, checkpoint_id=folder)
    model.load_state_dict(loaded["model"])
    set_optimizer_state_dict(model, optimizer, optimizer_state_without_rows(loaded["optimizer"]))
    for name, value in autosp.dense_state_dict(model).items():
        assert torch.equal(value, expected[name]), name
    weight = model.transformer.wte.weight
    moments = optimizer.state[weight]["exp_avg"]
    assert torch.equal(moments, rows(model.lm_head, expected["moments"]) if tp > 1 else expected["moments"])
    dense = transformers.GPT2LMHeadModel.from_pretrained(folder + "/dense")
    assert torch.equal(dense.lm_head.weight, expected["lm_head.weight"])


def test_checkpoints_move_between_sizes_and_to_dense_models(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(save, str(tmp_path), world_size=4)[0]
    for size in (2, 1):
        ranks.run(load, str(tmp_path), expected, world_size=size)


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
    layer.weight = nn.Parameter(layer.as_dtensor(layer.weight))
    with pytest.raises(InputError, match="a state dict of it would mix up the shards"):
        model.state_dict()


def test_states_that_would_mix_up_rows_are_refused(ranks: RankPool) -> None:
    ranks.run(refusals_of_states, world_size=2)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.a, self.b = nn.Linear(4, 9), nn.Linear(4, 9)


class Scaled(nn.Embedding):
    pass


def test_heads_that_are_found() -> None:
    assert plan_lm_head(zoo.build("llama", tie_word_embeddings=False)).name == "lm_head"
    assert plan_lm_head(zoo.build("opt", tie_word_embeddings=False)).name == "lm_head"
    assert plan_lm_head(toys.build()).name == "head"
    assert plan_lm_head(toys.build(tied=True), embedding=True).embedding == "embed"


def test_heads_that_are_refused_leave_the_model_untouched() -> None:
    def refused(model: nn.Module, match: str, **settings: Any) -> None:
        before = [(name, id(module)) for name, module in model.named_modules()]
        with pytest.raises(InputError, match=match):
            plan_lm_head(model, **settings)
        assert before == [(name, id(module)) for name, module in model.named_modules()]

    refused(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4)), "Sequential has no LM head")
    refused(Two(), "several layers may be the LM head, by the linear layers as wide as the vocabulary: a, b")
    tied = toys.build(tied=True)
    refused(tied, "the LM head 'head' is tied to 'embed.weight'")
    refused(zoo.build("gpt2"), "'lm_head' is tied to 'transformer.wte.weight'")
    tied.embed.max_norm = 1.0
    refused(tied, "an embedding with max_norm", embedding=True)
    scaled = toys.build(tied=True)
    scaled.embed = Scaled(*scaled.embed.weight.shape, _weight=scaled.embed.weight)
    refused(scaled, "expected, got Scaled", embedding=True)
    thrice = toys.build(tied=True)
    thrice.positions.weight = thrice.embed.weight
    refused(thrice, r"tied to several modules, \['embed', 'positions'\]", embedding=True)
    view = toys.build()
    view.head.weight = nn.Parameter(view.embed.weight.detach()[:])
    refused(view, "tied to 'embed.weight'")
    hooked = toys.build()
    hooked.head.register_forward_hook(lambda *_: None)
    refused(hooked, "has forward hooks")
    odd = toys.build()
    odd.get_output_embeddings = lambda: odd.norm
    refused(odd, "the LM head 'norm' is a LayerNorm")
    refused(torch.compile(toys.build(), backend="eager"), "wrapped already")
    with pytest.raises(InputError, match="model is a str"):
        plan_lm_head("model")  # type: ignore[arg-type]


def refused_everywhere(rank_info: Any) -> str:
    model = zoo.build("gpt2", n_layer=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError) as caught:
        autosp.initialize(head_config(2), model=model)
    assert type(model.lm_head) is nn.Linear and model.lm_head.weight is model.transformer.wte.weight
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert autosp.mesh.current() is None
    with pytest.raises(RankMismatchError, match=r"sequence group \[0, 1\] hold different models"):
        autosp.initialize(head_config(2), model=toys.build(seed=rank_info.rank))
    with pytest.warns(UserWarning, match="initialize got no model"):
        autosp.initialize(head_config(2))
    with pytest.warns(UserWarning, match="the LM head is not tied"):
        autosp.initialize(head_config(2, vocab_parallel_embedding=True), model=toys.build())
    with pytest.raises(ConfigError, match="do not cover a world of 2"):
        autosp.initialize(head_config(3), model=toys.build())
    with pytest.warns(UserWarning, match="autotp_size is 1; the head stays as it is"):
        dense = toys.build()
        autosp.initialize(head_config(1), model=dense)
    assert type(dense.head) is nn.Linear
    with pytest.raises(ConfigError, match="'torch', 'liger', 'fused_linear'"):
        autosp.initialize(head_config(2, vocab_parallel_ce_backend="apex"))
    return str(caught.value)


def test_initialize_refuses_on_every_rank(ranks: RankPool) -> None:
    for message in ranks.run(refused_everywhere, world_size=2):
        assert '"vocab_parallel_embedding": true' in message


def test_bad_arguments_of_layers_and_losses() -> None:
    with pytest.raises(InputError, match="output is 'whole'; allowed: 'dtensor', 'full', 'local'"):
        autosp.VocabParallelLinear(3, 4, output="whole")
    with pytest.raises(InputError, match="out_features is 0"):
        autosp.VocabParallelLinear(3, 0)
    with pytest.raises(InputError, match="tp_group must be None"):
        autosp.VocabParallelLinear(3, 4, tp_group=3)
    with pytest.raises(InputError, match="a torch.nn.Linear is expected, got Bilinear"):
        autosp.VocabParallelLinear.from_linear(nn.Bilinear(2, 2, 2), None)  # type: ignore[arg-type]
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


def other_losses(rank_info: Any) -> None:
    model = zoo.build("llama", num_hidden_layers=1, tie_word_embeddings=False)
    model.loss_function = lambda logits, labels, vocab_size, **more: logits.float().mean()
    autosp.initialize(head_config(2), model=model)
    batch = zoo.batch(5)
    with pytest.raises(InputError, match="not one that autosp knows on sharded logits"):
        model(**batch)
    model.lm_head.output = "full"
    model(**batch).loss.backward()
    fused = zoo.build("llama", num_hidden_layers=1, tie_word_embeddings=False)
    autosp.initialize(head_config(2, vocab_parallel_ce_backend="fused_linear"), model=fused)
    original = fused.loss_function
    fused.loss_function = lambda logits, **more: original(logits.float(), **more)
    with pytest.raises(InputError, match="computes with its logits before the loss"):
        fused(**batch)
    deferred = fused.lm_head(torch.randn(1, 2, 64))
    assert deferred.shape == (1, 2, 128) and (deferred * 2.0 / 4.0).fused_form() == (None, 2.0)
    capped = torch.tanh(deferred / 5.0) * 5.0
    assert (capped / 2.0).fused_form() == (5.0, 2.0) and torch.tanh(deferred).fused_form() is None
    plain = fused.lm_head.as_logits(F.linear(deferred.hidden, fused.lm_head.weight))
    expected = 5.0 * torch.tanh(plain.full_tensor() / 5.0) / 2.0
    torch.testing.assert_close((capped / 2.0).logits().full_tensor(), expected)
    torch.testing.assert_close((2.0 * torch.tanh(deferred)).full_tensor(), 2.0 * torch.tanh(plain.full_tensor()))
    torch.testing.assert_close(torch.log_softmax(deferred, -1).full_tensor(), plain.full_tensor().log_softmax(-1))
    torch.testing.assert_close(deferred[:, :1].full_tensor(), plain.full_tensor()[:, :1])
    with pytest.raises(InputError, match="computes with its logits before the loss"):
        original(torch.tanh(fused.lm_head(torch.randn(1, 2, 64))), labels=torch.zeros(1, 2, dtype=torch.long))


def test_losses_that_a_sharded_head_cannot_serve(ranks: RankPool) -> None:
    ranks.run(other_losses, world_size=2)
