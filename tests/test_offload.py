"""Saved activations on the host between forward and backward: exact, out of the device's memory, and in good time."""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import parity
import pytest
import torch
import zoo
from pool import RankPool
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop

import autosp
from autosp import offload
from autosp.custom_ops.host_copy import FROM_HOST, FROM_HOST_DONE, TO_HOST, TO_HOST_DONE
from autosp.errors import InternalError
from autosp.host_copy_order import place_host_copies

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


def llama() -> torch.nn.Module:
    return zoo.build("llama", num_hidden_layers=3)


def checkpointed() -> torch.nn.Module:
    model = llama()
    model.gradient_checkpointing_enable()
    return model


def counting_body(rank_info: Any, make: Any, section: dict[str, Any], lengths: list[int]) -> tuple[int, list[Any]]:
    moved: list[str] = []
    original = offload.offload_saved

    def counted(*parts: fx.GraphModule, num_fwd_outputs: int) -> list[str]:
        names = original(*parts, num_fwd_outputs=num_fwd_outputs)
        moved.extend(names)
        return names

    offload.offload_saved = counted
    try:
        config = {"autosp": {"activation_offloading": True, **section}}
        results = parity.run_model(rank_info, make, [zoo.batch(n) for n in lengths], config=config)
        return len(moved), results
    finally:
        offload.offload_saved = original


CASES = {
    "what is saved": (llama, {}),
    "checkpointing": (checkpointed, {}),
    "checkpointing that keeps attention": (checkpointed, {"checkpointing_keeps": "attention"}),
    "a budget": (llama, {"activation_memory_budget": 0.2}),
    "tiles": (llama, {"token_tiles": 2, "fuse_linear_cross_entropy": "always"}),
}


SLOW = ("what is saved", "a budget", "tiles")


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in CASES])
def test_exact(ranks: RankPool, case: str) -> None:
    make, section = CASES[case]
    section = {"inner_backend": "aot_eager", **section}
    for moved, results in ranks.run(counting_body, make, section, [17, 24], timeout=300):
        assert moved >= 2  # a value of each layer but the last
        for result in results:
            result.check()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["what is saved", "checkpointing that keeps attention"])
def test_exact_under_inductor(ranks: RankPool, case: str) -> None:
    make, section = CASES[case]
    for moved, results in ranks.run(counting_body, make, section, [17, 24], timeout=500):
        assert moved >= 2
        for result in results:
            result.check()


@pytest.mark.slow
def test_order_in_the_code_of_inductor(fake_ranks: Callable[..., None]) -> None:
    """Two copies are on their way in what Inductor writes, whatever its own order is: so it stands in the code."""
    from torch._inductor.utils import run_and_get_code

    from autosp.backend import autosp_backend

    fake_ranks(2)
    autosp.initialize({"autosp": {"activation_offloading": True}})
    compiled = torch.compile(llama(), backend=autosp_backend)

    def step() -> None:
        compiled(**autosp.prepare_batch(zoo.batch(64))).loss.backward()

    _, codes = run_and_get_code(step)
    calls = re.findall(r"= torch\.ops\.autosp\.((?:to|from)_host(?:_done)?)\.", "\n".join(codes))
    leaving, coming = ([call for call in calls if call.startswith(way)] for way in ("to", "from"))
    count = leaving.count("to_host")
    assert count > 8
    assert leaving == ["to_host"] * 2 + ["to_host_done", "to_host"] * (count - 2) + ["to_host_done"] * 2
    assert coming == ["from_host"] * 2 + ["from_host_done", "from_host"] * (count - 2) + ["from_host_done"] * 2


def partitioned(function: Callable[..., Any], *inputs: torch.Tensor, move: bool = True) -> list[fx.GraphModule]:
    """The forward and backward of a function, with or without what it saves moved; run once, gradients in inputs."""
    found: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, joint_inputs: Any, **settings: Any) -> Any:
        parts = offload.partition(gm, joint_inputs, offload=move, **settings)
        found.extend(parts)
        return parts

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=boxed_nop, partition_fn=keep)
    torch.compile(function, backend=backend)(*inputs).sum().backward()
    return found


def targets(gm: fx.GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes]


