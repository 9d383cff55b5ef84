"""The vocabulary axis in the compiler: whole steps on tp alone and on sp x tp, against one process and by hand."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
import zoo
from parity import error, full
from pool import RankPool
from torch import nn
from torch.nn import functional as F

import autosp
from autosp.errors import RankMismatchError, UnsupportedGraphError

EXAMPLES = Path(__file__).parent.parent / "examples"


def config(sp: int = 1, tp: int = 2, backend: str = "torch", **options: Any) -> dict[str, Any]:
    return {
        "sequence_parallel_size": sp,
        "tensor_parallel": {
            "autotp_size": tp,
            "vocab_parallel_lm_head": True,
            "vocab_parallel_ce_backend": backend,
        },
        "autosp": {"inner_backend": "aot_eager", **options},
    }


def own_rows(model: nn.Module, name: str, whole: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a gradient of the dense model."""
    layer: Any = model.get_submodule(name.rpartition(".")[0])
    return whole[layer.vocab_start_index : layer.vocab_end_index] if hasattr(layer, "partition") else whole


def against_dense(
    model: nn.Module, reference: nn.Module, found: torch.Tensor, expected: torch.Tensor, rtol=1e-5
) -> None:
    """Compare a loss and every gradient; clears them."""
    expected.backward()
    found.backward()
    assert abs(found.item() - expected.item()) <= rtol * abs(expected.item()), (found, expected)
    grads = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    floor = max(1e-3, torch.finfo(found.dtype).eps) * max(grad.abs().max().item() for grad in grads.values())
    for name, grad in grads.items():
        mine = model.get_parameter(name).grad
        assert mine is not None and mine.shape == own_rows(model, name, grad).shape, name
        scale = max(grad.abs().max().item(), floor)
        assert error(mine, own_rows(model, name, grad), scale) <= rtol, name
    model.zero_grad()
    reference.zero_grad()


