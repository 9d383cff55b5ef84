"""Causal masks are proven by reading the graph; what is not proven keeps its exact mask; repeated heads travel once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from autosp.layout.index_expr import Affine, affine_of, where_of
from autosp.passes.peel_repeat_kv import peel_repeat_kv_pass
from autosp.passes.simplify_masks import simplify_masks_pass

SDPA = torch.ops.aten.scaled_dot_product_attention.default
Mask = Callable[[int], torch.Tensor]


def arange_le(s: int) -> torch.Tensor:
    return torch.arange(s)[None, :] <= torch.arange(s)[:, None]


def arange_ge_shifted(s: int) -> torch.Tensor:
    q, k = torch.arange(s) + 5, torch.arange(5, s + 5)
    return (q[:, None] >= k[None, :])[None, None].expand(2, 1, s, s)


def strictly_less_than_next(s: int) -> torch.Tensor:
    return torch.arange(s)[None, :] < (torch.arange(s) + 1)[:, None]


def tril(s: int) -> torch.Tensor:
    return torch.tril(torch.ones(s, s, dtype=torch.bool))


def causal_and_true(s: int) -> torch.Tensor:
    return torch.ones(s, s, dtype=torch.bool) & arange_le(s)


def one_document(s: int) -> torch.Tensor:
    """Packed-sequence detection on positions that the model counts itself: there is one document."""
    positions = torch.arange(s)[None]
    before = torch.cat([positions[:, :1] - 1, positions], dim=-1)
    document = (before[:, 1:] - before[:, :-1] != 1).cumsum(-1)
    rows, q, k = torch.arange(1)[:, None, None], torch.arange(s)[None, :, None], torch.arange(s)[None, None, :]
    return (k <= q) & (document[rows, q] == document[rows, k])


def looked_up(s: int) -> torch.Tensor:
    """Positions that the model counts itself, read at the indices of queries and keys."""
    positions = (torch.arange(s) + 3)[None].expand(2, s)
    rows, q, k = torch.arange(2)[:, None, None], torch.arange(s)[None, :, None], torch.arange(s)[None, None, :]
    return (positions[rows, k] <= positions[rows, q])[:, None]


def looked_up_from_the_end(s: int) -> torch.Tensor:
    """An index below zero counts from the end: the first query has the last position."""
    positions, at = torch.arange(s), torch.arange(s) - 1
    return positions[None, :] <= (positions[at] + 1)[:, None]


def looked_up_backwards(s: int) -> torch.Tensor:
    return torch.arange(s)[torch.arange(s - 1, -1, -1)][None, :] <= torch.arange(s)[:, None]


def two_documents(s: int) -> torch.Tensor:
    positions = torch.cat([torch.arange(5), torch.arange(s - 5)])[None]
    before = torch.cat([positions[:, :1] - 1, positions], dim=-1)
    document = (before[:, 1:] - before[:, :-1] != 1).cumsum(-1)
    rows, q, k = torch.arange(1)[:, None, None], torch.arange(s)[None, :, None], torch.arange(s)[None, None, :]
    return (k <= q) & (document[rows, q] == document[rows, k])


def every_second(s: int) -> torch.Tensor:
    positions = torch.arange(0, 2 * s, 2)[None]
    before = torch.cat([positions[:, :1] - 1, positions], dim=-1)
    document = (before[:, 1:] - before[:, :-1] != 1).cumsum(-1)
    q, k = torch.arange(s)[:, None], torch.arange(s)[None, :]
    return (k <= q) & (document[0][:, None] == document[0][None, :])


def window(s: int) -> torch.Tensor:
    q, k = torch.arange(s)[:, None], torch.arange(s)[None, :]
    return (k <= q) & (k > q - 4)


def narrow_integers(s: int) -> torch.Tensor:
    """Differences below zero are large numbers of this dtype: nothing is hidden."""
    places = torch.arange(s).to(torch.uint8)
    return (places[:, None] - places[None, :]) >= 0


def anti_causal(s: int) -> torch.Tensor:
    return torch.arange(s)[None, :] >= torch.arange(s)[:, None]


def strict(s: int) -> torch.Tensor:
    return (torch.arange(s)[None, :] < torch.arange(s)[:, None]) | torch.eye(s, dtype=torch.bool)


def off_by_one(s: int) -> torch.Tensor:
    return torch.arange(s)[None, :] <= (torch.arange(s) + 1)[:, None]


def tril_shifted(s: int) -> torch.Tensor:
    return torch.tril(torch.ones(s, s, dtype=torch.bool), diagonal=1)


def doubled(s: int) -> torch.Tensor:
    return torch.arange(s)[None, :] <= torch.arange(0, 2 * s, 2)[:, None]


def dynamic_slice(s: int) -> torch.Tensor:
    return arange_le(2 * s)[s:, s:]


def wrong_corner(s: int) -> torch.Tensor:
    return arange_le(2 * s)[s:, :s]


def attend(mask: Mask) -> fx.GraphModule:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask(q.shape[2]))

    x = torch.randn(2, 4, 12, 8)
    return make_fx(function, pre_dispatch=True, tracing_mode="symbolic")(x, x.clone(), x.clone())


def is_causal(gm: fx.GraphModule) -> bool:
    (node,) = gm.graph.find_nodes(op="call_function", target=SDPA)
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    causal = node.args[5] if len(node.args) > 5 else node.kwargs.get("is_causal", False)
    assert mask is None or not causal
    return bool(causal)


@pytest.mark.parametrize(
    "mask", [arange_le, arange_ge_shifted, strictly_less_than_next, tril, causal_and_true, one_document, looked_up]
)
def test_causal_masks_are_proven(mask: Mask) -> None:
    gm = simplify_masks_pass(attend(mask))
    assert is_causal(gm)
    assert not [n for n in gm.graph.nodes if "arange" in str(n.target)], "the mask is still made"
    x = torch.randn(2, 4, 12, 8)
    torch.testing.assert_close(
        gm(x, x, x), F.scaled_dot_product_attention(x, x, x, is_causal=True), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    "mask",
    [
        looked_up_from_the_end,
        looked_up_backwards,
        two_documents,
        every_second,
        window,
        narrow_integers,
        anti_causal,
        strict,
        off_by_one,
        tril_shifted,
        doubled,
        dynamic_slice,
        wrong_corner,
    ],
)
def test_other_masks_stay(mask: Mask) -> None:
    gm = attend(mask)
    before = str(gm.graph)
    gm = simplify_masks_pass(gm)
    assert not is_causal(gm)
    assert str(gm.graph) == before


def test_a_second_run_changes_nothing() -> None:
    gm = simplify_masks_pass(attend(arange_le))
    before = str(gm.graph)
    assert str(simplify_masks_pass(gm).graph) == before


def test_a_mask_that_is_an_input_stays() -> None:
    def function(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    gm = make_fx(function, pre_dispatch=True)(torch.randn(1, 2, 6, 4), torch.ones(6, 6, dtype=torch.bool).tril())
    assert not is_causal(simplify_masks_pass(gm))


def test_fewer_queries_than_keys_are_not_causal_at_the_top_left() -> None:
    def function(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(k.shape[2])
        return F.scaled_dot_product_attention(
            q, k, k, attn_mask=positions[None, :] <= torch.arange(q.shape[2])[:, None]
        )

    gm = make_fx(function, pre_dispatch=True)(torch.randn(1, 2, 6, 4), torch.randn(1, 2, 9, 4))
    assert not is_causal(simplify_masks_pass(gm))


def test_forms_of_positions() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = torch.arange(3, x.shape[0] + 3)[:, None] - 1
        k = torch.arange(x.shape[0])[None, :]
        return q - k, q - k > 2

    gm = make_fx(function)(torch.ones(7))
    difference, compared = gm.graph.output_node().args[0]
    assert affine_of(difference) == Affine.of({-2: 1, -1: -1}, 2)
    assert where_of(compared).conditions == (Affine.of({-2: 1, -1: -1}, -1),)


class Repeated(nn.Module):
    def __init__(self, repeat: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self.repeat = repeat

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        n = q.shape[1] // k.shape[1]
        return F.scaled_dot_product_attention(q, self.repeat(k, n), self.repeat(v, n), is_causal=True)


def in_place(x: torch.Tensor, n: int) -> torch.Tensor:
    b, h, s, d = x.shape
    return x[:, :, None, :, :].expand(b, h, n, s, d).reshape(b, h * n, s, d)


def tiled(x: torch.Tensor, n: int) -> torch.Tensor:
    b, h, s, d = x.shape
    return x[:, None].expand(b, n, h, s, d).reshape(b, n * h, s, d)


def over_tokens(x: torch.Tensor, n: int) -> torch.Tensor:
    return torch.cat([x] * n, dim=1)


def interleaved(x: torch.Tensor, n: int) -> torch.Tensor:
    return x.repeat_interleave(n, dim=-3)


def interleaved_over_tokens(x: torch.Tensor, n: int) -> torch.Tensor:
    b, h, s, d = x.shape
    return x.repeat_interleave(n, dim=2).reshape(b, h * n, s, d)


def flattened(x: torch.Tensor, n: int) -> torch.Tensor:
    return torch.ops.aten.flatten.using_ints(x.unsqueeze(2).expand(-1, -1, n, -1, -1).clone(), 1, 2)


def before_transposing(x: torch.Tensor, n: int) -> torch.Tensor:
    """As the reference code of Llama repeats them."""
    b, h, s, d = x.shape
    x = x.transpose(1, 2).contiguous()
    return x[:, :, :, None, :].expand(b, s, h, n, d).reshape(b, s, h * n, d).transpose(1, 2)


def tiled_before_transposing(x: torch.Tensor, n: int) -> torch.Tensor:
    b, h, s, d = x.shape
    return x.transpose(1, 2)[:, :, None].expand(b, s, n, h, d).reshape(b, s, h * n, d).transpose(1, 2)


@pytest.mark.parametrize(
    ("repeat", "peeled"),
    [
        (in_place, True),
        (interleaved, True),
        (interleaved_over_tokens, False),
        (flattened, True),
        (before_transposing, True),
        (tiled, False),
        (tiled_before_transposing, False),
        (over_tokens, False),
    ],
)
def test_repeated_heads(repeat: Callable[[torch.Tensor, int], torch.Tensor], peeled: bool) -> None:
    q, k, v = torch.randn(2, 8, 6, 4), torch.randn(2, 2, 6, 4), torch.randn(2, 2, 6, 4)
    model = Repeated(repeat)
    gm = peel_repeat_kv_pass(make_fx(model, pre_dispatch=True)(q, k, v))
    (node,) = gm.graph.find_nodes(op="call_function", target=SDPA)
    assert all(x.meta["val"].shape[1] == (2 if peeled else 8) for x in node.args[1:3])
    assert bool(node.kwargs.get("enable_gqa", False)) == peeled
    torch.testing.assert_close(gm(q, k, v), model(q, k, v), rtol=1e-6, atol=1e-6)
    before = str(gm.graph)
    assert str(peel_repeat_kv_pass(gm).graph) == before
