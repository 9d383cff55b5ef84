"""A ``torch.autograd.Function`` in a model keeps its own backward: shared by ranks where that is exact, or refused."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import flash_stand_in
import parity
import pytest
import torch
import toys
from pool import RankPool
from test_refusals import told
from torch import nn

from autosp.errors import UnsupportedGraphError
from autosp.function_capture import emit_autograd_function
from autosp.function_results import results_used, without_intermediates


class ScaledGelu(torch.autograd.Function):
    """Two operands and a number, one of them saved, a backward that is not the forward's derivative."""

    @staticmethod
    def forward(ctx, x, gate, factor):
        ctx.save_for_backward(x, gate)
        ctx.factor = factor
        return torch.tanh(x) * gate * factor

    @staticmethod
    def backward(ctx, grad):
        x, gate = ctx.saved_tensors
        return grad * gate * ctx.factor, grad * torch.tanh(x) * ctx.factor, None


class StraightThrough(torch.autograd.Function):
    """Rounds, and passes the gradient on as if it did not; two results, one of which is not differentiable."""

    @staticmethod
    def forward(ctx, x):
        rounded = torch.round(x * 8) / 8
        size = (rounded - x).abs()
        ctx.mark_non_differentiable(size)
        return rounded, size

    @staticmethod
    def backward(ctx, grad, _):
        return torch.where(grad > -100, grad, 0.0)


class Channels(torch.autograd.Function):
    """Its weight gets the sum over all tokens."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return 2 * grad * weight, (grad * x).sum((0, 1))


class RunningSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + 0.1 * x.cumsum(1)

    @staticmethod
    def backward(ctx, grad):
        return grad + 0.1 * grad.flip(1).cumsum(1).flip(1)


class Pushed(torch.autograd.Function):
    """A gradient that is there without an upstream one: padding rows would train the embedding."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad + 0.01 * x


class First(torch.autograd.Function):
    """A result smaller than its operands."""

    @staticmethod
    def forward(ctx, x, other):
        ctx.save_for_backward(other)
        return torch.tanh(other)

    @staticmethod
    def backward(ctx, grad):
        (other,) = ctx.saved_tensors
        return None, grad * (1 - torch.tanh(other) ** 2)


class OverLength(torch.autograd.Function):
    """Divides by a size of its operand, which on a shard is another."""

    @staticmethod
    def forward(ctx, x):
        ctx.length = x.shape[1]
        return x / x.numel()

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.length


class Flash(torch.autograd.Function):
    """FlashAttention's operator with something else done to its operands."""

    @staticmethod
    def forward(ctx, q, k, v):
        rest = 0.0, 0.5, True, -1, -1, 0.0, None, False
        return torch.ops.flashattn._flash_attn_forward(q, k.flip(1), v.flip(1), *rest)[0]

    @staticmethod
    def backward(ctx, grad):
        return grad, grad, grad


class Reversed(torch.autograd.Function):
    """Gradient reversal as domain-adversarial training writes it."""

    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.neg() * ctx.alpha, None


class Clipped(torch.autograd.Function):
    """The gradient of each element within bounds, scaled by a number that is a tensor."""

    @staticmethod
    def forward(ctx, x, low, high, scale):
        ctx.bounds, ctx.scale = (low, high), scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(*ctx.bounds) * ctx.scale, None, None, None


class Reshaped(torch.autograd.Function):
    """A view of another shape."""

    @staticmethod
    def forward(ctx, x, like):
        return x.view_as(like)

    @staticmethod
    def backward(ctx, grad):
        return grad.flatten(2), None  # reads no size: that would be the reason where lengths are open


