"""The LM head and its cross entropy become one operator in compiled models: the pass, exactness on shards, memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import toys
import zoo
from pool import RankInfo, RankPool
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_compiler
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from autosp.custom_ops import fused_loss  # noqa: F401  (registers the operators that the pass names)
from autosp.custom_ops.linear_loss import plan
from autosp.passes.fuse_linear_cross_entropy import fuse_linear_cross_entropy_pass

WIDTH, VOCAB = 8, 24
FUSED = "autosp.linear_cross_entropy_loss.default"


def operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Hidden states, head, bias, and targets of which one is ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*size, WIDTH, generator=generator) for size in ((2, 5), (VOCAB,)))
    bias, target = torch.randn(VOCAB, generator=generator), torch.randint(0, VOCAB, (2, 5), generator=generator)
    target[0, 2] = -100
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), target


Form = Callable[..., Any]


def trace(function: Form, *inputs: torch.Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake", pre_dispatch=True)(*inputs)


def fuse(gm: fx.GraphModule, mode: str = "auto", memory: str = "auto") -> fx.GraphModule:
    fake_mode = next(iter(gm.graph.nodes)).meta["val"].fake_mode
    fused = fuse_linear_cross_entropy_pass(gm, mode=mode, fake_mode=fake_mode, memory=memory)
    fused.graph.lint()
    return fused


def targets(gm: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def flat(logits: torch.Tensor, target: torch.Tensor, **settings: Any) -> torch.Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1), **settings)


def capped(logits: torch.Tensor, cap: float = 3.0) -> torch.Tensor:
    """As Gemma-2 writes it."""
    logits = logits / cap
    return torch.tanh(logits) * cap


FORMS: dict[str, Form] = {
    "merged rows": lambda h, w, b, t: flat(F.linear(h, w), t),
    "rows merged before": lambda h, w, b, t: F.cross_entropy(F.linear(h.view(-1, WIDTH), w), t.view(-1)),
    "bias": lambda h, w, b, t: flat(F.linear(h, w, b), t),
    "sliced rows": lambda h, w, b, t: flat(F.linear(h, w)[:, :-1], t[:, 1:]),
    "sliced, contiguous": lambda h, w, b, t: flat(F.linear(h, w)[..., :-1, :].contiguous(), t[..., 1:].contiguous()),
    "sliced after merging": lambda h, w, b, t: F.cross_entropy(F.linear(h, w).view(-1, VOCAB)[:-1], t.view(-1)[1:]),
    "widened": lambda h, w, b, t: flat(F.linear(h, w).float(), t),
    "sum": lambda h, w, b, t: flat(F.linear(h, w), t, reduction="sum"),
    "smoothed": lambda h, w, b, t: flat(F.linear(h, w), t, label_smoothing=0.2),
    "other ignored id": lambda h, w, b, t: flat(F.linear(h, w), t.clamp(min=0), ignore_index=0),
    "soft cap": lambda h, w, b, t: flat(capped(F.linear(h, w)).float(), t),
    "soft cap, sliced": lambda h, w, b, t: flat(capped(F.linear(h, w, b))[:, :-1].float(), t[:, 1:]),
    "all classes of a slice": lambda h, w, b, t: flat(F.linear(h, w[:4])[..., -4:], t.clamp(max=3)),
    "upstream gradient": lambda h, w, b, t: flat(F.linear(h, w), t) * 3 + h.sum(),
}


def with_gradients(function: Form, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor | None]:
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    loss = function(*leaves)
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("form", FORMS)
def test_rewrites(form: str):
    inputs = operands()
    gm = fuse(trace(FORMS[form], *inputs))
    assert targets(gm).count(FUSED) == 1
    assert not {"aten.linear.default", "aten.cross_entropy_loss.default"} & set(targets(gm))
    for value, expected in zip(with_gradients(gm, inputs), with_gradients(FORMS[form], inputs), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


def test_the_loss_keeps_its_dtype():
    for form, dtype in (("merged rows", torch.bfloat16), ("widened", torch.float32)):
        inputs = operands(torch.bfloat16)
        gm = fuse(trace(FORMS[form], *inputs))
        assert FUSED in targets(gm)
        result, expected = gm(*inputs), FORMS[form](*inputs)
        assert result.dtype == expected.dtype == dtype
        torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


def test_two_losses_of_two_heads():
    def function(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return flat(F.linear(h, w), t) + flat(F.linear(h, w * 2, b), t, reduction="sum")

    inputs = operands()
    gm = fuse(trace(function, *inputs))
    assert targets(gm).count(FUSED) == 2
    torch.testing.assert_close(gm(*inputs), function(*inputs))


def own_tanh(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    bounded = torch.tanh(F.linear(h, w) / 3.0)
    return flat(bounded * 3.0, t) + bounded.mean()


def detached(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return flat(F.linear(h, w).detach(), t) + h.sum()


def also_used(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    logits = F.linear(h, w)
    return flat(logits, t) + 1e-3 * torch.logsumexp(logits, -1).square().mean()


def two_losses(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    logits = F.linear(h, w)
    return flat(logits, t) + flat(logits[:, :-1], t[:, 1:])


UNRELATED: dict[str, Form] = {
    "class weights": lambda h, w, b, t: flat(F.linear(h, w), t, weight=b.exp()),
    "soft targets": lambda h, w, b, t: F.cross_entropy(F.linear(h[0], w), torch.softmax(w[:5, :1] * b, -1)),
    "a loss a token": lambda h, w, b, t: flat(F.linear(h, w), t, reduction="none").mean(),
    "classes second": lambda h, w, b, t: F.cross_entropy(F.linear(h, w).transpose(1, 2), t),
    "cut classes": lambda h, w, b, t: flat(F.linear(h, w)[..., :-2], t.clamp(max=VOCAB - 3)),
    "temperature": lambda h, w, b, t: flat(F.linear(h, w) / 2, t),
    "two caps": lambda h, w, b, t: flat(capped(capped(F.linear(h, w))), t),
    "another cap": lambda h, w, b, t: flat(torch.tanh(F.linear(h, w) / 3.0) * 2.0, t),
    "negative cap": lambda h, w, b, t: flat(capped(F.linear(h, w), -3.0), t),
    "cast to float64": lambda h, w, b, t: flat(F.linear(h, w).double(), t),
    "classes split and joined": lambda h, w, b, t: flat(F.linear(h, w).view(-1).view(-1, VOCAB), t),
    "no linear": lambda h, w, b, t: flat(h @ w.t(), t),
    "one token": lambda h, w, b, t: F.cross_entropy(F.linear(h[0, 0], w), t[0, 0]),
    "cap whose inside is used": own_tanh,
    "detached": detached,
    "logits with another user": also_used,
    "two losses of one head": two_losses,
}


@pytest.mark.parametrize("form", UNRELATED)
@pytest.mark.parametrize("mode", ["auto", "always"])
def test_leaves_other_graphs_alone(form: str, mode: str):
    gm = trace(UNRELATED[form], *operands())
    before = str(gm.graph)
    assert str(fuse(gm, mode).graph) == before


@pytest.mark.parametrize("form", FORMS)
def test_a_second_run_changes_nothing(form: str):
    gm = fuse(trace(FORMS[form], *operands()))
    before = str(gm.graph)
    assert str(fuse(gm).graph) == before


def head_without_gradient(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = F.linear(h, w)
    return flat(logits, t) + h.sum()


def head_written_afterwards(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    logits = F.linear(h, w)
    w.mul_(2)
    return flat(logits, t)


@pytest.mark.parametrize("form", [head_without_gradient, head_written_afterwards])
def test_leaves_a_head_that_cannot_be_moved_alone(form: Form):
    gm = trace(form, *operands())
    before = str(gm.graph)
    assert str(fuse(gm).graph) == before


def returned(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor, t: torch.Tensor) -> Any:
    logits = F.linear(h, w)
    return flat(logits.float(), t), logits, h


@pytest.mark.parametrize("mode", ["never", "auto"])
def test_returned_logits_keep_the_loss_unfused(mode: str):
    gm = trace(returned, *operands())
    before = str(gm.graph)
    assert str(fuse(gm, mode).graph) == before


def test_never_changes_nothing():
    gm = trace(FORMS["merged rows"], *operands())
    before = str(gm.graph)
    assert str(fuse(gm, "never").graph) == before


def test_always_returns_none_for_logits_that_are_only_returned():
    inputs = operands()
    gm = fuse(trace(returned, *inputs), "always")
    assert FUSED in targets(gm) and "aten.linear.default" not in targets(gm)
    loss, logits, hidden = gm(*inputs)
    assert logits is None and hidden is inputs[0]
    torch.testing.assert_close(loss, returned(*inputs)[0])


# In compiled models, on shards.

ALWAYS = {"autosp": {"inner_backend": parity.INNER, "fuse_linear_cross_entropy": "always"}}


class Capped(toys.Toy):
    """A toy that bounds its logits."""

    def forward(self, *args: Any, labels: torch.Tensor, input_ids: torch.Tensor) -> toys.Out:  # type: ignore[override]
        logits = capped(self.head(self.hidden(input_ids, None, None, None)))
        return toys.Out(self.loss(self, logits.float(), labels), logits)


def build(kind: str) -> toys.Toy:
    if kind == "soft cap":
        torch.manual_seed(0)
        return Capped("two_slices")
    model = toys.build("pad_slice" if kind == "frozen head" else kind)
    if kind == "frozen head":
        model.head.weight.requires_grad_(False)
    return model


KINDS = ["pad_slice", "frozen head", "label_smoothing", "soft cap"]
IGNORED = {"some": 0.3, "all": 2.0}


def compare_fused(rank_info: RankInfo, kind: str) -> dict[tuple[int, str], parity.Result]:
    """A toy at an even and an uneven length; what is compiled must have given up its logits."""
    import autosp

    autosp.initialize(ALWAYS)
    model = build(kind)
    compiled = torch.compile(model, backend="autosp")
    results = {}
    given_up: list[bool] = []

    def recorded(**batch: Any) -> toys.Out:
        out = compiled(**batch)
        given_up.append(out.logits is None)
        return out

    for length in (16, 17):
        for name, ignored in IGNORED.items():
            batch = toys.batch(length, ignored=ignored)
            results[length, name] = parity.compare(model, recorded, batch, prepare=autosp.prepare_batch)
    assert given_up == [True] * len(results), given_up
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_exact_on_shards(ranks: RankPool, kind: str):
    """Loss and every gradient; with all labels ignored NaN and no gradient, as eager has it."""
    for results in ranks.run(compare_fused, kind, world_size=2, timeout=200):
        assert len(results) == 4
        for (_, ignored), result in results.items():
            # The key bias has a gradient of rounding alone, and a frozen head leaves little to measure it against.
            result.check(5e-5 if kind == "frozen head" else 1e-5)
            if ignored == "all":
                assert math.isnan(result.loss) and not result.missing and result.worst == 0.0


# Memory, by the sizes of the tensors in the compiled forward and backward.

ROWS, LENGTH, LARGE_VOCAB = 8, 64, 4096
TOKENS = ROWS * LENGTH // 2  # of this rank
Graphs = dict[str, fx.Graph]


def compiled_graphs(mode: str, monkeypatch: pytest.MonkeyPatch, way: str = "") -> Graphs:
    """AOTAutograd's forward and backward of a Llama on one of two ranks, divided as for Inductor."""
    import autosp

    found: Graphs = {}

    def keep(name: str) -> Any:
        def compiler(gm: fx.GraphModule, inputs: Any) -> Any:
            found[name] = gm.graph
            return gm

        return make_boxed_compiler(compiler)

    compilers = {"fw_compiler": keep("forward"), "bw_compiler": keep("backward")}
    inner = aot_autograd(**compilers, partition_fn=min_cut_rematerialization_partition)
    monkeypatch.setattr("autosp.inner.lookup_backend", lambda name: inner)
    # Left to itself it keeps logits of up to an eighth of a GiB, being no burden: at these sizes that is all of them.
    monkeypatch.setattr(plan, "choose_way", lambda *_: way)
    torch._dynamo.reset()
    autosp.initialize({"autosp": {"inner_backend": "eager", "fuse_linear_cross_entropy": mode}})
    model = zoo.build("llama", vocab_size=LARGE_VOCAB, num_hidden_layers=1, hidden_size=32)
    batch = autosp.prepare_batch(zoo.batch(LENGTH, rows=ROWS))
    torch.compile(model, backend="autosp", dynamic=False)(**batch).loss.backward()
    return found


def tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return [x for x in values if isinstance(x, torch.Tensor)]


def is_logits(x: torch.Tensor) -> bool:
    return x.numel() >= TOKENS * LARGE_VOCAB


def loss_part_peak(graph: fx.Graph) -> int:
    """Largest number of bytes alive at once of what has a vocabulary dimension; the weights themselves are no part."""
    last = {source: index for index, node in enumerate(graph.nodes) for source in node.all_input_nodes}
    alive: dict[fx.Node, int] = {}
    peak = 0
    for index, node in enumerate(graph.nodes):
        if node.op == "call_function":
            sizes = [
                int(x.numel()) * x.element_size() for x in tensors(node) if not x._is_view() and LARGE_VOCAB in x.shape
            ]
            alive[node] = sum(sizes)
        peak = max(peak, sum(alive.values()))
        alive = {known: size for known, size in alive.items() if last.get(known, -1) > index}
    return peak


def makers_of_logits(graphs: Graphs) -> list[str]:
    return [str(node.target) for g in graphs.values() for node in g.nodes if any(map(is_logits, tensors(node)))]


def test_no_logits_and_a_fifth_of_the_memory(fake_ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch):
    """The weight's own gradient is counted on both sides."""
    fake_ranks(2)
    plain = compiled_graphs("never", monkeypatch)
    assert len(makers_of_logits(plain)) >= 3, "the comparison must see the logits where they are"
    before = max(map(loss_part_peak, plain.values()))
    for way, operator in (("form", "autosp.linear_cross_entropy.default"), ("lean", "autosp.linear_stats.default")):
        fused = compiled_graphs("always", monkeypatch, way)
        calls = [str(node.target) for graph in fused.values() for node in graph.nodes]
        assert calls.count(operator) == 1, "made once, and not again in the backward"
        assert makers_of_logits(fused) == []
        after = max(map(loss_part_peak, fused.values()))
        assert before >= 5 * after, (way, before, after)
