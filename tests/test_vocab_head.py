"""The vocabulary-parallel LM head without the compiler: layers, losses, models of transformers, checkpoints."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from pool import RankPool
from torch import nn
from torch.distributed.tensor import DTensor

import autosp
from autosp.errors import InputError
from autosp.layers.checkpoint import optimizer_state_with_rows, optimizer_state_without_rows


def head_config(tp: int, **more: Any) -> dict[str, Any]:
    return {"tensor_parallel": {"autotp_size": tp, "vocab_parallel_lm_head": True, **more}}


def rows(layer: Any, whole: torch.Tensor) -> torch.Tensor:
    return whole[layer.vocab_start_index : layer.vocab_end_index]


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
    own_loss = pytest.warns(UserWarning, match="BertForMaskedLM computes its loss in its own forward")
    with own_loss if name == "bert" else contextlib.nullcontext():
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


def few_ids(rank_info: Any, name: str, backend: str) -> None:
    settings = dict(n_layer=1) if name == "gpt2" else dict(num_hidden_layers=1, tie_word_embeddings=False)
    for vocab in (5, 1):
        model = zoo.build(name, vocab_size=vocab, pad_token_id=0, bos_token_id=0, eos_token_id=0, **settings)
        reference = copy.deepcopy(model)
        extra = {"vocab_parallel_embedding": True} if name == "gpt2" else {}
        autosp.initialize(head_config(4, vocab_parallel_ce_backend=backend, **extra), model=model)
        ids = zoo.batch(9)["input_ids"] % vocab
        against_dense(model, reference, {"input_ids": ids, "labels": ids})


@pytest.mark.parametrize(("name", "backend"), [("llama", "torch"), ("gpt2", "fused_linear")])
def test_ranks_without_an_id(ranks: RankPool, name: str, backend: str) -> None:
    ranks.run(few_ids, name, backend, world_size=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backend", ["torch", "liger", "fused_linear"])
def test_all_models_of_transformers(ranks: RankPool, name: str, backend: str) -> None:
    ranks.run(train_model, name, backend, world_size=2)


def tied_to_a_scaled_table(rank_info: Any, name: str, config: str, backend: str, **settings: Any) -> None:
    import pickle

    sizes = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=8, vocab_size=131)
    model = zoo.seeded(lambda: zoo._make(name, config, **{**sizes, **settings}))
    assert type(model.get_input_embeddings()) is not nn.Embedding
    reference = copy.deepcopy(model)
    autosp.initialize(head_config(2, vocab_parallel_embedding=True, vocab_parallel_ce_backend=backend), model=model)
    table = model.get_input_embeddings()
    assert isinstance(table, autosp.VocabParallelEmbedding) and table.weight is model.get_output_embeddings().weight
    batch = zoo.batch(9)
    against_dense(model, reference, batch)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert type(copied.get_input_embeddings()) is type(table)
    against_dense(copied, reference, batch)
    settings = dict(max_new_tokens=3, do_sample=False)
    assert torch.equal(
        model.generate(batch["input_ids"], **settings), reference.generate(batch["input_ids"], **settings)
    )
    assert all(torch.equal(v, reference.state_dict()[k]) for k, v in autosp.dense_state_dict(model).items())


GEMMA = dict(num_key_value_heads=2, intermediate_size=96, head_dim=8)


def test_tied_to_a_table_that_scales(ranks: RankPool) -> None:
    ranks.run(tied_to_a_scaled_table, "GemmaForCausalLM", "GemmaConfig", "torch", **GEMMA, world_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "fused_linear"])
def test_more_tables_that_scale(ranks: RankPool, backend: str) -> None:
    for name, config, settings in (
        ("Gemma3ForCausalLM", "Gemma3TextConfig", {**GEMMA, "sliding_window": 8}),
        (
            "BioGptForCausalLM",
            "BioGptConfig",
            dict(intermediate_size=96, hidden_dropout_prob=0.0, layerdrop=0.0, attention_probs_dropout_prob=0.0),
        ),
    ):
        ranks.run(tied_to_a_scaled_table, name, config, backend, **settings, world_size=2)


def methods(rank_info: Any, folder: str) -> None:
    model = zoo.build("gpt2", n_layer=1, vocab_size=131)
    reference = copy.deepcopy(model)
    autosp.initialize(head_config(2, vocab_parallel_embedding=True), model=model)
    for each in (model, copy.deepcopy(model)):
        for state in (None, each.state_dict()):
            with pytest.raises(InputError, match="needs the whole state dict: call state = autosp.dense_state_dict"):
                each.save_pretrained(folder, state_dict=state)
        whole = autosp.dense_state_dict(each)
        if rank_info.rank == 0:
            each.save_pretrained(folder, state_dict=whole)
            loaded = type(reference).from_pretrained(folder)
            assert all(torch.equal(loaded.state_dict()[key], value) for key, value in reference.state_dict().items())
        with pytest.raises(InputError, match="would cut each rank's rows, .* before autosp.initialize"):
            each.resize_token_embeddings(140)
        each.tie_weights()
        against_dense(each, reference, zoo.batch(9))


def tied_afterwards(rank_info: Any) -> None:
    model = zoo.build("llama", num_hidden_layers=1, tie_word_embeddings=False, vocab_size=130)
    model.config.tie_word_embeddings = True  # as where a user untied the weights and left the configuration
    reference = copy.deepcopy(model)
    autosp.initialize(head_config(2), model=model)
    with pytest.raises(InputError, match=r"became a parameter \(130, 64\), and this rank holds rows .* of 130"):
        model.tie_weights()
    against_dense(model, reference, zoo.batch(9))


def test_weights_that_are_tied_afterwards_are_refused(ranks: RankPool) -> None:
    ranks.run(tied_afterwards, world_size=2)


def test_methods_of_the_model_that_know_of_no_shards(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(methods, str(tmp_path), world_size=2)


def alone(rank_info: Any) -> Any:
    """A group of this rank alone: DDP over ranks that hold different rows is refused."""
    return [torch.distributed.new_group([rank]) for rank in range(rank_info.world_size)][rank_info.rank]


def save(rank_info: Any, folder: str) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = zoo.build("gpt2", n_layer=1, vocab_size=131)
    autosp.initialize(head_config(4, vocab_parallel_embedding=True), model=model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(**zoo.batch(9)).loss.backward()
    optimizer.step()
    # compiled as a whole, wrapped by DDP, and with a part that is compiled: names and rows are those of the model
    compiled = torch.compile(torch.nn.parallel.DistributedDataParallel(model, process_group=alone(rank_info)))
    model.transformer.h[0] = torch.compile(model.transformer.h[0])
    state = optimizer_state_with_rows(compiled, get_optimizer_state_dict(compiled, optimizer))
    dense = autosp.dense_state_dict(compiled)
    assert not any("_orig_mod" in name or name.startswith("module.") for name in dense)
    model.transformer.h[0] = model.transformer.h[0]._orig_mod
    dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=folder)
    if rank_info.rank == 0:
        model.save_pretrained(folder + "/dense", state_dict=dict(dense))
    moments = state["state"]["transformer.wte.weight"]["exp_avg"].full_tensor()
    return {**dense, "moments": moments}


def load(rank_info: Any, folder: str, expected: dict[str, torch.Tensor], saved: str = "") -> None:
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
    dcp.load(loaded, checkpoint_id=folder + saved)
    model.load_state_dict(loaded["model"])
    set_optimizer_state_dict(model, optimizer, optimizer_state_without_rows(loaded["optimizer"]))
    for name, value in autosp.dense_state_dict(model).items():
        assert torch.equal(value, expected[name]), name
    weight = model.transformer.wte.weight
    moments = optimizer.state[weight]["exp_avg"]
    assert torch.equal(moments, rows(model.lm_head, expected["moments"]) if tp > 1 else expected["moments"])
    dense = transformers.GPT2LMHeadModel.from_pretrained(folder + "/dense")
    assert torch.equal(dense.lm_head.weight, expected["lm_head.weight"])
    if tp > 1:
        state = optimizer_state_with_rows(model, get_optimizer_state_dict(model, optimizer))
        dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=f"{folder}/{tp}")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_checkpoints_move_between_sizes_and_to_dense_models(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(save, str(tmp_path), world_size=4)[0]
    for size, saved in ((2, ""), (1, ""), (1, "/2")):
        ranks.run(load, str(tmp_path), expected, saved, world_size=size)
