"""Fixtures that every test may use."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from pool import RankPool, fake_group

# Fixtures that give a pool of rank processes.
POOLS = {"ranks", "fresh_ranks"}


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(100_000, 20, 100)  # see pool_worker.main
    if os.environ.get("AUTOSP_TEST_REPEATS"):
        import repeats_check

        repeats_check.start()


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    no_gpu = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if POOLS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("processes")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The rank processes of this test run; see `pool.RankPool.run`."""
    with RankPool() as pool:
        yield pool


@pytest.fixture
def inner(request: pytest.FixtureRequest) -> str:
    """The inner backend of a test that shows what the passes make: AOTAutograd in the slow tier or when asked for."""
    slow = request.node.get_closest_marker("slow")
    return os.environ.get("AUTOSP_TEST_INNER", "aot_eager" if slow else "eager")


@pytest.fixture
def fake_ranks() -> Iterator[Callable[..., None]]:
    """``fake_ranks(world_size, rank=0)`` gives this process a group that moves no data, until the test ends."""
    with ExitStack() as stack:

        def start(world_size: int, rank: int = 0) -> None:
            group: AbstractContextManager[None] = fake_group(world_size, rank)
            stack.enter_context(group)

        yield start
