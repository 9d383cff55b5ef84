"""The Triton kernels against plain PyTorch, run by Triton's interpreter where there is no GPU.

The interpreter is chosen when a kernel is defined, so without a GPU this file runs itself once more in a process that
has ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from test_linear_oracle import relative_error

from autosp.custom_ops import dispatch
from autosp.custom_ops.linear_loss import pair_rows, rows

pytest.importorskip("triton")

GPU = torch.cuda.is_available()
INSIDE = GPU or os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if GPU else "cpu"


def run_inside(marker: str, timeout: int) -> None:
    environment = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    environment.pop("AUTOSP_TRITON", None)
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", marker, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


@pytest.mark.skipif(INSIDE, reason="the kernels run in this process")
def test_in_the_interpreter():
    run_inside("not slow", 300)


@pytest.mark.slow
@pytest.mark.skipif(INSIDE, reason="the kernels run in this process")
def test_wide_sweep_in_the_interpreter():
    run_inside("slow", 500)


inside = pytest.mark.skipif(not INSIDE, reason="run by test_in_the_interpreter")


def plain(monkeypatch, function, *args, **kwargs):
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "triton_usable", lambda *_: False)
        return function(*args, **kwargs)


def block(n, v, dtype, seed=0):
    """Logits with a row stride that is not ``v``, NaN between the rows."""
    x = torch.full((n, v + 3), float("nan"), dtype=dtype, device=DEVICE)
    x[:, :v] = torch.randn(n, v, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype) * 4
    return x[:, :v]


def shapes(n):
    per_row = (torch.rand(n, generator=torch.Generator().manual_seed(3)) + 0.5).to(DEVICE)
    return [rows.Shape(), rows.Shape(5.0), rows.Shape(0.0, per_row), rows.Shape(5.0, per_row)]


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("v", [1, 7, 4099])
def test_statistics(monkeypatch, dtype, v):
    assert dispatch.triton_usable(torch.zeros(1, dtype=dtype, device=DEVICE))
    x = block(3, v, dtype)
    for shape in shapes(3):
        got = rows.statistics(x, shape, weighted=True, centred=True)
        expected = plain(monkeypatch, rows.statistics, x, shape, weighted=True, centred=True)
        for name in ("top", "total", "weighted", "centred"):
            a, b = getattr(got, name), getattr(expected, name)
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5 * v**0.5, msg=lambda m, name=name: f"{name}: {m}")


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_merged_and_the_ids_picked(monkeypatch, dtype):
    x = block(4, 300, dtype)
    x[1, :120] = float("-inf")
    ids = torch.tensor([[0], [299], [121], [-7]], device=DEVICE)

    def run(shape, columns):
        running = rows.Running(4, x.device, torch.float32, shape, True, True, ids)
        for part in x.split(columns, 1):
            running.add(part)
        return running

    for shape in shapes(4):
        whole = plain(monkeypatch, run, shape, 300)
        for columns in (300, 120, 77):
            got = run(shape, columns)
            for name in ("top", "total", "weighted", "centred"):
                a, b = getattr(got.state, name), getattr(whole.state, name)
                torch.testing.assert_close(a, b, rtol=3e-5, atol=1e-3, msg=lambda m, name=name: f"{name}: {m}")
            torch.testing.assert_close(got.picked, whole.picked)


@inside
def test_statistics_of_masked_and_wild_rows(monkeypatch):
    x = block(5, 9000, torch.float32)
    x[0, :5000] = float("-inf")
    x[1] = float("-inf")
    x[1, 17] = 2.0
    x[2, ::2], x[2, 1::2] = 3e38, -3e38
    x[2, 0] = 3.2e38
    x[3] += 1000
    x[4, 8] = float("nan")
    got = rows.statistics(x, rows.Shape(), weighted=True)
    expected = plain(monkeypatch, rows.statistics, x, rows.Shape(), weighted=True)
    for name in ("top", "total", "weighted"):
        a, b = getattr(got, name)[:4], getattr(expected, name)[:4]
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-3)
    assert (got.total[1], got.weighted[1]) == (1.0, 0.0) and (got.total[2], got.weighted[2]) == (1.0, 0.0)
    assert torch.isnan(got.total[4])


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("v", [1, 7, 4099])
def test_gradient(monkeypatch, dtype, v):
    n = 3
    x = block(n, v, dtype)
    random = torch.randn(4, n, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    target = torch.tensor([0, v - 1, -5], device=DEVICE)
    for shape in shapes(n):
        state = plain(monkeypatch, rows.statistics, x, shape)
        for a, c, d in ((None, None, None), (random[0], None, None), (random[0], random[2], random[3])):
            co = rows.Coefficients(state.top, state.log_total, random[1], a, None if a is None else target, c, d)
            out = torch.full((n, v + 5), float("nan"), dtype=dtype, device=DEVICE)
            rows.gradient_into(out[:, :v], x, shape, co)
            expected = torch.empty(n, v, device=DEVICE)
            plain(monkeypatch, rows.gradient_into, expected, x, shape, co)
            assert relative_error(out[:, :v], expected) < (2e-5 if dtype == torch.float32 else 8e-3)
            assert torch.isnan(out[:, v:]).all()
            over = x.clone()
            rows.gradient_into(over, over, shape, co)
            assert torch.equal(over, out[:, :v])


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [pair_rows.Kind(0), pair_rows.Kind(1), pair_rows.Kind(2, 0.3)])
def test_pairs(monkeypatch, dtype, kind):
    n, v = 3, 4099
    raw = block(n, v, dtype), block(n, v, dtype, seed=1)
    raw[1][2] = raw[0][2]
    raw[1][0, 5] = float("-inf")
    if kind.code == 0:
        raw[0][0, 5] = -20.0
    for shape in shapes(n)[::3]:
        sides = []
        for x in raw:
            state = plain(monkeypatch, rows.statistics, x, shape)
            sides.append(pair_rows.Side(x, shape, state.top, state.log_total))
        got = pair_rows.values(*sides, kind)
        expected = plain(monkeypatch, pair_rows.values, *sides, kind)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)
        assert kind.value(*got)[2] == 0
        finite = [torch.nan_to_num(x, posinf=50.0) for x in expected]
        gradient = pair_rows.PairGradient(torch.rand(n, device=DEVICE) + 0.5, *finite)
        out = [torch.empty(n, v, dtype=dtype, device=DEVICE) for _ in raw]
        reference = [torch.empty(n, v, device=DEVICE) for _ in raw]
        pair_rows.gradients_into(*out, *sides, kind, gradient)
        plain(monkeypatch, pair_rows.gradients_into, *reference, *sides, kind, gradient)
        for a, b in zip(out, reference, strict=True):
            mask = torch.isfinite(b)
            assert relative_error(a[mask], b[mask]) < (3e-5 if dtype == torch.float32 else 8e-3)
        only = torch.empty(n, v, dtype=dtype, device=DEVICE)
        pair_rows.gradients_into(only, None, *sides, kind, gradient)
        assert torch.equal(torch.nan_to_num(only), torch.nan_to_num(out[0]))


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scale(dtype):
    from autosp.custom_ops.linear_loss import kernels

    x = torch.randn(5003, device=DEVICE)
    out = torch.full((5003,), float("nan"), dtype=dtype, device=DEVICE)
    kernels.scale_into(out, x, torch.tensor(0.3, device=DEVICE))
    assert relative_error(out, x * 0.3) < (1e-6 if dtype == torch.float32 else 8e-3)


@inside
def test_a_row_has_the_same_bits_wherever_it_stands():
    x = block(4, 5000, torch.bfloat16)
    alone = rows.statistics(x[2:3], rows.Shape(), weighted=True)
    among = rows.statistics(torch.cat([x[2:3], x, x[2:3]]), rows.Shape(), weighted=True)
    for name in ("top", "total", "weighted"):
        a = getattr(alone, name)[0]
        assert all(torch.equal(getattr(among, name)[i], a) for i in (0, 3, 5))


@inside
def test_the_public_function_takes_the_kernels(monkeypatch):
    from autosp.custom_ops.linear_loss import kernels, vocab_parallel_linear_cross_entropy

    calls = []
    original = kernels.row_gradient
    monkeypatch.setattr(kernels, "row_gradient", lambda *a: calls.append(1) or original(*a))
    h = torch.randn(4, 8, device=DEVICE, requires_grad=True)
    w = torch.randn(50, 8, device=DEVICE, requires_grad=True)
    target = torch.tensor([1, 2, -100, 4], device=DEVICE)
    results = []
    for setting in ("1", "0"):
        monkeypatch.setenv("AUTOSP_TRITON", setting)
        results.append(torch.autograd.grad(vocab_parallel_linear_cross_entropy(h, w, target), (h, w)))
    assert len(calls) == 1
    for a, b in zip(*results, strict=True):
        assert relative_error(a, b) < 1e-5


@inside
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("v", [1000, 32000, 50257, 129920])
def test_wide_sweep(monkeypatch, dtype, v):
    x = block(2, v, dtype)
    for shape in shapes(2):
        got = rows.statistics(x, shape, weighted=True, centred=True)
        expected = plain(monkeypatch, rows.statistics, x, shape, weighted=True, centred=True)
        for name in ("top", "total", "weighted"):
            assert relative_error(getattr(got, name), getattr(expected, name)) < 2e-5
        co = rows.Coefficients(got.top, got.log_total, torch.ones(2, device=DEVICE))
        out, reference = torch.empty_like(x), torch.empty(2, v, device=DEVICE)
        rows.gradient_into(out, x, shape, co)
        plain(monkeypatch, rows.gradient_into, reference, x, shape, co)
        assert relative_error(out, reference) < (2e-5 if dtype == torch.float32 else 8e-3)
