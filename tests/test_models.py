"""Unmodified transformers models: the loss and every gradient of a group are those of one process.

Each model runs on one mesh by default, so that all meshes and all models are met; the whole grid is marked slow.
"""

from __future__ import annotations

import functools
from typing import Any

import parity
import pytest
import zoo
from pool import RankPool

WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "sp2": (2, {}),
    "sp3": (3, {}),
    "sp4": (4, {}),
    "dp2_sp2": (4, {"sequence_parallel_size": 2}),
}
DEFAULT = {
    "llama": "sp4",
    "qwen2": "sp3",
    "qwen3": "sp2",
    "mistral": "dp2_sp2",
    "phi3": "sp2",
    "gemma2": "sp2",
    "gpt2": "sp3",
    "opt": "dp2_sp2",
    "mixtral": "sp2",
    "bert": "sp4",
}
# In every run each model meets one mesh and one length: one that the group divides or, for most, one that it does not.
EVEN = ("qwen3", "gpt2", "opt")
GRID = [
    pytest.param(
        model,
        world,
        length,
        marks=() if DEFAULT[model] == world and (length == 16) == (model in EVEN) else pytest.mark.slow,
        id=f"{model}-{world}-{length}",
    )
    for model in zoo.MODELS
    for world in WORLDS
    for length in (16, 17)
]
# Through AOTAutograd in every run: one of each kind of architecture; of Llama's kind it is the test of Inductor below.
# The others differ from these in what the passes make of them, which "eager" shows in half the time.
THROUGH_AUTOGRAD = ("gemma2", "mixtral", "bert")
# One layer shows every operator of a model, except where layers differ (Gemma-2 alternates its attention).
LAYERS = {"gemma2": 2}


def small(name: str) -> functools.partial[Any]:
    count = "n_layer" if name == "gpt2" else "num_hidden_layers"
    return functools.partial(zoo.build, name, **{count: LAYERS.get(name, 1)})


def test_every_model_has_a_default_mesh():
    assert set(DEFAULT) == set(zoo.MODELS)
    assert set(DEFAULT.values()) == set(WORLDS)


@pytest.mark.parametrize(("model", "world", "length"), GRID)
def test_losses_and_gradients_of_one_process(ranks: RankPool, inner: str, model: str, world: str, length: int):
    size, mesh = WORLDS[world]
    batches = [zoo.batch(length, **({"labels": "first_half"} if length == 16 else {}))]
    config = {"autosp": {"inner_backend": "aot_eager" if model in THROUGH_AUTOGRAD else inner}, **mesh}
    for results in ranks.run(parity.run_model, small(model), batches, config=config, world_size=size, timeout=400):
        for result in results:
            result.check()


@pytest.mark.parametrize("model", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_inductor_at_two_uneven_lengths(ranks: RankPool, model: str):
    config = {"autosp": {"inner_backend": "inductor"}}
    batches = [zoo.batch(17), zoo.batch(21)]
    for results in ranks.run(parity.run_model, small(model), batches, config=config, timeout=580):
        for result in results:
            result.check()