def run_toy(
    rank_info: Any, sp: int, lengths: list[int], loss: str = "pad_slice", vocab: int = 49, **options: Any
) -> None:
    backend = options.pop("backend", "torch")
    model = toys.build(loss, vocab=vocab)
    reference = copy.deepcopy(model)
    autosp.initialize(config(sp, rank_info.world_size // sp, backend, **options), model=model)
    compiled = torch.compile(model, backend="autosp")
    for length in lengths:
        batch = toys.batch(length, vocab=vocab)
        out, dense = compiled(**autosp.prepare_batch(batch)), reference(**batch)
        if backend == "fused_linear":
            assert out.logits is None
        else:
            logits = full(out.logits)
            if options.get("outputs") != "local":
                assert logits.shape == dense.logits.shape and error(logits.detach(), dense.logits.detach()) < 1e-5
        against_dense(model, reference, out.loss, dense.loss)


def test_tokens_and_vocabulary_are_sharded_together(ranks: RankPool, inner: str) -> None:
    ranks.run(run_toy, 2, [9], world_size=4, inner_backend=inner)


@pytest.mark.parametrize("options", [{"outputs": "full"}, {"backend": "fused_linear"}], ids=str)
def test_the_vocabulary_alone(ranks: RankPool, options: dict[str, Any]) -> None:
    ranks.run(run_toy, 1, [9], world_size=2, **options)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["two_slices_channels_second", "several", "gathered_log_softmax", "class_weights"])
@pytest.mark.parametrize("world", [2, 4])
def test_losses(ranks: RankPool, loss: str, world: int) -> None:
    ranks.run(run_toy, world // 2, [9, 16], loss, world_size=world)


@pytest.mark.slow
def test_more_ways(ranks: RankPool) -> None:
    ranks.run(run_toy, 2, [16], world_size=4, backend="fused_linear")
    ranks.run(run_toy, 2, [9], world_size=4, outputs="full")
    ranks.run(run_toy, 2, [9], world_size=4, outputs="local")
    ranks.run(run_toy, 1, [9], vocab=50257, world_size=4)
    ranks.run(run_toy, 1, [9, 13], world_size=2, inner_backend="inductor", timeout=300)


class ByHand(nn.Module):
    """Losses on a toy's logits, written out in plain PyTorch; `by_hand` is the same with the functional API."""

    def __init__(self, toy: nn.Module) -> None:
        super().__init__()
        self.toy = toy

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.toy.head(self.toy.hidden(input_ids, None, None, None))
        rows, target = logits.flatten(0, 1), labels.flatten()
        logp = torch.log_softmax(logits, -1)
        chosen = logp.gather(-1, input_ids.unsqueeze(-1)).squeeze(-1)
        entropy = -(torch.softmax(logits, -1) * logp).sum(-1)
        detached = torch.log_softmax(logits.detach() * 0.5, -1)
        kl = (detached.exp() * (detached - logp)).sum(-1)
        return F.cross_entropy(rows, target, label_smoothing=0.1), chosen, entropy, kl, torch.logsumexp(logits, -1)


def by_hand(toy: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    head = toy.head
    head.output = "local"
    logits = head(toy.hidden(input_ids, None, None, None))
    bounds = dict(vocab_start_index=head.vocab_start_index, vocab_end_index=head.vocab_end_index)
    group = head.tp_group
    loss = autosp.vocab_parallel_cross_entropy(
        logits.flatten(0, 1), labels.flatten(), group, label_smoothing=0.1, **bounds
    )
    chosen = autosp.vocab_parallel_logprobs(logits, input_ids, group, **bounds)
    entropy = autosp.vocab_parallel_entropy(logits, group, **bounds)
    kl = autosp.vocab_parallel_kl_div(logits, logits.detach() * 0.5, tp_group=group, **bounds)
    stats = autosp.vocab_parallel_token_stats(logits, input_ids, group, **bounds)
    return loss, chosen, entropy, kl, stats.lse


def same_bits(rank_info: Any, which: int) -> list[str]:
    toy = toys.build(vocab=50)
    autosp.initialize(config(), model=toy)
    batch = toys.batch(9, vocab=50)
    other = copy.deepcopy(toy)
    compiled = torch.compile(ByHand(toy), backend="autosp")(**autosp.prepare_batch(batch))
    manual = by_hand(other, **batch)
    different = []
    for name, mine, hand in zip(("loss", "logprobs", "entropy", "kl", "lse"), compiled, manual, strict=True):
        if not torch.equal(mine, hand):
            different.append(name)
    compiled[which].sum().backward()
    manual[which].sum().backward()
    for (name, mine), hand in zip(toy.named_parameters(), other.parameters(), strict=True):
        if (
            (mine.grad is None) != (hand.grad is None)
            or mine.grad is not None
            and not torch.equal(mine.grad, hand.grad)
        ):
            different.append(name)
    return different


def test_the_functional_api_gives_the_same_bits(ranks: RankPool) -> None:
    assert ranks.run(same_bits, 0, world_size=2) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("which", [1, 2, 3, 4])
def test_the_functional_api_gives_the_same_bits_for_every_loss(ranks: RankPool, which: int) -> None:
    assert ranks.run(same_bits, which, world_size=2) == [[], []]


def not_fused(rank_info: Any) -> str:
    import logging

    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    sizes = {**zoo._GQA, "num_hidden_layers": 1, "logits_scaling": 3.0, "tie_word_embeddings": False}
    model = zoo.seeded(lambda: zoo._make("GraniteForCausalLM", "GraniteConfig", **sizes))
    reference = copy.deepcopy(model)
    autosp.initialize(config(backend="fused_linear"), model=model)
    logging.getLogger("autosp").addHandler(handler)
    batch = zoo.batch(9)
    out = torch.compile(model, backend="autosp")(**autosp.prepare_batch(batch))
    logging.getLogger("autosp").removeHandler(handler)
    against_dense(model, reference, out.loss, reference(**batch).loss)
    return "\n".join(heard)


@pytest.mark.slow
def test_logits_that_exist_against_the_setting_are_told_of(ranks: RankPool) -> None:
    for heard in ranks.run(not_fused, world_size=2):
        assert "but this rank's part of the logits exists: the loss at" in heard and "is no linear layer" in heard


class Reads(nn.Module):
    """What is read along the vocabulary: ids by value, and a loss of every form that has a rule of its own."""

    def __init__(self, toy: nn.Module) -> None:
        super().__init__()
        self.toy = toy

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.toy.head(self.toy.hidden(input_ids, None, None, None))
        logp, teacher = torch.log_softmax(logits, -1), torch.log_softmax(logits.detach() * 0.5, -1)
        top, largest = logits.topk(3, -1), logits.max(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        loss = F.kl_div(logp, teacher, reduction="batchmean", log_target=True) + F.kl_div(logp, teacher.exp())
        loss = loss + (torch.logsumexp(logits, -1) - 0.1 * entropy + largest.values).mean() + top.values.square().mean()
        return loss, logits.argmax(-1), top.indices, largest.indices


def read_along_the_vocabulary(rank_info: Any, sp: int) -> None:
    toy = toys.build(vocab=49)
    reference = Reads(copy.deepcopy(toy))
    autosp.initialize(config(sp, rank_info.world_size // sp), model=toy)
    compiled = torch.compile(Reads(toy), backend="autosp")
    batch = toys.batch(9, vocab=49)
    (loss, *ids), (expected, *whole) = compiled(**autosp.prepare_batch(batch)), reference(**batch)
    assert all(torch.equal(full(mine), dense) for mine, dense in zip(ids, whole, strict=True))
    against_dense(toy, reference.toy, loss, expected)


def test_what_is_read_along_the_vocabulary(ranks: RankPool) -> None:
    ranks.run(read_along_the_vocabulary, 1, world_size=2)


@pytest.mark.slow
def test_what_is_read_along_both_axes(ranks: RankPool) -> None:
    ranks.run(read_along_the_vocabulary, 2, world_size=4)
    ranks.run(read_along_the_vocabulary, 1, world_size=4)


def run_example(rank_info: Any, name: str) -> tuple[float, float, float]:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.compare()


@pytest.mark.parametrize(("name", "world"), [("grpo_loss", 4), ("distillation_loss", 2)])
def test_examples(ranks: RankPool, name: str, world: int) -> None:
    for found, expected, worst in ranks.run(run_example, name, world_size=world, timeout=240):
        assert abs(found - expected) <= 1e-5 * abs(expected) and worst <= 1e-5


class Sorted(nn.Module):
    def __init__(self, toy: nn.Module) -> None:
        super().__init__()
        self.toy = toy

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits = self.toy.head(self.toy.hidden(input_ids, None, None, None))
        return logits.sort(-1, descending=True).values[..., :3].square().mean()


def refused_or_gathered(rank_info: Any) -> str:
    toy = toys.build()
    reference = copy.deepcopy(toy)
    autosp.initialize(config(), model=toy)
    ids = toys.batch(9)["input_ids"]
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        torch.compile(Sorted(toy), backend="autosp")(ids)
    torch._dynamo.reset()
    gathered = torch.compile(Sorted(toy), backend="autosp", options={"unsupported": "gather"})
    against_dense(toy, reference, gathered(ids), Sorted(reference)(ids))
    assert isinstance(caught.value.inner_exception, UnsupportedGraphError)
    return str(caught.value.inner_exception)


def test_what_has_no_rule_is_refused_or_gathered(ranks: RankPool) -> None:
    for message in ranks.run(refused_or_gathered, world_size=2):
        assert (
            "aten.sort" in message
            and "ids of the vocabulary" in message
            and "whole vocabulary" in message
            and "test_vocab_head_compile.py" in message
        )


def different_batches(rank_info: Any) -> None:
    toy = toys.build()
    state = autosp.initialize(config(verify_timeout=20.0), model=toy)
    compiled = torch.compile(toy, backend="autosp")
    batch = autosp.prepare_batch(toys.batch(9, seed=state.coordinates["tp"]))
    with pytest.raises(RankMismatchError, match="given different inputs for the same step"):
        compiled(**batch)


def test_ranks_that_share_a_vocabulary_need_the_same_batch(ranks: RankPool) -> None:
    ranks.run(different_batches, world_size=2)


def dropped(rank_info: Any, sp: int) -> dict[str, torch.Tensor]:
    toy = toys.build(dropout=0.3)
    toy.attention.dropout = 0.0  # over whole values, as on tp alone, it is refused
    state = autosp.initialize(config(sp), model=toy)
    torch.manual_seed(rank_info.rank)
    torch.compile(toy, backend="autosp")(**autosp.prepare_batch(toys.batch(16))).loss.backward()
    found = {name: p.grad for name, p in toy.named_parameters() if not name.startswith("head")}
    return {"tp": torch.tensor(state.coordinates["tp"]), "sp": torch.tensor(state.sp_rank), **found}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_share_a_vocabulary_drop_alike(ranks: RankPool, world: int) -> None:
    first, *others = ranks.run(dropped, world // 2, world_size=world)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first if name not in ("tp", "sp"))


def run_model(rank_info: Any, name: str, sp: int, length: int, backend: str, **changes: Any) -> None:
    model = zoo.build(name, **changes)
    reference = copy.deepcopy(model)
    settings = config(sp, rank_info.world_size // sp, backend)
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        settings["tensor_parallel"]["vocab_parallel_embedding"] = True
    autosp.initialize(settings, model=model)
    compiled = torch.compile(model, backend="autosp")
    dense, sharded = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (reference, model))
    for step in range(3):
        batch = zoo.batch(length, seed=step)
        out, expected = compiled(**autosp.prepare_batch(batch)), reference(**batch)
        assert (out.logits is None) == (backend == "fused_linear")
        expected.loss.backward()
        out.loss.backward()
        assert abs(out.loss.item() - expected.loss.item()) <= 1e-5 * expected.loss.item()
        for optimizer in (dense, sharded):
            optimizer.step()
            optimizer.zero_grad()
    for parameter, (name, whole) in zip(model.parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(parameter, own_rows(model, name, whole), rtol=1e-4, atol=1e-5)


def test_three_steps_of_a_model_of_transformers(ranks: RankPool) -> None:
    ranks.run(run_model, "llama", 2, 9, "torch", num_hidden_layers=1, tie_word_embeddings=False, world_size=4)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "fused_linear"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt2", "opt"])
def test_models(ranks: RankPool, name: str, backend: str) -> None:
    changes = {} if name in ("gpt2", "opt") else {"tie_word_embeddings": False}
    ranks.run(run_model, name, 2, 9, backend, world_size=4, timeout=300, vocab_size=131, **changes)
    ranks.run(run_model, name, 1, 9, backend, world_size=4, timeout=300, vocab_size=131, **changes)
