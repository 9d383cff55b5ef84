"""Every Triton kernel, forward and backward, in Triton's interpreter.

Triton decides when it is imported whether it interprets, so the cases run in a Python of their own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run_interpreted(*arguments: str, timeout: int) -> None:
    environment = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    environment.pop("AUTOSP_TRITON", None)
    environment["PYTHONPATH"] = os.pathsep.join([str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=FOLDER.parent, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout or "passed" in done.stderr or "[100%]" in done.stdout


def test_kernel_cases() -> None:
    run_interpreted(str(FOLDER / "vocab_kernel_cases.py"), timeout=200)


def test_the_losses_on_kernels() -> None:
    run_interpreted(*(str(FOLDER / name) for name in ("test_vocab_losses.py", "test_vocab_loss_edges.py")), timeout=300)


@pytest.mark.slow
def test_real_vocabularies_on_kernels() -> None:
    run_interpreted("-m", "slow", str(FOLDER / "test_vocab_losses.py"), timeout=1200)
