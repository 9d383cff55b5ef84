"""Which path runs, and what happens without Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autosp.custom_ops.dispatch import triton_usable

ROOT = Path(__file__).parent.parent


def run_python(code: str, **environment: str) -> str:
    variables = {k: v for k, v in os.environ.items() if k not in ("AUTOSP_TRITON", "TRITON_INTERPRET")}
    variables.update(environment, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_cpu_tensors_take_the_plain_path(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from autosp.custom_ops import dispatch

    dispatch._device_served.cache_clear()
    assert not triton_usable(torch.zeros(2))
    assert not triton_usable()
    dispatch._device_served.cache_clear()


def test_the_switch_and_the_dtypes():
    code = (
        "import torch\n"
        "from autosp.custom_ops.dispatch import triton_usable as usable\n"
        "one = torch.zeros(1)\n"
        "print(usable(one), usable(one.double()), usable(one, one.long()), usable(one, one.to('meta')))"
    )
    code += "\nimport os; os.environ['AUTOSP_TRITON'] = '0'\nprint(usable(one))"
    assert run_python(code, TRITON_INTERPRET="1").split() == ["True", "False", "True", "False", "False"]


def test_the_losses_work_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from autosp.custom_ops.vocab_parallel import vocab_parallel_entropy\n"
        "x = torch.zeros(2, 8, requires_grad=True); y = vocab_parallel_entropy(x); y.sum().backward()\n"
        "print(round(y[0].item(), 4), float(x.grad.abs().max()))"
    )
    assert run_python(code) == "2.0794 0.0"


class FakeDriver:
    """Triton's driver of a device that is not there."""

    def __init__(self, backend: str, device: str = "cuda") -> None:
        self.backend, self.device = backend, device
        self.active = self

    def get_active_torch_device(self) -> torch.device:
        return torch.device(self.device)

    def get_current_target(self) -> FakeDriver:
        return self


@pytest.mark.parametrize(
    "driver, asked, capability, served",
    [
        (FakeDriver("cuda"), "cuda", (9, 0), True),
        (FakeDriver("cuda"), "cuda", (8, 0), True),
        (FakeDriver("cuda"), "cuda", (7, 5), False),
        (FakeDriver("hip"), "cuda", (0, 0), True),
        (FakeDriver("xpu", "xpu"), "xpu", (0, 0), True),
        (FakeDriver("xpu", "xpu"), "cuda", (9, 0), False),
    ],
)
def test_a_device_is_served_by_what_it_can_do(monkeypatch, driver, asked, capability, served):
    runtime = pytest.importorskip("triton.runtime")
    from autosp.custom_ops import dispatch

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(runtime, "driver", driver)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert dispatch._device_served.__wrapped__(asked, 0) is served
