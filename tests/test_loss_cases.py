"""Every way in which models write a causal loss gives the loss and the gradients of the whole sequence."""

from __future__ import annotations

import functools
import math
from typing import Any

import parity
import pytest
import torch
import toys
import zoo
from pool import RankInfo, RankPool
from torch.distributed.tensor import DTensor

LLAMA = functools.partial(zoo.build, "llama", num_hidden_layers=1)


def toy_batch(loss: str, length: int) -> dict[str, Any]:
    batch = toys.batch(length, rows=1 if loss == "flat_slice" else 2)
    generator = torch.Generator().manual_seed(length)
    if loss == "reduction_none":
        batch["weights"] = torch.rand(2, length, generator=generator) + 0.1
    if loss in ("soft_targets", "soft_targets_sum", "soft_targets_weighted", "distilled", "squared_error"):
        batch["teacher"] = toys.teacher(length)
    if loss == "normalised_by_items":
        batch["num_items"] = torch.tensor(11)
    return batch


def check_all(everyone: list[list[parity.Result]], rtol: float = 1e-5) -> None:
    for results in everyone:
        for result in results:
            result.check(rtol)


# One of each kind; the others differ from one of these in an argument.
DEFAULT_FORMS = (
    "pad_slice", "two_slices", "roll", "gathered_log_softmax", "nll_of_log_softmax", "soft_targets", "class_weights",
    "label_smoothing", "other_ignore_index", "reduction_none", "normalised_by_items", "several",
)  # fmt: skip


def test_forms_of_every_run_exist() -> None:
    assert set(DEFAULT_FORMS) <= set(toys.LOSSES)


@pytest.mark.parametrize("loss", parity.mostly_slow(toys.LOSSES, DEFAULT_FORMS))
def test_form_of_the_loss(ranks: RankPool, loss: str):
    # The uneven length has every border; the even one is a program of its own and shown once.
    batches = [toy_batch(loss, length) for length in ([16, 17] if loss == "pad_slice" else [17])]
    # What runs over the sequence besides ids and labels must be tagged for a length that may change.
    tags = {key: 1 for key in ("weights", "teacher") if key in batches[0]}
    build = functools.partial(toys.build, loss)
    check_all(ranks.run(parity.run_model, build, batches, world_size=3, seq_dim=tags or 1))


def test_an_input_that_is_not_tagged(ranks: RankPool):
    """It is whole on every rank and exact all the same; dimensions left to Dynamo."""
    build = functools.partial(toys.build, "soft_targets")
    batches = [toy_batch("soft_targets", 16)]
    check_all(ranks.run(untagged, build, batches))


def untagged(rank_info: RankInfo, build: Any, batches: list[dict[str, Any]]) -> list[parity.Result]:
    import autosp

    autosp.initialize(parity.CASE)
    model = build()
    compiled = torch.compile(model, backend="autosp")
    # No tag at all: inputs are recognised by their names, and the teacher's name says nothing.
    return [parity.compare(model, compiled, batch, prepare=dict) for batch in batches]


PATTERNS = ["all", "first_half", "one", "none_valid", "uneven", "first_valid"]


def test_label_patterns(ranks: RankPool):
    """All of them through one compiled Llama; all ignored gives NaN, as eager does."""
    batches = [zoo.batch(length, labels=pattern) for length in (16, 17) for pattern in PATTERNS]
    everyone = ranks.run(parity.run_model, LLAMA, batches, world_size=2, timeout=240)
    for results in everyone:
        for batch, result in zip(batches, results, strict=True):
            if (batch["labels"][:, 1:] == -100).all():
                assert math.isnan(result.loss) and math.isnan(result.reference)
            else:
                result.check()


def test_all_labels_ignored_in_a_sum(ranks: RankPool):
    batch = toys.batch(17, ignored=2.0)
    for (result,) in ranks.run(parity.run_model, functools.partial(toys.build, "reduction_sum"), [batch]):
        assert result.loss == result.reference == 0.0


