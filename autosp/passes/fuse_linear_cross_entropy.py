"""An LM head followed by cross entropy becomes one operator that never holds the whole logits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..layout.nodes import FUSION, argument, is_barred, keeps_last_dim
from ..location import kept_meta, user_location

aten = torch.ops.aten
log = logging.getLogger("autosp")

_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_CASTS = (
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten._to_copy.default,
    aten.contiguous.default,
    aten.clone.default,
)


@dataclass
class _Match:
    """A cross entropy, the linear that makes its logits, and what lies between them, from the logits on."""

    loss: fx.Node
    linear: fx.Node
    rows: list[fx.Node]
    softcap: float
    returned: bool


class _Unfit(Exception):
    """The loss is of another form; the message says why, for the compile report."""


def fuse_linear_cross_entropy_pass(
    gm: fx.GraphModule, *, mode: str, fake_mode: Any, memory: str = "auto", vocabulary_mode: str | None = None
) -> fx.GraphModule:
    """Rewrites: ``cross_entropy(view(float(slice(linear(h, W)))), t)`` -> ``linear_cross_entropy_loss(view(slice(h)),
    W, t)``.

    What lies between the two may cast, drop or merge rows and cap the logits softly; it moves to the hidden states.

    ``memory`` is what the fused operator may hold: "fast", "lean" or "auto". What became of each cross entropy, and why
    one stayed, is logged (level INFO) and kept in ``node.meta["autosp_fusion"]``. ``vocabulary_mode`` is the mode of
    heads that are sharded over the vocabulary; ``mode`` where it is None.

    Requires: a captured graph, the fused operator registered.
    Ensures: the logits of a fused loss are not made. With ``mode="always"`` logits that the model only returns are
    None in its output; with ``"auto"`` logits that are returned keep the loss unfused; ``"never"`` changes nothing.
    Refuses: nothing; a loss of another form (class weights, soft targets, per-token losses) stays as it is, with a
    warning beside a sharded head whose logits are not to exist (``vocabulary_mode="always"``).
    """
    modes = {aten.linear.default: mode, _vocab_linear(): vocabulary_mode or mode}
    if set(modes.values()) == {"never"}:
        return gm
    losses = [node for node in gm.graph.nodes if node.target is aten.cross_entropy_loss.default]
    matches = [match for loss in losses if (match := _fitting(loss, modes)) is not None]
    if vocabulary_mode == "always":
        _tell_of_logits(gm, losses)
    for match in matches:
        _fuse(gm, match, fake_mode, memory)
    if matches:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return gm


def _vocab_linear() -> Any:
    return torch.ops.autosp.vocab_linear.default


def _fitting(loss: fx.Node, modes: dict[Any, str]) -> _Match | None:
    """The match of a loss that is to be fused; what becomes of it goes to its ``meta`` and to the log."""
    try:
        match: _Match | None = _match(loss)
        mode = "never" if match is None else modes[match.linear.target]
        if mode == "never":
            return None
        if match is not None and match.returned and mode != "always":
            raise _Unfit(f'the model returns its logits ("{mode}" leaves them; "always" gives None for them)')
        said = "fused with its LM head; " + (
            "the returned logits are None" if match is not None and match.returned else "the logits are not made"
        )
    except _Unfit as reason:
        match, said = None, f"not fused with its LM head: {reason}"
    loss.meta[FUSION] = said
    log.info("cross entropy %s: %s", user_location(loss) or loss.name, said)
    return match


def _tell_of_logits(gm: fx.GraphModule, losses: Sequence[fx.Node]) -> None:
    """Warn of losses that stay apart from a sharded head although its logits are not to exist."""
    apart = [loss for loss in losses if "not fused" in loss.meta.get(FUSION, "")]
    if apart and any(node.target is _vocab_linear() for node in gm.graph.nodes):
        log.warning(
            "vocab_parallel_ce_backend is 'fused_linear', but this rank's part of the logits exists: %s",
            "; ".join(f"the loss at {user_location(loss) or loss.name} is {loss.meta[FUSION]}" for loss in apart),
        )


def _match(loss: fx.Node) -> _Match:
    logits, target = loss.args[0], loss.args[1]
    if argument(loss, 2, "weight", None) is not None:
        raise _Unfit("it has class weights")
    if argument(loss, 3, "reduction", 1) not in (1, 2):
        raise _Unfit("it gives a loss a token")
    if target.meta["val"].dtype.is_floating_point:
        raise _Unfit("its targets are probabilities")
    if logits.meta["val"].dim() != 2:
        raise _Unfit("its logits are not [tokens, classes]")
    rows: list[fx.Node] = []
    softcap, node, user = 0.0, logits, loss
    returned = False
    while node.target not in (aten.linear.default, _vocab_linear()):
        returned |= _check_users(node, user)
        cap = _softcap(node)
        if cap is not None:
            if softcap or rows and any(r.target in _VIEWS for r in rows) and node.meta["val"].dim() < 2:
                raise _Unfit("its logits are capped more than once")
            (softcap, node), user = cap, _innermost(node)
            continue
        if node.target in _VIEWS or node.target is aten.slice.Tensor:
            if not keeps_last_dim(node):
                raise _Unfit(f"{node.target} changes the classes")
            if not _cuts_classes(node):
                rows.append(node)
        elif not (node.target in _CASTS and node.meta["val"].dtype.is_floating_point):
            raise _Unfit(f"{node.target} is no linear layer and may not lie between one and the loss")
        elif node.meta["val"].dtype == torch.float64 != node.args[0].meta["val"].dtype:
            raise _Unfit("its logits are cast to float64, and the fused loss of other dtypes is computed in float32")
        node, user = node.args[0], node
        if not isinstance(node, fx.Node) or node.op != "call_function":
            raise _Unfit("its logits are an input of the graph")
    returned |= _check_users(node, user)
    if is_barred(node, loss):
        raise _Unfit("a write, or the border of a no_grad or autocast region, lies between the head and the loss")
    return _Match(loss, node, rows[::-1], softcap, returned)


def _cuts_classes(node: fx.Node) -> bool:
    """Whether a slice is one of the last dimension. One that keeps all of it says nothing of the hidden states."""
    return node.target is aten.slice.Tensor and argument(node, 1, "dim", 0) % node.meta["val"].dim() == (
        node.meta["val"].dim() - 1
    )


def _check_users(node: fx.Node, user: fx.Node) -> bool:
    """Whether the value is returned; nothing else but ``user`` may read it."""
    for other in node.users:
        if other is not user and other.op != "output" and not _is_size(other):
            raise _Unfit(f"{other.target} uses its logits too")
    return any(other.op == "output" for other in node.users)


def _is_size(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name in ("aten::sym_size", "aten::sym_numel")


def _softcap(node: fx.Node) -> tuple[float, fx.Node] | None:
    """``(c, x)`` when ``node`` is ``c * tanh(x / c)``, c > 0, and nobody else sees the steps between."""
    if node.target is not aten.mul.Tensor or not isinstance(node.args[1], (int, float)) or not node.args[1] > 0:
        return None
    tanh = node.args[0]
    if tanh.target is not aten.tanh.default or len(tanh.users) != 1:
        return None
    scaled = tanh.args[0]
    if scaled.target is not aten.div.Tensor or scaled.args[1] != node.args[1] or len(scaled.users) != 1:
        return None
    return float(node.args[1]), scaled.args[0]


def _innermost(node: fx.Node) -> fx.Node:
    return node.args[0].args[0]


def _fuse(gm: fx.GraphModule, match: _Match, fake_mode: Any, memory: str) -> None:
    loss, linear = match.loss, match.linear
    hidden = linear.args[0]
    with gm.graph.inserting_before(loss):
        for row in match.rows:
            hidden = _on_hidden(gm, row, hidden, fake_mode)
        weight, bias = linear.args[1], argument(linear, 2, "bias", None)
        args = (
            hidden,
            weight,
            bias,
            loss.args[1],
            argument(loss, 3, "reduction", 1),
            argument(loss, 4, "ignore_index", -100),
            float(argument(loss, 5, "label_smoothing", 0.0)),
            match.softcap,
            loss.meta["val"].dtype,
        )
        options: dict[str, Any] = {} if memory == "auto" else {"memory": memory}
        if linear.target is _vocab_linear():
            options["size"], options["group"] = linear.args[3:]
        fused = gm.graph.call_function(torch.ops.autosp.linear_cross_entropy_loss.default, args, options)
    fused.meta.update({**kept_meta(loss), **{k: loss.meta[k] for k in ("val", FUSION) if k in loss.meta}})
    loss.replace_all_uses_with(fused)
    if match.returned:
        _return_none(gm, match)
    gm.graph.erase_node(loss)


def _on_hidden(gm: fx.GraphModule, row: fx.Node, hidden: fx.Node, fake_mode: Any) -> fx.Node:
    """The same selection or merging of rows, on the hidden states in place of the logits."""
    width = hidden.meta["val"].shape[-1]
    if row.target is aten.slice.Tensor:
        args: Sequence[Any] = (hidden, *row.args[1:])
    else:
        # The rows are those of the logits; their number is left to torch where the graph names it nowhere else.
        sizes = list(row.args[1])
        args = (hidden, [*sizes[:-1], width])
    node = gm.graph.call_function(row.target if row.target is aten.slice.Tensor else aten.reshape.default, tuple(args))
    shape = [*row.meta["val"].shape[:-1], width]
    with fake_mode:
        node.meta["val"] = hidden.meta["val"].new_empty(shape)
    node.meta.update(kept_meta(row))
    return node


def _return_none(gm: fx.GraphModule, match: _Match) -> None:
    """The logits, which nothing but the loss used, are None among the outputs."""
    chain = {match.linear}
    node = match.loss.args[0]
    while node is not match.linear:
        chain.add(node)
        node = _softcap(node)[1] if _softcap(node) is not None else node.args[0]
    output = gm.graph.output_node()
    output.args = (fx.node.map_aggregate(output.args[0], lambda x: None if x in chain else x),)
