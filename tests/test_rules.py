"""Every family of operator rules against the whole computation: layout, values, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import RankPool
from rule_harness import Case, Found, Input, check, run_cases
from torch.nn import functional as F

LENGTHS = [6, 7, 4]
"""At 3 ranks: divisible, uneven, and with a rank that has no token at all; at 2 ranks all but 7 divide."""

CASES: dict[str, Case] = {}


def case(name: str, function: Any, inputs: list[Input], expect: str) -> None:
    assert name not in CASES, name
    CASES[name] = Case(function, inputs, expect)


def floats(*shape: Any, at: int | None = None, **more: Any) -> Input:
    return Input("float", shape, at, **more)


def ints(bound: int, *shape: Any, at: int | None = None, **more: Any) -> Input:
    return Input(("int", bound), shape, at, **more)


def bools(*shape: Any, at: int | None = None) -> Input:
    return Input("bool", shape, at)


X = floats(2, "S", 4, at=1)
WHOLE = floats(2, "S", 4)
SEQUENCE_FIRST = floats("S", 2, 4, at=0)
IDS = ints(5, 2, "S", at=1)
HEADS = floats(2, 4, "S", 3, at=2)

# pointwise
case("add", lambda x, y: x + y, [X, X], "S1")
case("add_whole", lambda x, y: x + y, [X, WHOLE], "S1")
case("whole_minus", lambda y, x: y - x, [WHOLE, X], "S1")
case("times_row", lambda x, w: x * w, [X, floats(4)], "S1")
case("times_column", lambda x, w: x * w, [X, floats("S", 1)], "S1")
case("times_stretched", lambda x, w: x * w, [X, floats(2, 1, 4)], "S1")
case("stretched_whole_batch", lambda x, w: x * w, [floats(1, "S", 4, at=1), floats(2, "S", 4)], "S1")
case("scalar", lambda x: 2 * x + 1, [X], "S1")
case("outer_sum", lambda x, y: x.unsqueeze(2) + y.unsqueeze(1), [floats(2, "S", at=1)] * 2, "S1")
case("masked_fill", lambda x, m: x.masked_fill(m, 3.0), [X, bools(2, "S", 4, at=1)], "S1")
case("masked_fill_whole", lambda x, m: x.masked_fill(m, 3.0), [X, bools(2, "S", 1)], "S1")
case("where", lambda m, x, y: torch.where(m, x, y), [bools(2, "S", 4, at=1), X, WHOLE], "S1")
case("where_number", lambda m, x: torch.where(m, x, 0.0), [bools(2, "S", 1), X], "S1")
case("activations", lambda x: F.gelu(x) + F.silu(x) + torch.relu(x) + torch.tanh(x), [X], "S1")
case("likes", lambda x: x + torch.ones_like(x) + torch.full_like(x, 2.0), [X], "S1")
case("new_full", lambda x: x + x.new_full((4,), 2.0), [X], "S1")
case("casts", lambda x: x.float().to(torch.float64) + x.type_as(x), [X], "S1")
case("cast_like_other_sizes", lambda m, x: m.type_as(x) * x[:, :, 0], [ints(2, 2, "S", home=1), X], "S1")
case("cast_cut_like_whole", lambda m, x: m.type_as(x).square(), [ints(2, 2, "S", at=1), floats(3)], "S1")
case("powers", lambda x: x.pow(2) + x.clamp(-1, 1) + x.clamp(min=0), [X], "S1")
case("compare", lambda x, y: (x > y).to(torch.float64), [X, WHOLE], "S1")
case("in_place", lambda x: (x * 2).add_(1).mul_(x), [X], "S1")
case("detach", lambda x: x * x.detach(), [X], "S1")

# views
case("flatten", lambda x: x.view(-1, 4), [X], "F0")
case("flatten_and_back", lambda x: (x.reshape(-1, 4) * 2).view(x.shape), [X], "S1")
case("flatten_sequence_first", lambda x: x.view(-1, 4), [SEQUENCE_FIRST], "F0")
case("flatten_all", lambda x: x.reshape(-1), [X], "F0")
case("flatten_last", lambda x: x.flatten(1), [X], "F1")
case("split_heads", lambda x: x.view(2, x.shape[1], 2, 2).transpose(1, 2), [X], "S2")
case("unflatten", lambda x: x.unflatten(-1, (2, 2)), [X], "S1")
case("unflatten_sequence", lambda x: x.unflatten(1, (2, -1)), [floats(2, 12, 4, at=1)], "refuse: splits")
case("unsqueeze", lambda x: x.unsqueeze(1), [X], "S2")
case("squeeze", lambda x: x.unsqueeze(0).squeeze(0).unsqueeze(-1).squeeze(), [X], "S1")
case("permute", lambda x: x.permute(1, 2, 0), [X], "S0")
case("transpose", lambda x: x.transpose(1, 2).mT, [X], "S1")
case("t", lambda x: x.t(), [floats("S", 4, at=0)], "S1")
case("swapaxes", lambda x: x.swapaxes(0, 1), [X], "S0")
case("expand", lambda x: x.unsqueeze(2).expand(2, x.shape[1], 3, 4), [X], "S1")
case("expand_a_token", lambda x: x[:, -1:].expand(-1, x.shape[1], -1) * x, [X], "S1")
case("expand_a_token_as", lambda x: x[:, :1].expand_as(x) * x, [X], "S1")
case("expand_in_front", lambda x: x.expand(3, *x.shape), [X], "S2")
case("contiguous", lambda x: x.transpose(0, 1).contiguous().view(-1, 4), [X], "F0")
case("view_of_transposed", lambda x: x.transpose(1, 2).reshape(8, -1), [X], "S1")

# windows
case("drop_first", lambda x: x[:, 1:], [X], "W1")
case("drop_last", lambda x: x[:, :-1], [X], "W1")
case("middle", lambda x: x[:, 1:3] * 2, [X], "W1")
case("last_three", lambda x: x[:, -3:], [X], "W1")
case("from_minus_three_to_minus_one", lambda x: x[:, -3:-1], [X], "W1")
case("window_of_window", lambda x: x[:, 1:][:, :-1], [X], "W1")
case("narrow", lambda x: x.narrow(1, 1, 2), [X], "W1")
case("narrow_from_behind", lambda x: x.narrow(1, -4, 2), [X], "W1")
case("complex", lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (2, 2))) * 1j), [X], "S1")
case("beyond_the_end", lambda x: x[:, 1:1000], [X], "W1")
case("slice_whole", lambda x: x[:, :], [X], "S1")
case("slice_features", lambda x: x[..., 1:3], [X], "S1")
case("strided_features", lambda x: x[..., ::2], [X], "S1")
case("strided", lambda x: x[:, ::2], [X], "refuse: strided")
case("flattened_slice", lambda x: x.reshape(-1, 4)[:-1], [X], "refuse: flattened")
case("window_and_whole", lambda x, y: x[:, :-1] + y[:, 1:], [X, WHOLE], "W1")
case("two_windows", lambda x: x[:, :-1] + x[:, 1:], [X], "W1")
case("window_flattened", lambda x: x[:, :-1].reshape(-1, 4) * 2, [X], "F0")
case("window_mean", lambda x: x[:, 1:].mean(1), [X], "P")
case("window_max", lambda x: x[:, 1:].amax(1), [X], "R")
case("empty", lambda x: x[:, 2:2], [X], "refuse: empty")

# point reads
case("first_token", lambda x: x[:, 0], [X], "P")
case("last_token", lambda x: x[:, -1], [X], "P")
case("token_of_a_window", lambda x: x[:, 1:][:, 0], [X], "P")
case("feature", lambda x: x[..., 0], [X], "S1")
case("batch_row", lambda x: x[0], [X], "S0")
case("first_token_product", lambda x: x * x[:, :1], [X], "S1")
case("pooled", lambda x, w: torch.tanh(F.linear(x[:, 0], w)), [X, floats(3, 4)], "R")
case("boolean_point", lambda x: (x > 0)[:, 0], [X], "refuse: boolean")

# joins, pieces and repeats
case("split", lambda x: x.split(2, dim=-1), [X], "S1")
case("chunk", lambda x: x.chunk(2, dim=0), [X], "S1")
case("chunk_sequence", lambda x: x.chunk(2, dim=1)[0], [X], "refuse: pieces")
case("unbind", lambda x: x.unbind(0), [X], "S0")
case("cat_features", lambda x, y: torch.cat([x, y * 2], -1), [X, WHOLE], "S1")
case("cat_batch", lambda x, y: torch.cat([x, y], 0), [X, X], "S1")
case("cat_empty_cache", lambda x: torch.cat([x.new_empty(0), x], 1), [X], "S1")
case("cat_sequences", lambda x, y: torch.cat([x, y], 1) * 2, [X, X], "F1")
case("cat_sequence_with_whole", lambda x, y: torch.cat([x, y], 1), [X, floats(2, 3, 4)], "refuse: joined")
case("rotate_half", lambda x: torch.cat([-x[..., 2:], x[..., :2]], -1), [X], "S1")
case("stack_last", lambda x, y: torch.stack([x, y], -1), [X, WHOLE], "S1")
case("stack_first", lambda x, y: torch.stack([x, y], 0), [X, X], "S2")
case("pad_features", lambda x: F.pad(x, (1, 2)), [X], "S1")
case("pad_sequence", lambda x: F.pad(x, (0, 0, 1, 0)), [X], "refuse: padded")
case("roll_features", lambda x: x.roll(1, -1) + x.flip(-1), [X], "S1")
case("roll_sequence", lambda x: x.roll(1, 1), [X], "refuse: rolled")
case("roll_flat", lambda x: x.roll(1), [X], "refuse: rolled")
case("repeat", lambda x: x.repeat(1, 1, 2), [X], "S1")
case("repeat_new_dimension", lambda x: x.repeat(3, 1, 1, 1), [X], "S2")
case("repeat_batch", lambda x: x.repeat(2, 1, 1), [X], "S1")
case("repeat_sequence", lambda x: x.repeat(1, 2, 1) * 2, [X], "F1")
case("repeat_interleave_heads", lambda x: x.repeat_interleave(2, dim=2), [X], "S1")
case("repeat_interleave_sequence", lambda x: x.repeat_interleave(2, dim=1) * 2, [X], "F1")
case("repeat_interleave_flat", lambda x: x.repeat_interleave(2), [X], "refuse: flattened")

# contractions
WEIGHT = floats(3, 4)
case("linear", lambda x, w, b: F.linear(x, w, b), [X, WEIGHT, floats(3)], "S1")
case("linear_over_tokens", lambda x, w: F.linear(x.transpose(1, 2), w), [X, floats(3, "S")], "refuse: contracts")
case("matmul_weight", lambda x, w: x @ w, [X, floats(4, 3)], "S1")
case("matmul_whole_rows", lambda w, x: w @ x, [floats(3, 4), floats(2, 4, "S", at=2)], "S2")
case("matmul_vector", lambda x, w: x @ w, [X, floats(4)], "S1")
case("vector_matmul", lambda w, x: w @ x, [floats(4), floats(4, "S", at=1)], "S0")
case("matmul_batch", lambda x, y: x @ y, [SEQUENCE_FIRST, floats("S", 4, 3, at=0)], "S0")
case("matmul_batch_whole", lambda x, y: x @ y, [SEQUENCE_FIRST, floats("S", 4, 3)], "S0")
case("matmul_batch_shared", lambda x, y: x @ y, [floats("S", 2, 2, 4, at=0), floats(2, 4, 3)], "S0")
case("gram", lambda x: x.transpose(1, 2) @ x, [X], "P")
case("gram_window", lambda x: x[:, 1:].transpose(1, 2) @ x[:, :-1], [X], "P")
case("gram_same_window", lambda x: x[:, 1:].transpose(1, 2) @ x[:, 1:], [X], "P")
case("pool_by_matmul", lambda w, x: w @ x, [floats(2, 3, "S", at=2), X], "P")
case("pool_by_whole", lambda w, x: w @ x, [floats(3, "S"), X], "P")
case("pool_by_whole_window", lambda w, x: w[:, 1:] @ x[:, :-1], [floats(3, "S"), X], "P")
case("pooled_over_whole", lambda x, w: x.transpose(1, 2) @ w, [X, floats("S", 3)], "P")
case("bmm", lambda x, y: torch.bmm(x, y), [X, floats(2, 4, 3)], "S1")
case("mm_flat", lambda x, w: torch.mm(x.reshape(-1, 4), w).view(2, -1, 3), [X, floats(4, 3)], "S1")
case("addmm", lambda b, x, w: torch.addmm(b, x.reshape(-1, 4), w).view(2, -1, 3), [floats(3), X, floats(4, 3)], "S1")
case("addmm_gram", lambda b, x: torch.addmm(b, x.t(), x), [floats(4, 4), floats("S", 4, at=0)], "refuse: bias")
case("baddbmm", lambda b, x, w: torch.baddbmm(b, x, w), [floats(2, "S", 3, at=1), X, floats(2, 4, 3)], "S1")
case("einsum", lambda x, w: torch.einsum("bsd,hde->bhse", x, w), [X, floats(2, 4, 3)], "S2")
case("scores", lambda q, k: q @ k.transpose(-1, -2), [HEADS, HEADS], "S1")
case("scores_two_heads", lambda q, k: q @ k.transpose(-1, -2), [floats(2, 2, "S", 3, at=2)] * 2, "S1|S2")
case("scores_no_heads", lambda q, k: q @ k.transpose(-1, -2), [floats(1, "S", 4, at=1)] * 2, "S1")
case(
    "written_out",
    lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2), -1) @ v,
    [HEADS, HEADS, HEADS],
    "S1",
)
case("written_out_back_home", lambda q, k, v, r: (torch.softmax(q @ k.mT, -1) @ v) + r, [HEADS] * 4, "S1")

# reductions
case("sum_features", lambda x: x.sum(-1), [X], "S1")
case("sum_batch", lambda x: x.sum(0), [X], "S0")
case("sum_sequence", lambda x: x.sum(1), [X], "P")
case("sum_keepdim", lambda x: x / (1 + x.pow(2).sum(1, keepdim=True)), [X], "S1")
case("sum_all", lambda x: x.sum(), [X], "P")
case("sum_without_a_rule", lambda x, w: torch.dot(w, x.sum((0, 1))), [X, floats(4)], "R")
case("sum_of_integers", lambda x: x.sum(), [IDS], "P")
case("sum_of_booleans", lambda x: (x > 2).sum(1), [IDS], "P")
case("mean_sequence", lambda x: x.mean(1), [X], "P")
case("mean_all", lambda x: x.mean(), [X], "P")
case("mean_flattened", lambda x: x.reshape(-1, 4).mean(0), [X], "P")
case("mean_product", lambda x: (x.mean(1) * x.pow(2).mean(1)).sum(), [X], "R")
case("partial_sum_of_partials", lambda x: x.sum(1) + x.mean(1), [X], "R")
case("amax_sequence", lambda x: x.amax(1), [X], "R")
case("amin_all", lambda x: x.amin(), [X], "R")
case("max_all", lambda x: x.max(), [X], "R")
case("max_of_integers", lambda x: x.max() - x.min(), [IDS], "R")
case("any", lambda m: m.any(1), [bools(2, "S", at=1)], "R")
case("all", lambda m: m.all(), [bools(2, "S", at=1)], "R")
case("any_features", lambda m: m.any(-1), [bools(2, "S", 4, at=1)], "S1")
case("softmax", lambda x: x.softmax(-1) + x.log_softmax(-1), [X], "S1")
case("softmax_sequence", lambda x: x.softmax(1), [X], "refuse: mixes")
case("cumsum", lambda x: x.cumsum(-1), [X], "S1")
case("cumsum_sequence", lambda x: x.cumsum(1), [X], "refuse: mixes")
case("cumsum_whole", lambda x, y: x.cumsum(1) + y, [WHOLE, X], "S1")
case("sort", lambda x: x.sort(-1), [X], "S1")
case("topk", lambda x: x.topk(2, -1), [X], "S1")
case("argmax", lambda x: x.argmax(-1), [X], "S1")
case("argmax_sequence", lambda x: x.argmax(1), [X], "refuse: mixes")
case("max_features", lambda x: x.max(-1), [X], "S1")
case("variance", lambda x: x.var(-1) + x.std(-1, correction=0), [X], "S1")
case("variance_all", lambda x: x.var(), [X], "refuse: mixes")
case("logsumexp", lambda x: x.logsumexp(-1), [X], "S1")
case("norm", lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True) + x.norm(dim=-1, keepdim=True), [X], "S1")
case("layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), [X, floats(4), floats(4)], "S1")
case("rms_norm", lambda x, w: F.rms_norm(x, (4,), w, 1e-6), [X, floats(4)], "S1")
case("layer_norm_over_tokens", lambda x: F.layer_norm(x, x.shape[1:]), [X], "refuse: mixes")
case("tril_other", lambda x: x.tril(), [SEQUENCE_FIRST], "S0")
case("tril", lambda x: x.tril(), [X], "refuse: mixes")
case("one_hot", lambda x: F.one_hot(x, 5), [IDS], "S1")
case("prod", lambda x: x.prod(-1), [X], "S1")
case("glu", lambda x: F.glu(x, -1), [X], "S1")

# lookups
case("embedding", lambda w, i: F.embedding(i, w), [floats(5, 4), IDS], "S1")
case("embedding_from_whole_ids", lambda w, i: F.embedding(i, w), [floats(5, 4), ints(5, 2, "S", home=1)], "S1")
case("gather_features", lambda x, i: x.gather(-1, i.unsqueeze(-1)), [X, ints(4, 2, "S", at=1)], "S1")
case("gather_whole_index", lambda x, i: x.gather(-1, i), [X, ints(4, 2, "S", 2)], "S1")
case("gather_sequence", lambda x, i: x.gather(1, i), [X, ints(4, 2, 3, 4)], "refuse: by position")
case("index_select_features", lambda x: x.index_select(2, torch.tensor([3, 0])), [X], "S1")
case("index_select_sequence", lambda x: x.index_select(1, torch.tensor([3, 0, 0])), [X], "P")
case("index_select_table", lambda w, i: w.index_select(0, i), [floats(5, 4), ints(5, "S", at=0)], "S0")
case("index_tokens", lambda x: x[torch.arange(2), torch.tensor([3, -1])], [X], "P")
case("index_tokens_list", lambda x: x[:, torch.tensor([0, 3, -1])], [X], "P")
case("index_tokens_of_window", lambda x: x[:, 1:][:, torch.tensor([0, -1])], [X], "P")
case("index_batch", lambda x: x[torch.tensor([1, 0, 1])], [X], "S1")
case("index_features", lambda x: x[..., torch.tensor([1, 0])], [X], "S1")
case("index_table", lambda w, i: w[i], [floats(5, 4), IDS], "S1")
case("index_table_second", lambda w, i: w[:, i], [floats(3, 5), IDS], "S2")
case("index_flattened", lambda x: x.reshape(-1, 4)[torch.tensor([0, 3])], [X], "refuse: flattened")
case("index_by_tokens", lambda x, i: x[torch.arange(2)[:, None], i], [X, IDS], "refuse: sharded index")
case("scatter_features", lambda x, i: x.scatter(-1, i.unsqueeze(-1), 5.0), [X, ints(4, 2, "S", at=1)], "S1")
case("scatter_source", lambda x, i, s: x.scatter(-1, i, s), [X, ints(4, 2, "S", 1, at=1), floats(2, "S", 1)], "S1")
case(
    "scatter_sequence", lambda x, i, s: x.scatter(1, i, s), [X, ints(4, 2, 3, 4), floats(2, 3, 4)], "refuse: scattered"
)
case(
    "scatter_add_counts",
    lambda z, i, s: z.scatter_add(0, i, s),
    [floats(5), ints(5, "S", at=0), floats("S", at=0)],
    "R",
)
case("histogram", lambda x: x.to(torch.float64).histc(5, 0, 4), [IDS], "P")
case("index_put", lambda x, v: x.index_put((torch.tensor([0]),), v), [X, floats(1, "S", 4)], "refuse: written")

# dropout that drops nothing, and all
case("dropout_eval", lambda x: F.dropout(x, 0.5, training=False), [X], "S1")
case("dropout_all", lambda x: F.dropout(x, 1.0, training=True), [X], "S1")
case("rand_like", lambda x: x + torch.rand_like(x), [X], "refuse: random")

# attention
ATTENTION = [HEADS, HEADS, HEADS]
KV_HEADS = floats(2, 2, "S", 3, at=2)
sdpa = F.scaled_dot_product_attention
case("attention", lambda q, k, v: sdpa(q, k, v), ATTENTION, "S2")
case("causal", lambda q, k, v: sdpa(q, k, v, is_causal=True), ATTENTION, "S2")
case("scaled", lambda q, k, v: sdpa(q, k, v, is_causal=True, scale=0.3), ATTENTION, "S2")
case("grouped", lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True), [HEADS, KV_HEADS, KV_HEADS], "S2")
case("one_head", lambda q, k, v: sdpa(q, k, v, is_causal=True), [floats(2, 1, "S", 3, at=2)] * 3, "S2")
case("five_heads", lambda q, k, v: sdpa(q, k, v, is_causal=True), [floats(2, 5, "S", 3, at=2)] * 3, "S2")
case("value_size", lambda q, k, v: sdpa(q, k, v), [HEADS, HEADS, floats(2, 4, "S", 5, at=2)], "S2")
case("key_is_value", lambda q, k: sdpa(q, k, k) + q, [HEADS, HEADS], "S2")
case("bias_shared", lambda q, k, v, m: sdpa(q, k, v, m), [*ATTENTION, floats("S", "S")], "S2")
case("bias_per_head", lambda q, k, v, m: sdpa(q, k, v, m), [*ATTENTION, floats(1, 4, "S", "S")], "S2")
case("bias_per_row_and_head", lambda q, k, v, m: sdpa(q, k, v, m), [*ATTENTION, floats(2, 4, "S", "S")], "S2")
case("bias_3d", lambda q, k, v, m: sdpa(q, k, v, m), [*ATTENTION, floats(4, "S", "S")], "S2")
case("bias_keys", lambda q, k, v, m: sdpa(q, k, v, m), [*ATTENTION, floats(2, 1, 1, "S")], "S2")
case("bias_cut_over_queries", lambda q, k, v, m: sdpa(q, k, v, m), [*ATTENTION, floats(2, 4, "S", "S", at=2)], "S2")
case("bias_cut_over_keys", lambda q, k, v, m: sdpa(q, k, v, m), [*ATTENTION, floats(2, 1, 1, "S", at=3)], "S2")
case(
    "mask_from_tokens",
    lambda q, k, v, m: sdpa(q, k, v, m[:, None, None, :] | torch.eye(m.shape[1], dtype=torch.bool)),
    [*ATTENTION, bools(2, "S", at=1)],
    "S2",
)
case("window_of_queries", lambda q, k, v: sdpa(q[:, :, 1:], k, v), ATTENTION, "W2")
case(
    "windows",
    lambda q, k, v: sdpa(q[:, :, :-1], k[:, :, :-1], v[:, :, :-1], is_causal=True),
    ATTENTION,
    "W2",
)
case("cross", lambda q, k, v: sdpa(q, k, v), [HEADS, floats(2, 4, 5, 3), floats(2, 4, 5, 3)], "S2")
case("cross_bias", lambda q, k, v, m: sdpa(q, k, v, m), [HEADS, *[floats(2, 4, 5, 3)] * 2, floats("S", 5)], "S2")
case("cross_bias_keys", lambda q, k, v, m: sdpa(q, k, v, m), [HEADS, *[floats(2, 4, 5, 3)] * 2, floats(1, 5)], "S2")
case("cross_causal", lambda q, k, v: sdpa(q, k, v, is_causal=True), [HEADS, *[floats(2, 4, 5, 3)] * 2], "S2")
case("whole_queries", lambda q, k, v: sdpa(q, k, v), [floats(2, 4, 5, 3), HEADS, HEADS], "refuse: queries are whole")
case("cut_over_batch", lambda q, k, v: sdpa(q, k, v, is_causal=True), [floats("S", 2, 5, 3, at=0)] * 3, "S0")
case("cut_over_heads", lambda q, k, v: sdpa(q, k, v), [floats(2, "S", 5, 3, at=1)] * 3, "S1")
case(
    "cut_over_batch_bias",
    lambda q, k, v, m: sdpa(q, k, v, m),
    [*[floats("S", 2, 5, 3, at=0)] * 3, floats("S", 1, 5, 5)],
    "S0",
)
case("three_dimensions", lambda q, k, v: sdpa(q, k, v), [floats(4, "S", 3, at=1)] * 3, "refuse: 3 dimensions")
case("attention_over_features", lambda q, k, v: sdpa(q, k, v), [floats(2, 4, 5, "S", at=3)] * 3, "refuse: ")

# losses
LOGITS = floats(2, "S", 5, at=1)
TARGET = ints(5, 2, "S")
SOFT = Input("probability", (2, "S", 5))


def flat_loss(**settings: Any) -> Any:
    def loss(logits: torch.Tensor, target: torch.Tensor, *weight: torch.Tensor) -> torch.Tensor:
        flat = target.reshape(-1) if target.dtype == torch.int64 else target.reshape(-1, 5)
        more = {"weight": weight[0].abs()} if weight else {}
        return F.cross_entropy(logits.reshape(-1, 5), flat, **settings, **more)

    return loss


def channels_second(reduction: str) -> Any:
    return lambda x, t: F.cross_entropy(x.transpose(1, 2), t, reduction=reduction)


def shifted_loss(reduction: str) -> Any:
    return lambda x, t: F.cross_entropy(x[:, :-1].reshape(-1, 5), t[:, 1:].reshape(-1), reduction=reduction)


CLASSES = floats(5, grad=False)
for reduction, layout in (("mean", "R"), ("sum", "R"), ("none", "F0")):
    case(f"ce_{reduction}", flat_loss(reduction=reduction), [LOGITS, TARGET], layout)
    case(f"ce_{reduction}_ignore", flat_loss(reduction=reduction, ignore_index=2), [LOGITS, TARGET], layout)
    case(f"ce_{reduction}_cut_target", flat_loss(reduction=reduction), [LOGITS, IDS], layout)
    case(f"ce_{reduction}_weight", flat_loss(reduction=reduction, ignore_index=1), [LOGITS, TARGET, CLASSES], layout)
    case(f"ce_{reduction}_smooth", flat_loss(reduction=reduction, label_smoothing=0.1), [LOGITS, TARGET], layout)
    case(
        f"ce_{reduction}_smooth_weight",
        flat_loss(reduction=reduction, label_smoothing=0.1, ignore_index=1),
        [LOGITS, TARGET, CLASSES],
        layout,
    )
    case(f"ce_{reduction}_soft", flat_loss(reduction=reduction), [LOGITS, SOFT], layout)
    case(f"ce_{reduction}_soft_weight", flat_loss(reduction=reduction), [LOGITS, SOFT, CLASSES], layout)
    case(
        f"ce_{reduction}_channels_second",
        channels_second(reduction),
        [LOGITS, TARGET],
        "S1" if reduction == "none" else "R",
    )
    case(f"ce_{reduction}_window", shifted_loss(reduction), [LOGITS, TARGET], layout)
case(
    "ce_soft_channels_second",
    lambda x, t: F.cross_entropy(x.transpose(1, 2), t.transpose(1, 2)),
    [LOGITS, SOFT],
    "R",
)
case("ce_over_classes", lambda x, t: F.cross_entropy(x, t), [floats(2, "S", at=1), ints(4, 2)], "refuse: classes")
case("ce_all_ignored", lambda x, t: F.cross_entropy(x.reshape(-1, 5), t.reshape(-1) * 0 - 100), [LOGITS, TARGET], "R")
case("nll", lambda x, t: F.nll_loss(x.log_softmax(-1).reshape(-1, 5), t.reshape(-1)), [LOGITS, TARGET], "R")
case("mse", lambda x, y: F.mse_loss(x, y), [X, WHOLE], "P")
case("mse_sum", lambda x, y: F.mse_loss(x, y, reduction="sum"), [X, X], "P")
case("mse_none", lambda x, y: F.mse_loss(x, y, reduction="none"), [X, X], "S1")
case("l1_window", lambda x, y: F.l1_loss(x[:, 1:], y[:, :-1]), [X, WHOLE], "P")
case("kl_div", lambda x, y: F.kl_div(x.log_softmax(-1), y, reduction="sum"), [LOGITS, SOFT], "P")
case("kl_div_batchmean", lambda x, y: F.kl_div(x.log_softmax(-1), y, reduction="batchmean"), [LOGITS, SOFT], "R")
case(
    "bce_logits",
    lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, pos_weight=w.abs()),
    [LOGITS, SOFT, floats(5, grad=False)],
    "P",
)
case("bce", lambda x, y: F.binary_cross_entropy(x.sigmoid(), y), [LOGITS, SOFT], "P")
case("huber", lambda x, y: F.huber_loss(x, y) + F.smooth_l1_loss(x, y), [X, WHOLE], "R")


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3], ids=["sp2", "sp3"])
def found(ranks: RankPool, request: pytest.FixtureRequest) -> list[dict[tuple[str, int], Found | str]]:
    return ranks.run(run_cases, __name__, list(CASES), LENGTHS, world_size=request.param, timeout=300)


@pytest.mark.parametrize("name", list(CASES))
def test_rule(found: list[dict[tuple[str, int], Found | str]], name: str):
    check(CASES[name], name, found, LENGTHS)
