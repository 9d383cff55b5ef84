"""``activation_memory_budget: "auto"``: the ways to compile a step that are tried, and the memory that it may take.

More budget costs least, then tiles, then offloading.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .config import AutoSPConfig
from .errors import ConfigError
from .fit_memory import FitMemory, StepTooLarge, room_on_device
from .inner import compile_local

log = logging.getLogger("autosp")


def compile_fitting(
    program: Callable[[AutoSPConfig, bool], tuple[fx.GraphModule, list[Any]]],
    config: AutoSPConfig,
    room: float,
    largest: Callable[[float], float],
    compiler: Callable[..., Any] | None,
) -> Callable[..., Any]:
    """Compile the cheapest way that fits, or the last one where none does.

    Args:
        program: gives the graph and its inputs for the settings of a way; told whether another way came before.
        config: the user's settings.
        room: bytes that a step may take.
        largest: the largest of a number over the ranks that must choose alike; collective.
        compiler: see `autosp.inner.compile_local`.
    """
    ways = list(_ways(config))
    for number, way in enumerate(ways):
        fit = FitMemory(room, largest, must_fit=number < len(ways) - 1, config=way)
        graph, examples = program(way, number > 0)
        try:
            return compile_local(graph, examples, way, compiler, fit)
        except StepTooLarge as error:
            log.info("activation_memory_budget auto: %s; trying the next way", error)
    raise AssertionError("the last way takes what it gets")


def _ways(config: AutoSPConfig) -> Iterator[AutoSPConfig]:
    """The settings that "auto" leaves open, from the cheapest to the one that needs least memory."""
    tiles = [1, 8] if config.token_tiles == "auto" else [config.token_tiles]
    settings: dict[str, Any] = {"activation_offloading": config.activation_offloading is True}
    for count in tiles:
        settings["token_tiles"] = count
        yield config.model_copy(update=settings)
    if config.activation_offloading == "auto":
        yield config.model_copy(update={**settings, "activation_offloading": True})


def room_for_step(
    example_inputs: Sequence[Any],
    config: AutoSPConfig,
    parameters: Sequence[Any],
    largest: Callable[[float], float],
) -> float:
    """Bytes that a step may take on every rank that must choose alike: the least of them. Collective, as ``largest``.

    Raises:
        ConfigError: no ``step_memory_gib`` is given, and there is no CUDA device to ask.
    """
    if config.step_memory_gib is not None:
        return -largest(-config.step_memory_gib * 2**30)
    tensors = [x for x in example_inputs if isinstance(x, torch.Tensor)]
    device = next((x.device for x in tensors if x.device.type == "cuda"), None)
    if device is None:
        raise ConfigError(
            'activation_memory_budget "auto" asks a CUDA device for its memory, and this program has none: give a '
            "number from 0 to 1, or step_memory_gib, what a step may take"
        )
    trained = [x for x in parameters if isinstance(x, torch.Tensor) and x.requires_grad]
    return -largest(-room_on_device(device, trained))
