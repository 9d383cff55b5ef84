"""Odd but plausible habits of training scripts, each compared with one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import toys
import zoo
from pool import RankInfo, RankPool
from torch.nn import functional as F

import autosp
from autosp.integrations import ddp, fsdp
from autosp.sequence_tensor import SequenceTensor, shard

SP2 = {"sequence_parallel_size": 2, "autosp": {"inner_backend": "aot_eager"}}
Batch = dict[str, Any]


def step(
    model: torch.nn.Module, call: Callable[..., Any], reference: torch.nn.Module, batch: Batch, **more: Any
) -> None:
    """Loss, logits and gradients of a call against one process. All ranks have one batch: their mean is their sum."""
    want = reference(**batch, **more)
    out = call(**autosp.prepare_batch(dict(batch)), **more)
    assert isinstance(out.logits, SequenceTensor)
    assert abs(out.loss.item() - want.loss.item()) <= 1e-5 * want.loss.item()
    assert parity.error(parity.full(out.logits).detach(), want.logits.detach()) <= 1e-5
    if not torch.is_grad_enabled():
        return
    want.loss.backward()
    out.loss.backward()
    expected = parity.gradients(reference)
    found = {n: parity.full(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert set(found) == set(expected)
    floor = 1e-3 * max(g.abs().max().item() for g in expected.values())
    for name, value in expected.items():
        assert parity.error(found[name], value, floor) <= 1e-5, name


def rows(batch: Batch, count: int) -> Batch:
    """The first rows of a batch, repeated where there are not enough."""
    return {name: torch.cat([value, value])[:count] for name, value in batch.items()}


def switching(rank_info: RankInfo) -> None:
    """Evaluation in the middle, through the wrapper and past it, other lengths, and last batches of other sizes."""
    autosp.initialize(SP2)
    model, reference = toys.build(), toys.build()
    wrapped = ddp.wrap(model)
    step(model, wrapped, reference, toys.batch(17))
    wrapped.eval(), reference.eval()
    with torch.no_grad():
        step(model, wrapped, reference, toys.batch(21, seed=4))
        step(model, wrapped.module, reference, toys.batch(13, seed=4))
    with torch.inference_mode():
        step(model, wrapped, reference, toys.batch(21, seed=5))
    wrapped.train(), reference.train()
    step(model, wrapped, reference, rows(toys.batch(19, seed=6), 1))
    step(model, wrapped, reference, rows(toys.batch(16, seed=7), 3))


@pytest.mark.slow
def test_evaluation_in_the_middle_and_an_uneven_last_batch(ranks: RankPool) -> None:
    ranks.run(switching, timeout=240)


def again(rank_info: RankInfo, how: str) -> None:
    """What is compiled already is compiled once more, by ours or by another backend."""
    autosp.initialize(SP2)
    model, reference = toys.build(), toys.build()
    if how == "plain":
        compiled = torch.compile(torch.compile(model, backend="autosp"), backend="autosp")
    elif how == "fsdp":
        compiled = torch.compile(fsdp.fully_shard(model), backend="autosp")
    else:
        compiled = torch.compile(ddp.wrap(model), backend=how)
    step(model, compiled, reference, toys.batch(17))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "autosp", "aot_eager", "fsdp"])
def test_what_is_compiled_already_is_compiled_again(ranks: RankPool, how: str) -> None:
    ranks.run(again, how, timeout=240)


def outside(rank_info: RankInfo) -> None:
    """A loss that the script computes itself, from gathered logits, under an engine that averages."""
    autosp.initialize(SP2)
    model, reference = toys.build(), toys.build()
    wrapped = ddp.wrap(model, static_graph=True, gradient_as_bucket_view=True)
    batch = toys.batch(16)

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    want = loss_of(reference(**batch).logits)
    want.backward()
    loss = loss_of(wrapped(**autosp.prepare_batch(dict(batch))).logits.full_tensor())
    loss.backward()
    expected, found = parity.gradients(reference), parity.gradients(model)
    assert abs(loss.item() - want.item()) <= 1e-5 * want.item()
    floor = 1e-3 * max(g.abs().max().item() for g in expected.values())
    assert set(found) == set(expected)
    assert max(parity.error(found[name], value, floor) for name, value in expected.items()) <= 1e-5


@pytest.mark.slow
def test_a_loss_of_the_script_under_ddp(ranks: RankPool) -> None:
    ranks.run(outside, timeout=240)


def layered(rank_info: RankInfo) -> None:
    """FSDP2 layer by layer with padded batches, packed positions, evaluation, another length, a short last batch."""
    autosp.initialize(SP2)
    build: Callable[[], Any] = lambda: zoo.build("llama", num_hidden_layers=1, use_cache=False)  # noqa: E731
    model, reference = build(), build()
    sharded: Any = fsdp.fully_shard(model, layers=model.model.layers)
    padded = zoo.batch(17)
    mask = torch.ones_like(padded["input_ids"])
    mask[0, :5] = 0  # on the left
    mask[1, 13:] = 0  # on the right
    padded = {**padded, "labels": torch.where(mask == 1, padded["labels"], -100), "attention_mask": mask}
    step(sharded, sharded, reference, padded)
    packed = torch.cat([torch.arange(7), torch.arange(10)]).repeat(2, 1)
    step(sharded, sharded, reference, {**zoo.batch(17, seed=1), "position_ids": packed})
    sharded.eval(), reference.eval()
    with torch.no_grad():
        step(sharded, sharded, reference, zoo.batch(20, seed=2))
    sharded.train(), reference.train()
    step(sharded, sharded, reference, rows(zoo.batch(17, seed=3), 1))


@pytest.mark.slow
def test_layer_by_layer_with_padding_and_packing(ranks: RankPool) -> None:
    ranks.run(layered, timeout=300)


def generating(rank_info: RankInfo) -> None:
    """Text generated between two steps: not compiled, and so on any rank alone too."""
    autosp.initialize(SP2)
    model: Any = zoo.build("llama", num_hidden_layers=1).eval()
    alone: Any = zoo.build("llama", num_hidden_layers=1).eval()
    wrapped = ddp.wrap(model)
    batch = autosp.prepare_batch(zoo.batch(17))
    prompt = zoo.batch(9)["input_ids"]
    expected = alone.generate(prompt, max_new_tokens=4, do_sample=False).tolist()
    with torch.no_grad():
        before = wrapped(**batch).loss
        if rank_info.rank == 0:
            with torch.compiler.set_stance("force_eager"):
                assert model.generate(prompt, max_new_tokens=4, do_sample=False).tolist() == expected
        assert wrapped(**batch).loss == before


@pytest.mark.slow
def test_text_generated_between_two_steps(ranks: RankPool) -> None:
    ranks.run(generating, timeout=300)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda x: x.sum().item(),
    "mean": lambda x: x.mean().item(),
    "max": lambda x: float(x.max()),
    "norm": lambda x: x.norm().item(),
    "std": lambda x: x.std().item(),
    "all": lambda x: bool((x > -2).all()),
    "any": lambda x: bool((x > 2).any()),
    "nan": lambda x: bool(torch.isnan(x).any()),
    "z-loss": lambda x: x.logsumexp(-1).pow(2).mean().item(),
    "rows": lambda x: [row.sum().item() for row in x],
    "flat": lambda x: x.flatten(0, 1).sum().item(),
    "last": lambda x: x[:, -1].sum().item(),
    "branch": lambda x: 1 if x.sum() > 0 else 2,
    "one": lambda x: x[0, 1, 2].item(),
    "list": lambda x: x.argmax(-1).tolist(),
    "array": lambda x: x.cpu().numpy().tolist(),
}


def reading(rank_info: RankInfo, length: int) -> dict[str, str]:
    """Numbers read out of a sharded output, as a script that logs does it: right, or an error."""
    state = autosp.initialize({})
    assert state.mesh is not None
    whole = torch.randn(2, length, 5, generator=torch.Generator().manual_seed(0))
    found = {}
    for name, read in READS.items():
        want = read(whole)
        try:
            got = read(shard(whole, state.mesh["sp"], 1))
            found[name] = "right" if got == pytest.approx(want, rel=1e-5) else f"{got} is not {want}"
        except autosp.InputError as error:
            assert ".full_tensor()" in str(error)
            found[name] = "told"
        except (RuntimeError, NotImplementedError):  # of torch: no such operator for a DTensor
            found[name] = "refused by torch"
        # What it says to do.
        if name in ("sum", "max", "norm", "all"):
            assert read(shard(whole, state.mesh["sp"], 1).full_tensor()) == pytest.approx(want, rel=1e-5)
    return found


@pytest.mark.parametrize("length", [6, 7])
def test_a_number_is_never_read_out_of_one_ranks_part(ranks: RankPool, length: int) -> None:
    for found in ranks.run(reading, length):
        assert set(found.values()) <= {"right", "told", "refused by torch"}, found
        assert {found[name] for name in ("sum", "max", "norm")} == {"told"}, found