def shift_labels_batches() -> list[dict[str, Any]]:
    batches = []
    for length in (16, 17):
        batch = zoo.batch(length, labels="first_half")
        shift = toys.shifted(batch["labels"]).contiguous()
        batches += [{**batch, "shift_labels": shift}, {"input_ids": batch["input_ids"], "shift_labels": shift}]
    return batches


def llama_with_shift_labels() -> torch.nn.Module:
    """transformers' own loss function, called with ``shift_labels`` whether or not there are labels."""
    model = LLAMA()

    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids, shift_labels, labels=None):
            logits = self.model(input_ids=input_ids).logits
            loss = self.model.loss_function(
                logits=logits, labels=labels, vocab_size=zoo.VOCAB, shift_labels=shift_labels
            )
            return toys.Out(loss, logits)

    return Wrapper()


def test_shift_labels_with_and_without_labels(ranks: RankPool):
    check_all(ranks.run(parity.run_model, llama_with_shift_labels, shift_labels_batches(), timeout=240))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_number_of_items_in_the_batch(ranks: RankPool, as_tensor: bool):
    """transformers divides the sum by it; counted over labels[1:] while label[0] is valid."""
    batches = []
    for length in (16, 17):
        batch = zoo.batch(length, labels="first_valid")
        count = int((batch["labels"][:, 1:] != -100).sum())
        batches.append({**batch, "num_items_in_batch": torch.tensor(count) if as_tensor else count})
    check_all(ranks.run(parity.run_model, LLAMA, batches, timeout=240))


def accumulate(rank_info: RankInfo, pieces: int) -> tuple[float, float, float, str]:
    """Sum the losses of unequal micro-batches, each divided by the whole count, before looking at the gradients."""
    import autosp

    autosp.initialize(parity.CASE)
    model = toys.build("normalised_by_items")
    compiled = torch.compile(model, backend="autosp")
    batches = [toys.batch(16, seed=seed, ignored=0.2 * seed) for seed in range(pieces)]
    items = torch.tensor(sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches))
    losses = []
    grads = []
    for run in (model, compiled):
        total = torch.zeros(())
        for batch in batches:
            inputs = {k: v.clone() for k, v in batch.items()}
            loss = run(**(autosp.prepare_batch(inputs) if run is compiled else inputs), num_items=items).loss
            loss.backward()
            total += loss.detach()
        losses.append(total.item())
        grads.append(parity.gradients(model))
    floor = 1e-3 * max(g.abs().max().item() for g in grads[0].values())
    worst = max((parity.error(grads[1][n], grads[0][n], floor), n) for n in grads[0])
    return losses[0], losses[1], *worst


@pytest.mark.parametrize("pieces", [2, 4])
def test_gradient_accumulation(ranks: RankPool, pieces: int):
    for reference, loss, worst, name in ranks.run(accumulate, pieces):
        assert loss == pytest.approx(reference, rel=1e-5)
        assert worst <= 1e-5, name


def upstream(rank_info: RankInfo) -> list[float]:
    """A loss that is scaled after the compiled model returned it."""
    import autosp

    autosp.initialize(parity.CASE)
    model = toys.build("pad_slice")
    compiled = torch.compile(model, backend="autosp")
    result = parity.compare(
        model, compiled, toys.batch(17), prepare=autosp.prepare_batch, loss_of=lambda out: out.loss * 3 + out.loss**2
    )
    result.check()
    return [result.loss]


def test_upstream_gradient_is_not_one(ranks: RankPool):
    first, second = ranks.run(upstream)
    assert first == second


def under_autocast(rank_info: RankInfo, name: str) -> list[parity.Result]:
    import autosp

    autosp.initialize(parity.CASE)
    model = LLAMA() if name == "llama" else toys.build("pad_slice")
    make = zoo.batch if name == "llama" else toys.batch
    compiled = torch.compile(model, backend="autosp")
    results = []
    for length in (16, 17):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(parity.compare(model, compiled, make(length), prepare=autosp.prepare_batch))
    return results


