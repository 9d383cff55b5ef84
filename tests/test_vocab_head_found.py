"""Which LM heads are found, and which models and losses are refused before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toys
import zoo
from pool import RankPool
from test_vocab_head import head_config
from torch import nn
from torch.nn import functional as F

import autosp
from autosp.errors import ConfigError, InputError, RankMismatchError
from autosp.layers.lm_head import plan_lm_head


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.a, self.b = nn.Linear(4, 9), nn.Linear(4, 9)


class Scaled(nn.Embedding):
    """As Gemma has it."""

    def __init__(self, *sizes: int, **settings: Any) -> None:
        super().__init__(*sizes, **settings)
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.scale.to(self.weight.dtype)


class ReadsItself(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids]


class Learned(Scaled):
    def __init__(self, *sizes: int, **settings: Any) -> None:
        super().__init__(*sizes, **settings)
        self.gain = nn.Parameter(torch.ones(sizes[0]))


class LooksAtAll(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) - self.weight.mean(0)


def test_heads_that_are_found() -> None:
    assert plan_lm_head(zoo.build("llama", tie_word_embeddings=False)).name == "lm_head"
    assert plan_lm_head(zoo.build("opt", tie_word_embeddings=False)).name == "lm_head"
    assert plan_lm_head(toys.build()).name == "head"
    # The plan comes first, then what the model says itself, then sizes.
    model = zoo.build("llama", tie_word_embeddings=False, num_hidden_layers=1)
    model.other = nn.Linear(64, zoo.VOCAB)
    assert plan_lm_head(model).name == "lm_head"
    model.get_output_embeddings = lambda: model.other
    assert plan_lm_head(model).name == "lm_head"
    two = Two()
    two.get_output_embeddings = lambda: two.b
    assert plan_lm_head(two).name == "b"
    two._tp_plan = {"a": "colwise_gather_output", "b": "rowwise", "c": "colwise", "layers.*.x": "colwise"}
    assert plan_lm_head(two).name == "a"
    assert plan_lm_head(toys.build(tied=True), embedding=True).embedding == "embed"


def test_heads_that_are_refused_leave_the_model_untouched() -> None:
    def refused(model: nn.Module, match: str, **settings: Any) -> None:
        before = [(name, id(module)) for name, module in model.named_modules()]
        with pytest.raises(InputError, match=match):
            plan_lm_head(model, **settings)
        assert before == [(name, id(module)) for name, module in model.named_modules()]

    refused(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4)), "Sequential has no LM head")
    refused(Two(), "several layers may be the LM head, by the linear layers as wide as the vocabulary: a, b")
    planned = Two()
    planned._tp_plan = {"a": "colwise", "b": "colwise"}
    refused(planned, "several layers may be the LM head, by the tensor-parallel plan: a, b")
    tied = toys.build(tied=True)
    refused(tied, "the LM head 'head' is tied to 'embed.weight'")
    refused(zoo.build("gpt2"), "'lm_head' is tied to 'transformer.wte.weight'")
    tied.embed.max_norm = 1.0
    refused(tied, "an embedding with max_norm", embedding=True)
    for kind, match in (
        (Scaled, ""),
        (ReadsItself, "a ReadsItself cannot be sharded over its rows: .* its forward raised IndexError"),
        (Learned, r"a Learned has parameters beside its table, \['gain'\]"),
        (LooksAtAll, "a LooksAtAll cannot be sharded over its rows: its forward reads the table by itself"),
    ):
        other = toys.build(tied=True)
        other.embed = kind(*other.embed.weight.shape, _weight=other.embed.weight)
        if match:
            refused(other, match, embedding=True)
        else:
            assert plan_lm_head(other, embedding=True).embedding == "embed"
    watched = toys.build(tied=True)
    watched.embed.register_forward_hook(lambda *_: None)
    refused(watched, "the embedding has forward hooks", embedding=True)
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
    biased = toys.build()
    biased.head.bias = biased.shared = nn.Parameter(torch.zeros(toys.VOCAB))
    refused(biased, "the bias of the LM head 'head' is also 'shared'")
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
