"""Every refusal of the public functions: what was got, what is allowed, what to do."""

from __future__ import annotations

import pytest
import torch

from autosp.custom_ops.vocab_parallel import (
    vocab_parallel_cross_entropy,
    vocab_parallel_entropy,
    vocab_parallel_jsd,
    vocab_parallel_kl_div,
    vocab_parallel_logprobs,
    vocab_parallel_token_stats,
    vocab_parallel_topk_kl_div,
)
from autosp.errors import InputError

X = torch.zeros(3, 8)
T = torch.zeros(3, dtype=torch.long)
L = torch.full((3, 2), 0.1).log()
K = torch.tensor([[0, 1]] * 3)

CASES = {
    "not a tensor": (lambda: vocab_parallel_entropy([1.0]), "logits must be a tensor"),
    "integer logits": (lambda: vocab_parallel_entropy(X.int()), "dtype torch.int32; allowed are float32"),
    "sparse logits": (lambda: vocab_parallel_entropy(X.to_sparse()), "logits is a sparse_coo tensor"),
    "nested logits": (
        lambda: vocab_parallel_entropy(torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)),
        "logits is a nested tensor",
    ),
    "forward mode": (lambda: torch.func.jvp(vocab_parallel_entropy, (X,), (X,)), "tangent of forward-mode"),
    "forward mode teacher": (
        lambda: torch.func.jvp(lambda y: vocab_parallel_kl_div(X, y), (X,), (X,)),
        "teacher carries a tangent",
    ),
    "complex temperature": (lambda: vocab_parallel_entropy(X, temperature=torch.ones(3) * 1j), "real numbers"),
    "end past the largest vocabulary": (
        lambda: vocab_parallel_logprobs(X, T, "g", (1 << 24) - 4),
        "the largest vocabulary",
    ),
    "no dimension": (lambda: vocab_parallel_entropy(torch.tensor(1.0)), "no dimension"),
    "float ids": (lambda: vocab_parallel_logprobs(X, T.float()), "int64 or int32"),
    "ids of another shape": (lambda: vocab_parallel_logprobs(X, T[:2]), r"shape \(3,\) or \(3, 'K'\)"),
    "top-k targets": (lambda: vocab_parallel_cross_entropy(X, K), r"target must have shape \(3,\) for"),
    "ids elsewhere": (lambda: vocab_parallel_logprobs(X, T.to("meta")), "index is on meta"),
    "reduction": (lambda: vocab_parallel_cross_entropy(X, T, reduction="avg"), "'mean', 'sum' or 'none', got 'avg'"),
    "smoothing": (lambda: vocab_parallel_cross_entropy(X, T, label_smoothing=1.5), r"in \[0, 1\], got 1.5"),
    "smoothing type": (lambda: vocab_parallel_cross_entropy(X, T, label_smoothing="a"), r"number in \[0, 1\], got 'a'"),
    "z-loss": (lambda: vocab_parallel_cross_entropy(X, T, z_loss=float("nan")), "z_loss must be a finite number"),
    "ignored id": (
        lambda: vocab_parallel_logprobs(X, T, ignore_index=None),
        "ignore_index must be an integer, got None",
    ),
    "temperature 0": (lambda: vocab_parallel_entropy(X, temperature=0.0), "positive finite number, got 0.0"),
    "temperature shape": (lambda: vocab_parallel_entropy(X, temperature=torch.ones(2)), r"shape \(3,\)"),
    "temperature gradient": (
        lambda: vocab_parallel_entropy(X, temperature=torch.ones(3, requires_grad=True)),
        "temperature.detach",
    ),
    "softcap": (lambda: vocab_parallel_entropy(X, softcap=-1), "softcap must be a positive"),
    "group": (lambda: vocab_parallel_entropy(X, tp_group=3), "ProcessGroup or a group's name, got int"),
    "empty group name": (lambda: vocab_parallel_entropy(X, tp_group=""), "pass None for no group"),
    "sp group": (lambda: vocab_parallel_cross_entropy(X, T, sp_group=3), "sp_group must be None"),
    "start without a group": (
        lambda: vocab_parallel_logprobs(X, T, vocab_start_index=8, vocab_end_index=16),
        "None never means the world",
    ),
    "end without a start": (lambda: vocab_parallel_logprobs(X, T, "g", None, 8), "needs vocab_start_index"),
    "reversed bounds": (lambda: vocab_parallel_logprobs(X, T, "g", 8, 4), r"shard \[8, 4\) does not fit"),
    "bounds wider than the logits": (lambda: vocab_parallel_logprobs(X, T, "g", 0, 9), "does not fit the 8 columns"),
    "negative bound": (lambda: vocab_parallel_logprobs(X, T, "g", -1, 9), "non-negative integer"),
    "float bound": (lambda: vocab_parallel_logprobs(X, T, "g", 1.0, 9), "non-negative integer"),
    "vocabulary too large": (lambda: vocab_parallel_logprobs(X, T, "g", 0, 1 << 24), "largest vocabulary"),
    "too many columns": (
        lambda: vocab_parallel_entropy(torch.empty(1, 1 << 24, device="meta")),
        "the largest vocabulary supported is 16777215",
    ),
    "size against bounds": (
        lambda: vocab_parallel_logprobs(X, T, None, 0, 8, global_vocab_size=9),
        "the ids end at 8",
    ),
    "vocabulary without a group": (
        lambda: vocab_parallel_logprobs(X, T, global_vocab_size=9),
        "exceeds the 8 columns",
    ),
    "in place on a leaf": (
        lambda: vocab_parallel_entropy(X.clone().requires_grad_(), inplace_backward=True),
        "overwrite a leaf",
    ),
    "in place on a view of a leaf": (
        lambda: vocab_parallel_entropy(X.clone().requires_grad_()[:2], inplace_backward=True),
        "the leaf that the logits are a view of",
    ),
    "in place on strided logits": (
        lambda: vocab_parallel_entropy(X[:, ::2], inplace_backward=True),
        "contiguous logits",
    ),
    "teacher shape": (lambda: vocab_parallel_kl_div(X, X[:, :4]), "one shape and device"),
    "teacher type": (lambda: vocab_parallel_jsd(X, None), "teacher must be a tensor"),
    "beta": (lambda: vocab_parallel_jsd(X, X, 1.5), r"beta must be a number in \[0, 1\]"),
    "top-k shapes": (lambda: vocab_parallel_topk_kl_div(X, L, K[:, :1]), "one shape"),
    "top-k type": (lambda: vocab_parallel_topk_kl_div(X, K, K), "floating tensor"),
    "top-k dimensions": (lambda: vocab_parallel_topk_kl_div(X, L[:, 0], K[:, 0]), r"shape \(3, 'K'\)"),
    "strict stats": (lambda: vocab_parallel_token_stats(X, T + 8, strict=True), r"outside \[0, 8\)"),
}


@pytest.mark.parametrize("name", CASES)
def test_refusals(name):
    call, message = CASES[name]
    with pytest.raises(InputError, match=message):
        call()


def test_equal_shards_of_too_large_a_vocabulary(fake_ranks):
    from torch.distributed import group

    from autosp.custom_ops.vocab_parallel.groups import shard_bounds

    fake_ranks(2)
    assert shard_bounds((1 << 23) - 1, -1, -1, -1, group.WORLD.group_name) == (0, (1 << 23) - 1)
    with pytest.raises(InputError, match="2 shards of 8388608 columns; the largest vocabulary"):
        shard_bounds(1 << 23, -1, -1, -1, group.WORLD.group_name)


def test_a_dtensor_is_refused(fake_ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    fake_ranks(2)
    logits = DTensor.from_local(X, init_device_mesh("cpu", (2,)), [Shard(1)])
    with pytest.raises(InputError, match=r"logits.to_local\(\)"):
        vocab_parallel_entropy(logits)
