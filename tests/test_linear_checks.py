"""Every argument that is refused, with the message that says why. Nothing is computed before it."""

from __future__ import annotations

import pytest
import torch

from autosp.custom_ops.linear_loss import (
    linear_cross_entropy_sum,
    vocab_parallel_linear_logprobs,
    vocab_parallel_linear_token_stats,
)
from autosp.custom_ops.linear_loss import vocab_parallel_linear_cross_entropy as fused
from autosp.errors import InputError

H = torch.zeros(4, 8)
W = torch.zeros(10, 8)
T = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden": [[1.0]]}, "hidden is a list"),
        ({"hidden": H.long()}, "hidden is torch.int64"),
        ({"hidden": torch.zeros(4, 7)}, r"\[..., H\]"),
        ({"weight": torch.zeros(10)}, r"weight \(10,\)"),
        ({"weight": W.bfloat16()}, "cast them to one dtype, or run under"),
        ({"bias": torch.zeros(9)}, r"bias has shape \(9,\); needed is \[10\]"),
        ({"target": T.float()}, "target is torch.float32"),
        ({"target": None}, "target is NoneType"),
        ({"ignore_index": None}, "ignore_index is None; allowed is an integer"),
        ({"ignore_index": 2.5}, "ignore_index is 2.5"),
        ({"vocab_start_index": 0.0, "vocab_end_index": 5.0}, "vocab_start_index is 0.0; allowed is an integer"),
        ({"target": T[:3]}, r"target has shape \(3,\); needed is \(4,\)"),
        ({"target": T[:, None]}, "target has shape"),
        ({"tp_group": 3}, "tp_group is a int"),
        ({"sp_group": 3}, "sp_group is a int"),
        ({"vocab_start_index": 0}, "give both bounds"),
        ({"vocab_end_index": 5}, "give both bounds"),
        ({"vocab_start_index": 0, "vocab_end_index": 11}, r"bounds \[0, 11\) do not fit a weight of 10 rows"),
        ({"vocab_start_index": 5, "vocab_end_index": 3}, "do not fit"),
        ({"reduction": "batchmean"}, "reduction is 'batchmean'; allowed are 'none', 'sum', 'mean'"),
        ({"memory": "small"}, "memory is 'small'"),
        ({"chunk_size": 0}, "chunk_size is 0; allowed is a positive number"),
        ({"chunk_size": 2.5}, "chunk_size is 2.5"),
        ({"label_smoothing": 1.5}, r"label_smoothing is 1.5; allowed is a number in \[0.0, 1.0\]"),
        ({"z_loss": -1.0}, "z_loss is -1.0"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": torch.ones(3)}, r"temperature has shape \(3,\)"),
        ({"temperature": torch.ones(4, requires_grad=True)}, "temperature requires a gradient"),
        ({"main_grad": True}, "no attribute main_grad"),
        ({"main_grad": W.bfloat16()}, "main_grad is torch.bfloat16"),
        ({"main_grad": 3.0}, r"main_grad is 3.0; allowed are a tensor, True \(weight.main_grad\)"),
        ({"main_grad": torch.zeros(9, 8)}, "main_grad is torch.float32"),
        ({"main_grad_upstream": 1.0}, "without main_grad"),
        ({"main_grad": torch.zeros(10, 8), "main_grad_upstream": 1.0, "reduction": "none"}, "needs reduction"),
        ({"main_grad": torch.zeros(10, 8), "main_grad_upstream": 1.0, "memory": "lean"}, "needs reduction"),
        ({"main_grad": torch.zeros(10, 8), "main_grad_upstream": 1.0}, "weight does not require a gradient"),
        (
            {
                "hidden": H.half(),
                "weight": W.half().requires_grad_(),
                "main_grad": torch.zeros(10, 8),
                "main_grad_upstream": 1.0,
            },
            "not available in float16",
        ),
        ({"hidden": H.double(), "weight": W}, "float64"),
    ],
)
def test_refused(changes, message):
    arguments = {"hidden": H, "weight": W, "target": T} | changes
    with pytest.raises(InputError, match=message):
        fused(arguments.pop("hidden"), arguments.pop("weight"), arguments.pop("target"), **arguments)


def test_mixed_float64_under_autocast_is_refused():
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(InputError, match="mix float64"):
        fused(H, W.double(), T)


def test_a_strange_kernel_switch_is_refused(monkeypatch):
    from autosp.errors import ConfigError

    monkeypatch.setenv("AUTOSP_TRITON", "maybe")
    with pytest.raises(ConfigError, match="AUTOSP_TRITON is 'maybe'"):
        fused(H, W, T)


def test_top_k_index_is_for_logprobs_only():
    assert vocab_parallel_linear_logprobs(H, W, T[:, None].expand(4, 2)).shape == (4, 2)
    with pytest.raises(InputError, match="trailing top-k"):
        vocab_parallel_linear_logprobs(H, W, T[:3])


def test_an_ignored_id_that_is_no_integer_is_refused_in_the_whole_family():
    for function in (vocab_parallel_linear_logprobs, vocab_parallel_linear_token_stats, linear_cross_entropy_sum):
        with pytest.raises(InputError, match="ignore_index is None"):
            function(H, W, T, ignore_index=None)
        with pytest.raises(InputError, match="target is NoneType"):
            function(H, W, None)


def test_integer_targets_of_other_widths():
    for dtype in (torch.int32, torch.int16, torch.uint8):
        assert fused(H, W, T.to(dtype)) == fused(H, W, T)


@pytest.mark.parametrize("settings", [(True, True), (False, True), (False, False)])
def test_reduction_settings_are_restored(settings):
    from autosp.custom_ops.linear_loss.modes import fp32_reductions

    matmul = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = [getattr(matmul, name) for name in names]

    def state():
        return [(getattr(matmul, name), getattr(matmul, f"{name}_split_k", True)) for name in names]

    if settings[1] is False and not hasattr(matmul, f"{names[0]}_split_k"):
        pytest.skip("this torch has no setting for split-K")
    try:
        for name in names:
            setattr(matmul, name, settings if not settings[1] else settings[0])
        outside = state()
        with pytest.raises(KeyError), fp32_reductions():
            assert [allowed for allowed, _ in state()] == [False, False]
            assert [split for _, split in state()] == [split for _, split in outside]
            raise KeyError
        assert state() == outside
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(matmul, name, value)


def test_forward_mode_is_refused() -> None:
    """An operator without a forward-mode formula would drop the tangent: a derivative of 0."""
    from autosp.custom_ops.linear_loss import vocab_parallel_linear_jsd

    with pytest.raises(InputError, match="hidden carries a tangent"):
        torch.func.jvp(lambda h: fused(h, W, T), (H,), (H,))
    with pytest.raises(InputError, match="teacher_weight carries a tangent"):
        torch.func.jvp(lambda w: vocab_parallel_linear_jsd(H, W, H, w), (W,), (W,))
