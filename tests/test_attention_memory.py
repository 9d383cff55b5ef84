"""No tensor of a long sequence's program grows with its square; what a step really takes is measured once."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pool
import pytest
import torch
import torch._functorch.config as functorch_config
import zoo
from pool import RankPool
from torch import fx
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import detect_fake_mode

LENGTH = 65536


class _Compiled(Exception):
    """Ends a compilation once its graphs have been looked at."""


def packed(length: int, document: int) -> dict[str, torch.Tensor]:
    return {"position_ids": (torch.arange(length) % document).unsqueeze(0)}


def padded(length: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(1, length, dtype=torch.long)
    mask[:, -1000:] = 0
    return {"attention_mask": mask}


CASES: dict[str, tuple[str, Callable[[int], dict[str, torch.Tensor]]]] = {
    "causal": ("llama", lambda length: {}),
    "packed": ("llama", lambda length: packed(length, 1024)),
    "padded": ("llama", padded),
    "window": ("mistral", padded),
}


def largest(gm: fx.GraphModule) -> tuple[int, str]:
    """The largest tensor that a node of a graph makes, in elements."""
    found = [(0, "nothing")]
    for node in gm.graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, (list, tuple)) else [values]:
            if isinstance(value, torch.Tensor):
                found.append((int(value.numel()), node.format_node() or node.name))
    return max(found)


def graphs_of_a_step(case: str, strategy: str) -> list[tuple[int, str]]:
    """Largest tensors of the local program, its forward and its backward, on one of two ranks; nothing is run."""
    import autosp
    from autosp import backend, mesh

    name, more = CASES[case]
    found = []

    def inspect(gm: fx.GraphModule, examples: list[Any]) -> Any:
        state = mesh.select(None)
        work, sources = backend._partition(gm, examples, state)
        found.append(largest(work.graph))

        def keep(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
            found.append(largest(graph))
            return graph.forward

        with detect_fake_mode(examples), functorch_config.patch(force_non_lazy_backward_lowering=True):
            aot_module_simplified(work.graph, sources.local, fw_compiler=keep, bw_compiler=keep)
        raise _Compiled

    with pool.fake_group(2):
        autosp.initialize({"autosp": {"attention": strategy}})
        ids = torch.ones(1, LENGTH, dtype=torch.long)
        model = zoo.build(name, num_hidden_layers=1, max_position_embeddings=LENGTH)
        batch = {"input_ids": ids, "labels": ids.clone(), "use_cache": False, **more(LENGTH)}
        with pytest.raises(Exception, match="_Compiled"):
            torch.compile(model, backend=inspect, dynamic=False)(**batch)
    return found


SLOW = [
    ("causal", "auto"),
    ("padded", "ulysses"),
    ("window", "ulysses"),
    ("packed", "allgather_kv"),
    ("window", "ring"),
]


@pytest.mark.parametrize(
    ("case", "strategy"), [("packed", "ulysses"), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_no_tensor_is_quadratic_in_the_length(case: str, strategy: str):
    found = graphs_of_a_step(case, strategy)
    assert len(found) == 3, "a local program, its forward and its backward"
    for size, node in found:
        # Logits of this rank's tokens, 128 a token, are the largest that a step needs.
        assert size <= LENGTH * 128, node


def long_step(rank_info: Any) -> float:
    """GiB that a step of 64k tokens in documents of 1024 adds to the peak of this process."""
    import autosp

    autosp.initialize({"autosp": {"inner_backend": "aot_eager", "attention": "ulysses"}})
    model = zoo.build("llama", num_hidden_layers=1, hidden_size=16, num_attention_heads=2, num_key_value_heads=2,
                      intermediate_size=16, max_position_embeddings=LENGTH)  # fmt: skip
    compiled = torch.compile(model, backend="autosp", dynamic=False)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ids = torch.randint(1, zoo.VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = autosp.prepare_batch({"input_ids": ids, "labels": ids.clone(), **packed(LENGTH, 1024)})
    compiled(**batch, use_cache=False).loss.backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 2**20


@pytest.mark.slow
def test_the_peak_of_a_long_step(ranks: RankPool):
    """A mask of this length alone, one byte a pair of tokens, would be 4 GiB."""
    for gib in ranks.run(long_step, timeout=340):
        assert gib < 1.5, gib
