"""`autosp.check` finds what is right, what is wrong and what is refused, and leaves the model as it was."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import parity
import pytest
import tool_models
import torch
import toys
from pool import RankInfo, RankPool

import autosp
from autosp.checking import Checker, loss_in
from autosp.comparison import Comparison, relative_error, tolerance
from autosp.errors import InputError


def checked(rank_info: RankInfo) -> dict[str, Any]:
    """Body of a rank: three models, and what is left of the first."""
    autosp.initialize({"autosp": {"inner_backend": "eager"}})
    model, batch = tool_models.good()
    model.inner.head.weight.grad = torch.ones_like(model.inner.head.weight)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    torch.manual_seed(5)
    first = autosp.check(model, batch(6), steps=2)
    kept = all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    kept = kept and torch.equal(model.inner.head.weight.grad, torch.ones_like(model.inner.head.weight))
    kept = kept and model.training and model.inner.mix.weight.grad is None
    del random
    results = {"good": first, "kept": kept}
    for name in ("refused", "wrong"):
        torch.manual_seed(5)
        model, batch = getattr(tool_models, name)()
        results[name] = autosp.check(model, batch(6))
    model, batch = tool_models.good()
    model.forward = torch.compiler.disable(model.forward)
    results["skipped"] = autosp.check(model, batch(6), steps=2)
    model, batch = tool_models.good()
    with torch.no_grad():
        model.inner.head.bias[0] = float("nan")
    results["nan"] = autosp.check(model, batch(6))
    # one rank of the group fails in the plain model: an error on both, no rank that waits
    broken, batch = tool_models.good()
    torch.manual_seed(5)
    inputs = batch(6)
    if rank_info.rank == 1:
        inputs["labels"] = inputs["labels"] + 1000
    try:
        autosp.check(broken, inputs)
    except InputError as error:
        results["failed"] = str(error)
    return results


def test_good_wrong_and_refused(ranks: RankPool) -> None:
    both = ranks.run(checked, world_size=2, timeout=240)
    for found in both:
        good = found["good"]
        assert good.verdict == "ok" and good.ok and good.compilations == 1 and good.steps == 2
        assert good.loss == pytest.approx(good.reference, rel=1e-5) and good.gradient_error < 1e-5
        assert 0 <= good.output_error < 1e-5 and good.worst_gradient and not good.missing
        assert found["kept"]
        assert found["wrong"].verdict == "MISMATCH" and not found["wrong"].ok
        assert found["wrong"].loss_error > 1e-3 and "MISMATCH" in str(found["wrong"])
        assert found["refused"].verdict == "refused" and "cumsum" in found["refused"].refused
        # both sides are the plain model then, which agrees and proves nothing
        assert found["skipped"].verdict == "refused" and "no part of the model ran compiled" in found["skipped"].refused
        assert found["nan"].verdict == "refused" and "loss of the plain model is nan" in found["nan"].refused
        assert "fails on rank 1 with the whole sequence" in found["failed"]
    assert both[0]["wrong"].as_dict() == both[1]["wrong"].as_dict()


HEAD = {"tensor_parallel": {"autotp_size": 3, "vocab_parallel_lm_head": True}, "autosp": {"inner_backend": "eager"}}


def checked_over_a_head(rank_info: RankInfo) -> dict[str, Any]:
    """Body of a rank of three that share a vocabulary of 32: 11, 11 and 10 rows."""
    with pytest.warns(UserWarning, match="initialize got no model"):
        state = autosp.initialize(HEAD)
    model, batch = tool_models.good()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(5)
    inputs = batch(6)
    checker = Checker(model)
    results: dict[str, Any] = {"good": checker.run(inputs, steps=2), "longer": checker.run(batch(7))}
    after = model.state_dict()
    results["kept"] = set(before) == set(after) and all(torch.equal(before[name], after[name]) for name in before)
    head = checker.parallel.inner.head.weight
    results["rows"] = tuple(head.shape)
    # the gradient of one row of one rank is twice what it should be
    if rank_info.rank == 2:
        head.register_hook(lambda grad: torch.cat([grad[:-1], 2 * grad[-1:]]))
    results["wrong"] = checker.run(inputs)
    results["errors"] = []
    uncopied, _ = tool_models.good()
    if rank_info.rank == 1:
        uncopied.lock = threading.Lock()
    tied = tool_models.WithLoss(tool_models.Small())
    tied.inner.head.weight = tied.inner.embed.weight
    sharded, _ = tool_models.good()
    autosp.shard_lm_head(sharded, state.mesh["tp"])
    for refused in (uncopied, tied, sharded):
        with pytest.raises(autosp.AutoSPError) as caught:
            autosp.check(refused, inputs)
        results["errors"].append(f"{type(caught.value).__name__}: {caught.value}")
    return results


def test_a_head_that_ranks_share(ranks: RankPool) -> None:
    all_ranks = ranks.run(checked_over_a_head, world_size=3, timeout=240)
    for rank, found in enumerate(all_ranks):
        for name in ("good", "longer"):
            assert found[name].verdict == "ok", str(found[name])
            assert 0 < found[name].gradient_error < 1e-5
            assert 0 <= found[name].output_error < 1e-5  # some CPUs give the very same logits
        assert found["good"].compilations == 1 and found["kept"] and found["rows"] == (10 if rank == 2 else 11, 8)
        # the same on every rank, though one alone has that row
        assert found["wrong"].verdict == "MISMATCH" and found["wrong"].worst_gradient == "inner.head.weight"
        assert found["wrong"].gradient_error > 1e-2 and found["wrong"].loss_error < 1e-5
        uncopied, tied, sharded = found["errors"]
        assert "cannot be copied (TypeError" in uncopied if rank == 1 else uncopied.startswith("RankMismatchError")
        assert "is tied to 'inner.embed.weight'" in tied and "vocab_parallel_embedding" in tied
        assert "inner.head of the model hold rows of the vocabulary already" in sharded


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: (torch.nn.Linear(2, 2), {}), "call autosp.initialize"),
        (lambda: ("model", {}), "call autosp.initialize"),
    ],
)
def test_without_a_group(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        autosp.check(*make())


def test_what_is_no_plain_model_or_batch() -> None:
    autosp.initialize({}, device_type="cpu")
    try:
        with pytest.raises(InputError, match="a model is a torch.nn.Module, not str"):
            autosp.check("model", {})  # type: ignore[arg-type]
        with pytest.raises(InputError, match="compiled already"):
            autosp.check(torch.compile(torch.nn.Linear(2, 2)), {})  # type: ignore[arg-type]
        with pytest.raises(InputError, match="a batch is a mapping"):
            autosp.check(torch.nn.Linear(2, 2), [1])  # type: ignore[arg-type]
        with pytest.raises(InputError, match="steps is 0"):
            autosp.check(torch.nn.Linear(2, 2), {}, steps=0)
        with pytest.raises(InputError, match="loss_of gave a Tensor; a scalar tensor is needed"):
            autosp.check(torch.nn.Linear(2, 2), {"input": torch.ones(3, 2)}, loss_of=lambda out: out)
    finally:
        autosp.mesh.reset()


def test_the_first_gradient_that_is_no_number_is_the_worst() -> None:
    def with_gradients(*values: float) -> torch.nn.Module:
        model = torch.nn.ParameterDict({f"p{i}": torch.nn.Parameter(torch.ones(2)) for i in range(len(values))})
        for parameter, value in zip(model.values(), values, strict=True):
            parameter.grad = torch.full((2,), value)
        return model

    nan = float("nan")
    for found, worst in (((1.0, nan, 9.0, nan), "p1"), ((1.0, 2.0, 9.0, 3.0), "p2"), ((1.0, 1.0, 1.0, 1.0), "p0")):
        comparison = Comparison()
        comparison.expect(0, torch.tensor(1.0), with_gradients(1.0, 1.0, 1.0, 1.0), SimpleNamespace())
        comparison.compare(0, torch.tensor(1.0), with_gradients(*found), SimpleNamespace())
        assert comparison.worst == worst


def test_outputs_are_compared_too() -> None:
    comparison, model = Comparison(), torch.nn.Linear(2, 1)
    comparison.expect(0, torch.tensor(1.0), model, SimpleNamespace(logits=torch.tensor([1.0, -4.0])))
    comparison.compare(0, torch.tensor(1.0), model, SimpleNamespace(logits=torch.tensor([1.0, -3.0])))
    assert comparison.output_error == 0.25 and comparison.loss_error == 0


def test_errors_are_relative_and_a_nan_is_never_right() -> None:
    one = torch.tensor([1.0, -4.0])
    assert relative_error(one, one) == 0
    assert relative_error(torch.tensor([1.0, -3.0]), one) == 0.25
    assert relative_error(torch.zeros(2), torch.tensor([1e-9, 0.0]), floor=1.0) == pytest.approx(1e-9)
    nan = torch.tensor([float("nan"), -4.0])
    assert relative_error(nan, nan) == 0
    assert relative_error(nan, one) != relative_error(nan, one)
    assert parity.error(nan, one) == parity.error(nan, nan) == float("inf")
    assert tolerance(torch.nn.Linear(1, 1)) == 1e-5 and tolerance(torch.nn.Linear(1, 1).bfloat16()) == 2e-2


def test_where_the_loss_is_found() -> None:
    loss = torch.tensor(1.0)
    assert loss_in(loss) is loss and loss_in({"loss": loss}) is loss
    assert loss_in(type("Out", (), {"loss": loss})()) is loss
    with pytest.raises(InputError, match="call autosp.initialize"):
        autosp.check(torch.nn.Linear(1, 1), {"input": loss})


class Result:
    tolerance = 1e-5


def test_a_gradient_on_one_side_only_is_a_mismatch() -> None:
    comparison, model = Comparison(), torch.nn.Linear(2, 1)
    model.weight.grad, model.bias.grad = torch.ones(1, 2), torch.ones(1)
    comparison.expect(0, torch.tensor(1.0), model, None)
    model.bias.grad = None
    comparison.compare(0, torch.tensor(1.0), model, None)
    result: Any = Result()
    comparison.fill(result)
    assert result.missing == ["bias"] and not result.ok


class Shifted(torch.nn.Module):
    """A softmax does not see ``shift``, so its gradient is rounding and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.shift = torch.nn.Parameter(torch.randn(9)), torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> toys.Out:
        weights = torch.softmax(x * self.scale + self.shift, -1)
        return toys.Out((weights * x).sum(), x)


def test_what_is_rounding_is_told_from_what_is_small():
    """By double precision, and without a trace in what the caller holds."""
    model, x = Shifted(), torch.randn(3, 9, generator=torch.Generator().manual_seed(1)).requires_grad_()
    model(x).loss.backward()
    # How much of it is left in fp32 depends on the CPU: here as much as a sum of ones of either sign leaves.
    expected, before = {"scale": model.scale.grad.clone(), "shift": torch.tensor([1e-7])}, x.grad.clone()
    model.zero_grad()
    told = [parity.is_rounding(model, {"x": x}, lambda out: out.loss, name, expected) for name in ("shift", "scale")]
    assert told == [True, False]
    assert torch.equal(x.grad, before) and all(p.grad is None for p in model.parameters())
