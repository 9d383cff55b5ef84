"""Settings of the inner compiler: what a memory budget recomputes, and when collectives are waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import zoo
from pool import RankPool
from torch.utils._python_dispatch import TorchDispatchMode

import autosp
from autosp.inner import compile_local


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


def saved_and_backward(budget: float) -> tuple[int, Counter[str]]:
    """Elements that the forward saves, parameters among them, and the operators of the backward."""
    from autosp.backend import autosp_backend

    torch._dynamo.reset()
    autosp.initialize({"autosp": {"inner_backend": "aot_eager", "activation_memory_budget": budget}})
    compiled = torch.compile(zoo.build("llama", num_hidden_layers=1), backend=autosp_backend)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch._subclasses.FakeTensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compiled(**autosp.prepare_batch(zoo.batch(64))).loss
    with Operators() as operators:
        loss.backward()
    return sum(kept.values()), operators.found


def test_a_budget_saves_less_and_never_attends_or_exchanges_again(fake_ranks: Callable[..., None]):
    fake_ranks(2)
    full, plain = saved_and_backward(1.0)
    half, _ = saved_and_backward(0.5)
    least, recomputed = saved_and_backward(0.0)
    assert least < half < full
    assert sum(recomputed.values()) > sum(plain.values())
    assert recomputed["mm"] > plain["mm"], "matrix products are recomputed"
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert (plain[attention], recomputed[attention]) == (0, 0)
    for name in ("all_to_all_single", "all_gather_into_tensor", "all_reduce"):
        assert plain[name] == recomputed[name], name


@pytest.mark.parametrize("budget", [0.0, 0.3])
def test_exact_under_a_budget(ranks: RankPool, budget: float):
    config = {"autosp": {"inner_backend": "aot_eager", "activation_memory_budget": budget}}
    for results in ranks.run(parity.run_model, zoo_llama, [zoo.batch(16), zoo.batch(17)], config=config, timeout=300):
        for result in results:
            result.check()


def zoo_llama() -> torch.nn.Module:
    return zoo.build("llama", num_hidden_layers=1)


@pytest.mark.parametrize("overlap", [True, False])
def test_inductor_is_told_to_put_off_waits(monkeypatch: pytest.MonkeyPatch, overlap: bool):
    seen: dict[str, Any] = {}
    monkeypatch.setattr("autosp.inner.lookup_backend", lambda name: lambda *args, **kwargs: seen.update(kwargs))
    config = autosp.AutoSPConfig(overlap_communication=overlap)
    compile_local(torch.fx.GraphModule({}, torch.fx.Graph()), [], config)
    patches = seen["config_patches"]
    assert patches.get("reorder_for_compute_comm_overlap", False) is overlap
    assert set(patches) <= set(torch._inductor.config.get_config_copy())