def _sinking(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s_aux: torch.Tensor | None, scale: float) -> Any:
    """Causal attention over ``[batch, tokens, heads, size]`` with a sink a head."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)) * scale
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("bhqk,bkhd->bqhd", weights, v.repeat_interleave(q.shape[2] // v.shape[2], 2))


@torch.library.custom_op("autosp_test_flash_attn::_flash_attn_forward", mutates_args=())
def sink_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_descale: torch.Tensor | None, s_aux: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:  # fmt: skip
    """With the arguments of the forks of FlashAttention 3 that know of sinks and of 8-bit operands."""
    assert s_aux is None or s_aux.shape[0] == q.shape[2], "a sink for each head"
    return _sinking(q, k, v, s_aux, scale).contiguous()


@sink_forward.register_fake
def _(q, k, v, *rest):
    return torch.empty_like(q)


@torch.library.custom_op("autosp_test_flash_attn::_flash_attn_backward", mutates_args=())
def sink_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s_aux: torch.Tensor, scale: float
) -> list[torch.Tensor]:
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False), torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v, s_aux)]
        return [x.clone() for x in torch.autograd.grad(_sinking(*leaves, scale), leaves, grad)]


@sink_backward.register_fake
def _(grad, *leaves):
    return [torch.empty_like(x) for x in leaves[:4]]


class Sinking(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, q_descale, s_aux):
        ctx.save_for_backward(q, k, v, s_aux)
        return torch.ops.autosp_test_flash_attn._flash_attn_forward(q, k, v, q_descale, s_aux, 0.5)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, s_aux = ctx.saved_tensors
        found = torch.ops.autosp_test_flash_attn._flash_attn_backward(grad, q, k, v, s_aux, 0.5)
        return found[0], found[1], found[2], None, found[3]


def _sinks(descaled: bool) -> Callable[..., torch.Tensor]:
    def attend(model: Any, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(*x.shape[:2], 4, 4)
        keys = heads[:, :, :2].contiguous()
        descale = torch.ones(x.shape[0], 2) if descaled else None
        return x + Sinking.apply(heads, keys, keys * 2, descale, model.weight[:4]).reshape(x.shape)

    return attend


def _straight(model: Any, x: torch.Tensor) -> torch.Tensor:
    rounded, size = StraightThrough.apply(x)
    return rounded + 0.1 * size


def _flash(**settings: Any) -> Callable[..., torch.Tensor]:
    def attend(model: Any, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        heads = x.view(rows, length, -1, 4)
        q = torch.cat([heads, heads[:, :, :2]], 2)
        more = {"alibi_slopes": torch.arange(1, 7) / 7.0} if settings.get("slopes") else {}
        more |= {"dropout_p": settings["dropout_p"]} if "dropout_p" in settings else {}
        key_heads = heads[:, :, :3]
        out = flash_stand_in.flash_attn_func(q, key_heads, key_heads * 2, softmax_scale=0.5, causal=True, **more)
        return x + out[:, :, :4].reshape(rows, length, 16)

    return attend


def _wrapped(model: Any, x: torch.Tensor) -> torch.Tensor:
    heads = x.view(*x.shape[:2], 4, 4)
    heads = nn.functional.pad(heads, [0, 4])
    return x + Flash.apply(heads, heads * 2, heads * 3)[..., :4].reshape(x.shape)


EXACT: dict[str, Callable[..., torch.Tensor]] = {
    "two operands": lambda model, x: ScaledGelu.apply(x, x * 2, 0.7),
    "a whole operand": lambda model, x: ScaledGelu.apply(x, torch.arange(x.shape[1]).view(1, -1, 1) * x * 0.1, 0.5),
    "straight through": _straight,
    "flash with slopes": _flash(slopes=True),
    "flash with sinks": _sinks(False),
    "reversed": lambda model, x: x.detach() + Reversed.apply(x, 0.3),
    "clipped": lambda model, x: x + Clipped.apply(x, -1e-3, 2e-3, model.weight[0].detach()),
}
UNKNOWN: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "channels": (lambda model, x: Channels.apply(x, model.weight), "its backward has aten.sum"),
    "running sum": (lambda model, x: RunningSum.apply(x), "its forward has aten.cumsum.default"),
    "pushed": (lambda model, x: Pushed.apply(x), "other than zero where the gradient of its result is"),
    "clipped above zero": (
        lambda model, x: x + Clipped.apply(x, 1e-3, 2e-3, model.weight[0].detach()),
        "other than zero where the gradient of its result is",
    ),
    "first": (lambda model, x: x + First.apply(x, x[:, :, :1]), "results are smaller than its operands"),
    "length": (lambda model, x: x + OverLength.apply(x), "of a tensor inside it would be a rank's own"),
    "descaled": (_sinks(True), "takes q_descale, of which a part would be a rank's"),
    "reshaped": (
        lambda model, x: x + Reshaped.apply(x, x.view(*x.shape[:2], 4, 4)).flatten(2),
        "its forward has aten.view_as",
    ),
    "wrapped": (_wrapped, "is done to its arguments or its result"),
}
REFUSED: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "dropout": (_flash(dropout_p=0.1), "would drop the same positions in the heads of every rank"),
}
ALL = {**EXACT, **{name: case[0] for name, case in {**UNKNOWN, **REFUSED}.items()}}


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.toy = toys.build()
        self.toy.attention.k.bias.requires_grad_(
            False
        )  # softmax does not feel it: its gradient is nothing but rounding
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.weight.requires_grad_(name in ("channels", "descaled", "flash with sinks"))
        self.function = ALL[name]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> toys.Out:
        x = self.function(self, self.toy.hidden(input_ids, None, None, None))
        logits = self.toy.head(x)
        return toys.Out(toys.pad_slice(self.toy, logits, labels), logits)


def run_names(
    rank_info: Any, names: list[str], lengths: list[int], settings: dict[str, Any]
) -> dict[str, list[parity.Result]]:
    found = {}
    for name in names:
        torch._dynamo.reset()
        config = {"autosp": {**parity.CASE["autosp"], **settings}}
        build = lambda name=name: Model(name)  # noqa: E731
        found[name] = parity.run_model(rank_info, build, [toys.batch(n) for n in lengths], config=config)
    return found


def check(ranks: RankPool, names: Any, world: int = 2, lengths: tuple[int, ...] = (16, 17), **settings: Any) -> None:
    for found in ranks.run(run_names, list(names), list(lengths), settings, world_size=world, timeout=300):
        for results in found.values():
            for result in results:
                result.check()


def test_elementwise_functions_and_kernels_run_on_a_shard(ranks: RankPool):
    check(ranks, [name for name in EXACT if name != "a whole operand"], 3, lengths=(17,))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_every_exact_function(ranks: RankPool, world: int):
    check(ranks, EXACT, world)


@pytest.mark.slow
def test_through_aot_autograd(ranks: RankPool):
    check(ranks, EXACT, inner_backend="aot_eager")


@pytest.mark.slow
def test_other_functions_are_gathered(ranks: RankPool):
    check(ranks, UNKNOWN, unsupported="gather")


def refusals(rank_info: Any) -> dict[str, dict[str, str]]:
    import autosp

    autosp.initialize(parity.CASE)
    found = {}
    for name in (*UNKNOWN, *REFUSED):
        torch._dynamo.reset()
        compiled = torch.compile(Model(name), backend="autosp", dynamic=name == "length" or None)
        found[name] = told(lambda compiled=compiled: compiled(**autosp.prepare_batch(toys.batch(16))))
    return found


def test_what_is_not_known_is_refused(ranks: RankPool):
    expected = {name: case[1] for name, case in {**UNKNOWN, **REFUSED}.items()}
    for found in ranks.run(refusals, timeout=100):
        for name, error in found.items():
            assert error["type"] == "UnsupportedGraphError", (name, error)
            assert expected[name] in error["text"], (name, error)
            assert ".py:" in error["location"] and ".apply(" in error["location"], (name, error)
            assert "custom_op" in error["remedy"] or name == "dropout", (name, error)


@pytest.mark.parametrize(
    ("result", "settings", "reason"),
    [
        (lambda x: (x, ()), {"dirty_idx": [0]}, "writes to its inputs"),
        (lambda x: ((x, 3), ()), {}, "returns what is no tensor"),
    ],
)
def test_what_no_operator_can_say_is_refused(result: Callable[..., Any], settings: dict[str, Any], reason: str):
    forward = torch.fx.symbolic_trace(result)
    with pytest.raises(UnsupportedGraphError, match=reason) as refused:
        emit_autograd_function([forward, forward, torch.ones(3)], settings, None, "model.py:7")
    assert "custom_op" in refused.value.remedy and refused.value.location == "model.py:7"


def test_results_that_nobody_takes_are_left_out():
    """torch 2.11 has all that a forward computes among its results; its backward reads gradients of few of them."""
    forward = torch.fx.symbolic_trace(lambda x: ((x.sin(), x, 3, x.cos()), (x,)))
    backward = torch.fx.symbolic_trace(lambda first, second, number, last, saved: first * saved + last)
    settings = {"non_differentiable_idx": [1, 3], "saved_for_backward_idx": [0]}
    assert without_intermediates(forward, backward, settings, None)[0] is forward
    one, other, kept, left = without_intermediates(forward, backward, settings, {0})
    assert left == [True, False, False, True], "the gradient of the last one is read"
    assert kept == {"non_differentiable_idx": [1], "saved_for_backward_idx": [0]}
    x, gradient = torch.randn(3), torch.randn(3)
    (sine, cosine), (saved,) = one(x)
    assert torch.equal(sine, x.sin()) and torch.equal(cosine, x.cos()) and saved is x
    assert torch.equal(other(gradient, gradient, x), gradient * x + gradient)
    assert len(forward(x)[0]) == 4, "the bodies given stay"


def test_results_count_as_used_where_somebody_reads_them():
    graph = torch.fx.Graph()
    call = graph.call_function(torch.unbind, (graph.placeholder("x"),))
    read, _ = (graph.call_function(operator.getitem, (call, index)) for index in (2, 0))
    graph.output(read)
    assert results_used(call) == {2}
    graph.call_function(torch.stack, (call,))
    assert results_used(call) is None


def test_a_number_that_changes_is_refused_with_what_to_pass_in_its_place():
    """The strength of a gradient reversal follows a schedule: from its second value on it is no constant."""
    forward = torch.fx.symbolic_trace(lambda x, strength: (x * strength, ()))
    with pytest.raises(UnsupportedGraphError, match="changes from call to call") as refused:
        emit_autograd_function([forward, forward, torch.ones(3), 0.5], {}, None, "model.py:7")
    assert "as a tensor" in refused.value.remedy and refused.value.location == "model.py:7"
