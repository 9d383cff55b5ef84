"""Fixtures that every test may use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from pool import RankPool, fake_group


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("AUTOSP_TEST_REPEATS"):
        import repeats_check

        repeats_check.start()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The rank processes of this test run; see `pool.RankPool.run`."""
    with RankPool() as pool:
        yield pool


@pytest.fixture
def fake_ranks() -> Iterator[Callable[..., None]]:
    """``fake_ranks(world_size, rank=0)`` gives this process a group that moves no data, until the test ends."""
    with ExitStack() as stack:

        def start(world_size: int, rank: int = 0) -> None:
            group: AbstractContextManager[None] = fake_group(world_size, rank)
            stack.enter_context(group)

        yield start