def chain(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    for weight in weights:
        x = torch.mm(x, weight).sin()
    return x


def test_order_of_the_copies() -> None:
    """Every copy has an end; two may be on their way; an end comes before the copy after the next."""
    inputs = [torch.randn(8, 8, requires_grad=True) for _ in range(7)]
    forward, backward = partitioned(chain, *inputs)
    gradients = [x.grad.clone() for x in inputs]
    leaving = [t for t in targets(forward) if t in (TO_HOST, TO_HOST_DONE)]
    coming = [t for t in targets(backward) if t in (FROM_HOST, FROM_HOST_DONE)]
    count = leaving.count(TO_HOST)
    assert (
        count >= 5 and leaving.count(TO_HOST_DONE) == coming.count(FROM_HOST) == coming.count(FROM_HOST_DONE) == count
    )
    assert leaving == [TO_HOST] * 2 + [TO_HOST_DONE, TO_HOST] * (count - 2) + [TO_HOST_DONE] * 2
    assert coming == [FROM_HOST] * 2 + [FROM_HOST_DONE, FROM_HOST] * (count - 2) + [FROM_HOST_DONE] * 2
    for x in inputs:
        x.grad = None
    plain, _ = partitioned(chain, *inputs, move=False)
    assert TO_HOST not in targets(plain)
    assert all(torch.equal(x.grad, gradient) for x, gradient in zip(inputs, gradients, strict=True))


def test_what_stays() -> None:
    """Inputs and their views, results and theirs, small values, parts of a value, and two views of one."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        square = x.t() @ y  # saves x and y, and a view of x
        small = square.sum(0, keepdim=True)[:, :1].exp()  # 1 element
        return torch.mm(square.sin(), square.cos()).exp() * small  # exp is a result's factor

    forward, _ = partitioned(function, *(torch.randn(16, 16, requires_grad=True) for _ in range(2)))
    for node in forward.graph.nodes:
        if node.target is TO_HOST:
            base = offload._base(node.args[0])
            assert base.op == "call_function" and node.args[0].meta["val"].numel() > 4
            assert base not in {offload._base(out) for out in forward.graph.output_node().args[0][:1]}


def test_the_last_layer_stays(fake_ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    from autosp.backend import autosp_backend
    from autosp.location import layer_number

    fake_ranks(2)
    layers: list[Any] = []
    original = offload._chosen
    monkeypatch.setattr(
        offload, "_chosen", lambda *args: [layers.append(layer_number(n, None)) or n for n in original(*args)]
    )
    autosp.initialize({"autosp": {"activation_offloading": True, "inner_backend": "aot_eager"}})
    torch.compile(llama(), backend=autosp_backend)(**autosp.prepare_batch(zoo.batch(32))).loss.backward()
    assert {0, 1} <= set(layers) and 2 not in layers


def needed(offloading: Any, mib: float, layers: int) -> float:
    """Bytes that "auto" finds for a step of a rank of 2 that may take so many MiB."""
    from test_fit_memory import Choices

    from autosp.backend import autosp_backend

    torch._dynamo.reset()
    section = {"inner_backend": "aot_eager", "activation_memory_budget": "auto", "step_memory_gib": mib / 1024}
    autosp.initialize({"autosp": {**section, "activation_offloading": offloading}})
    model = zoo.build("llama", num_hidden_layers=layers)
    with Choices() as choices:
        torch.compile(model, backend=autosp_backend)(**autosp.prepare_batch(zoo.batch(2048))).loss.backward()
    return choices.found[-1][1]


def test_a_plan_counts_the_devices_memory(fake_ranks: Callable[..., None]) -> None:
    fake_ranks(2)
    kept, moved = needed(False, 1e6, 2), needed(True, 1e6, 2)
    assert moved < 0.8 * kept


@pytest.mark.slow
def test_auto_offloads_what_does_not_fit(fake_ranks: Callable[..., None]) -> None:
    fake_ranks(2)
    assert needed("auto", 1e-3, 2) == pytest.approx(needed(True, 1e-3, 2))


class Node:
    """A scheduler node as the pass sees one."""

    def __init__(self, name: str, *needs: str, operator: Any = None) -> None:
        self.name = name
        self.node = SimpleNamespace(op_overload=operator)
        self.unmet_dependencies = [SimpleNamespace(name=need) for need in needs]

    def get_buffer_names(self) -> list[str]:
        return [self.name]


def names(nodes: list[Node]) -> list[str]:
    return [node.name for node in place_host_copies(nodes)]


def test_places_in_a_forward() -> None:
    work = [Node(f"k{i}", *([f"k{i - 1}"] if i else [])) for i in range(5)]
    starts = [Node(f"s{i}", f"k{i}", operator=TO_HOST) for i in range(3)]
    ends = [Node(f"e{i}", f"s{i}", f"k{i}", operator=TO_HOST_DONE) for i in range(3)]
    assert names([*work, *starts, *ends]) == ["k0", "s0", "k1", "s1", "k2", "e0", "s2", "k3", "k4", "e1", "e2"]


def test_places_in_a_backward() -> None:
    starts = [Node(f"s{i}", "an input", operator=FROM_HOST) for i in range(3)]
    ends = [Node(f"e{i}", f"s{i}", operator=FROM_HOST_DONE) for i in range(3)]
    work = [Node("k0"), Node("k1", "k0", "e2"), Node("k2", "k1", "e1"), Node("k3", "k2", "e0", "e1"), Node("k4", "k3")]
    order = ["s2", "s1", "k0", "e2", "s0", "k1", "e1", "k2", "e0", "k3", "k4"]
    assert names([*starts, *ends, *work]) == order


@pytest.mark.parametrize("shape", [(4, 6), (0, 3), (), (5,)])
def test_the_operators_keep_values_and_strides(shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape, dtype=torch.float64)
    for x in (whole, whole.t(), whole.bfloat16()):
        host = TO_HOST(x)
        assert host.data_ptr() != x.data_ptr() or not x.numel()
        here = FROM_HOST_DONE(FROM_HOST(TO_HOST_DONE(host, x), x.device))
        assert here.stride() == x.stride() and torch.equal(here, x)
    strided = torch.randn(6, 8)[:, :5]
    assert torch.equal(FROM_HOST_DONE(FROM_HOST(TO_HOST_DONE(TO_HOST(strided), strided), strided.device)), strided)


def test_a_copy_awaited_with_other_memory_is_refused() -> None:
    """What the first operator reads would not be kept: a compiler that copies inputs must not go unseen."""
    x = torch.randn(3, 4)
    with pytest.raises(InternalError, match="other memory than it began with"):
        TO_HOST_DONE(TO_HOST(x), x.clone())
    with pytest.raises(InternalError, match="other memory than it began with"):
        FROM_HOST_DONE(FROM_HOST(x, x.device).clone())


def chosen(make: Callable[[Any, Any], list[fx.Node]]) -> list[str]:
    """What is moved of what ``make`` saves; it gets functions that call an operator and that make an input."""
    from torch._subclasses import FakeTensorMode

    graph = fx.Graph()
    mode = FakeTensorMode()

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        with mode:
            node.meta["val"] = target(*fx.map_arg(args, lambda arg: arg.meta["val"]))
        return node

    def given(name: str, device: str) -> fx.Node:
        node = graph.placeholder(name)
        with mode:
            node.meta["val"] = torch.empty(4, 8, device=device)
        return node

    saved = make(call, given)
    result = call(aten.exp.default, saved[0])
    graph.output((result, *saved))
    return [node.name for node in offload._chosen(fx.GraphModule({}, graph), 1)]


def test_parts_of_inputs_stay() -> None:
    """A packed projection is cut into three weights, each contiguous: moving them would give nothing back."""

    def make(call: Any, given: Any) -> list[fx.Node]:
        parts = call(aten.split.Tensor, given("weight", "cpu"), 2)
        return [call(aten.sin.default, given("x", "cpu")), *(call(operator.getitem, parts, i) for i in range(2))]

    assert chosen(make) == ["sin_default"]


def test_what_a_collective_still_writes_stays(fake_ranks: Callable[..., None]) -> None:
    fake_ranks(2)

    def make(call: Any, given: Any) -> list[fx.Node]:
        x = call(aten.sin.default, given("x", "cpu"))
        sent = [call(_c10d.all_reduce.default, x, "sum", "0") for _ in range(3)]
        view = call(aten.view.default, sent[1], [32])
        return [sent[0], view, call(_c10d.wait_tensor.default, sent[2])]

    assert chosen(make) == ["wait_tensor_default"]


def test_states_of_random_generators_stay() -> None:
    """Checkpointing saves one for each operator that draws, or that may: it is no result of the device."""
    draws = torch._prims.rng_prims.run_and_save_rng_state

    def make(call: Any, given: Any) -> list[fx.Node]:
        drawn = call(draws, aten.rand_like.default, given("x", "cpu"))
        state = call(operator.getitem, drawn, 0)
        assert state.meta["val"].dtype == torch.uint8
        return [call(operator.getitem, drawn, 1), state]

    assert chosen(make) == ["getitem_1"]


def test_what_the_host_computes_stays_beside_a_gpu() -> None:
    def make(call: Any, given: Any) -> list[fx.Node]:
        return [call(aten.sin.default, given("x", "cuda")), call(aten.cos.default, given("y", "cpu"))]

    assert chosen(make) == ["sin_default"]


def test_an_encoder_has_no_last_layer() -> None:
    """Its layers may have higher numbers than the decoder's: what these save is moved all the same."""
    graph = fx.Graph()
    paths = [f"L['self'].encoder.layers.{i}" for i in range(4)] + [f"L['self'].decoder.layers.{i}" for i in range(2)]
    for path in paths:
        graph.placeholder(path[-1]).meta["nn_module_stack"] = {"": (path + ".mlp", None)}
    place = {node: number for number, node in enumerate(graph.nodes)}
    assert offload._last_layer(graph, place) == 5


def test_a_graph_in_which_nothing_is_moved_is_told(caplog: pytest.LogCaptureFixture) -> None:
    for function, told in ((lambda x, y: x @ y, 1), (chain, 0)):  # inputs alone are saved; results of products are
        torch._dynamo.reset()
        caplog.clear()
        inputs = [torch.randn(8, 8, requires_grad=True) for _ in range(2 if told else 5)]
        backend = aot_autograd(fw_compiler=boxed_nop, partition_fn=offload.OffloadSaved())
        with caplog.at_level(logging.WARNING, logger="autosp"):
            torch.compile(function, backend=backend)(*inputs).sum().backward()
        assert sum("activation_offloading has no effect" in r.getMessage() for r in caplog.records) == told


def test_a_copy_that_nobody_awaits_keeps_what_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error between its two operators must not free memory that is still written; what is done is let go."""
    from autosp.custom_ops import host_copy

    monkeypatch.setattr(host_copy, "_running", {})
    monkeypatch.setattr(host_copy, "_written", {})
    x = torch.ones(4)
    address = FROM_HOST(x, x.device).data_ptr()  # its result is dropped at once
    assert list(host_copy._written) == [address]
    done = False
    monkeypatch.setitem(host_copy._running, address, (x.data_ptr(), SimpleNamespace(query=lambda: done)))
    second = FROM_HOST(x, x.device)
    assert set(host_copy._written) == {address, second.data_ptr()}
    done = True
    third = FROM_HOST(x, x.device)
    assert set(host_copy._written) == {third.data_ptr()}  # the second's is done too, and is awaited all the same
    assert torch.equal(FROM_HOST_DONE(second), x) and torch.equal(FROM_HOST_DONE(third), x)
    assert not host_copy._written


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Memory that is written again at once must not reach the copies, and the device's is given back."""
    device = torch.device("cuda")
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    hosts, running = [], []
    for i in range(12):
        x = torch.full((1 << 24,), float(i), device=device)
        torch.cuda._sleep(2_000_000)
        running.append((TO_HOST(x), x))
        del x
        if len(running) == 2:
            hosts.append(TO_HOST_DONE(*running.pop(0)))
    hosts += [TO_HOST_DONE(*pair) for pair in running]
    running.clear()
    assert torch.cuda.memory_allocated() == base and all(host.is_pinned() for host in hosts)
    assert torch.cuda.max_memory_allocated() <= base + 4 * (1 << 26)
    coming = [FROM_HOST(host, device) for host in hosts]
    hosts.clear()
    for i, x in enumerate(coming):
        assert bool((FROM_HOST_DONE(x) == float(i)).all())