@pytest.mark.parametrize("name", parity.mostly_slow(["toy", "llama"], ["toy"]))
def test_autocast(ranks: RankPool, name: str):
    check_all(ranks.run(under_autocast, name, timeout=240), rtol=2e-2)


def test_router_loss_of_mixtral(ranks: RankPool):
    """A product of means over the sequence: each mean is of the whole sequence before they are multiplied."""
    build = functools.partial(zoo.build, "mixtral", num_hidden_layers=1, output_router_logits=True)
    check_all(ranks.run(parity.run_model, build, [zoo.batch(16), zoo.batch(17)], timeout=300))


def evaluate_between(rank_info: RankInfo) -> dict[str, Any]:
    import autosp

    autosp.initialize(parity.CASE)
    model = LLAMA()
    compiled = torch.compile(model, backend="autosp")
    parity.compare(model, compiled, zoo.batch(16), prepare=autosp.prepare_batch).check()
    model.eval()
    ids = zoo.batch(17)["input_ids"]
    with torch.no_grad():
        reference = model(input_ids=ids).logits
        tagged = autosp.prepare_batch({"input_ids": ids.clone()})
        logits = compiled(**tagged).logits
        # Tags stay on the tensors; a run without autosp takes no notice of them.
        plain = model(**tagged).logits
        other = torch.compile(model, backend="aot_eager")(**tagged).logits
    model.train()
    parity.compare(model, compiled, zoo.batch(16, seed=1), prepare=autosp.prepare_batch).check()
    return {
        "sharded": isinstance(logits, DTensor),
        "shape": tuple(logits.shape),
        "local": tuple(logits.to_local().shape),
        "error": parity.error(logits.full_tensor(), reference),
        "plain": parity.error(plain, reference),
        "other": parity.error(other, reference),
    }


def test_train_evaluate_train(ranks: RankPool):
    everyone = ranks.run(evaluate_between, timeout=300)
    for result, rows in zip(everyone, (9, 8), strict=True):
        assert result["sharded"]
        assert result["shape"] == (2, 17, zoo.VOCAB)
        assert result["local"] == (2, rows, zoo.VOCAB)
        assert result["error"] <= 1e-5
        assert result["plain"] == 0.0
        assert result["other"] <= 1e-6


def count_targets(rank_info: RankInfo) -> tuple[float, float]:
    """With a zero head every target costs log V, so a sum counts them; the mean is log V itself."""
    import autosp

    autosp.initialize(parity.CASE)
    ids = torch.arange(1, 9).unsqueeze(0)
    found = []
    for loss in ("reduction_sum", "pad_slice"):
        model = toys.build(loss)
        torch.nn.init.zeros_(model.head.weight)
        compiled = torch.compile(model, backend="autosp")
        found.append(compiled(**autosp.prepare_batch({"input_ids": ids.clone(), "labels": ids.clone()})).loss.item())
    return found[0], found[1]


def test_the_target_at_the_boundary_counts(ranks: RankPool):
    for total, mean in ranks.run(count_targets):
        assert total == pytest.approx(7 * math.log(toys.VOCAB), rel=1e-6)
        assert mean == pytest.approx(math.log(toys.VOCAB), rel=1e-6)


def one_tensor(rank_info: RankInfo) -> parity.Result:
    """``labels=input_ids``: one tensor is both."""
    import autosp

    autosp.initialize(parity.CASE)
    model = toys.build("pad_slice")
    ids = toys.batch(17)["input_ids"]

    def prepare(batch: dict[str, Any]) -> dict[str, Any]:
        shared = batch["input_ids"]
        return autosp.prepare_batch({"input_ids": shared, "labels": shared})

    compiled = torch.compile(model, backend="autosp")
    return parity.compare(model, compiled, {"input_ids": ids, "labels": ids}, prepare=prepare)


def test_labels_are_the_ids(ranks: RankPool):
    for result in ranks.run(one_tensor):
        result.check()
