"""Two operators of one's own join autosp: docs/add_an_operator_rule.md explains this file line by line.

    torchrun --nproc-per-node 2 examples/add_operator_rule.py

trains one step of a small model that uses them, over the ranks and in one process, and prints both losses and the
largest difference between their gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autosp
from autosp.layout.placement import PARTIAL, REPLICATE

VOCAB, HIDDEN, HEADS = 64, 32, 4


def turn(x: Tensor, positions: Tensor, base: float, direction: int) -> Tensor:
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angles = direction * positions[:, :, None, None].to(x.dtype) * frequencies
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)


# Stands for a kernel: torch sees one operator and nothing of what is inside.
@torch.library.custom_op("demo::rotate", mutates_args=())
def rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotary embedding of ``x`` [batch, tokens, heads, size] at ``positions`` [batch, tokens]."""
    return turn(x, positions, base, 1)


@rotate.register_fake
def _(x: Tensor, positions: Tensor, base: float) -> Tensor:
    return x.new_empty(x.shape)


def _save_positions(ctx, inputs, output) -> None:
    ctx.positions, ctx.base = inputs[1], inputs[2]


rotate.register_autograd(
    lambda ctx, grad: (turn(grad, ctx.positions, ctx.base, -1), None, None), setup_context=_save_positions
)


@torch.library.custom_op("demo::energy", mutates_args=())
def energy(x: Tensor) -> Tensor:
    """Sum of the squares of ``x`` [batch, tokens, size] over its tokens: [batch, size]."""
    return x.square().sum(dim=1)


@energy.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[2])


def _save_x(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


energy.register_autograd(lambda ctx, grad: 2 * ctx.saved_tensors[0] * grad[:, None], setup_context=_save_x)


@autosp.register_rule(torch.ops.demo.rotate)
def rotate_rule(call):
    """Token-wise: the result is cut like ``x``, and each rank takes the positions of its own tokens."""
    cut = call["x"].shard
    if cut is None:
        if call["positions"].shard is not None:
            raise autosp.Refusal("rotate: x is whole and its positions are sharded", "rotate sharded activations")
        return autosp.Strategy()
    if cut.dim == 3:
        raise autosp.Refusal("rotate mixes the two halves of the sharded dimension", "shard another dimension")
    positions = cut if cut.dim < 2 else REPLICATE
    return autosp.Strategy(inputs={"x": cut, "positions": positions}, output=cut)


@autosp.register_rule(torch.ops.demo.energy)
def energy_rule(call):
    """Over the tokens: each rank's sum is a part of the whole one. Other dimensions stay cut."""
    cut = call["x"].shard
    if cut is None:
        return autosp.Strategy()
    if cut.dim != 1:
        return autosp.Strategy(inputs={"x": cut}, output=cut.at(0 if cut.dim == 0 else 1))

    def own_sum(call, local):
        x = local["x"]
        if call.axis.has_padding(cut):
            valid = call.axis.valid_rows(cut, x.dim(), x.device)
            x = torch.where(valid, x, torch.zeros_like(x))
        return call.run({"x": x})

    return autosp.Strategy(inputs={"x": cut}, output=PARTIAL, local=own_sum, note="sum over tokens")


class Model(nn.Module):
    """A causal model of one layer whose rotary embedding and penalty are the operators above."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        batch, tokens = input_ids.shape
        positions = torch.arange(tokens, device=input_ids.device).expand(batch, tokens)
        x = self.embed(input_ids)
        q, k, v = self.qkv(x).view(batch, tokens, 3, HEADS, HIDDEN // HEADS).unbind(2)
        q, k = rotate(q, positions, 10000.0), rotate(k, positions, 10000.0)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(batch, tokens, HIDDEN)
        loss = F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return loss + 1e-2 * energy(x[:, 1:]).mean()


def loss_and_gradients(model: nn.Module, step, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    loss = step(**batch)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return loss.item(), gradients


def compare(length: int) -> tuple[float, float, float]:
    """Loss over the ranks, loss in one process, and the largest difference of a gradient relative to its maximum."""
    torch.manual_seed(0)
    model = Model()
    ids = torch.randint(VOCAB, (2, length))
    expected, whole = loss_and_gradients(model, model, {"input_ids": ids, "labels": ids.clone()})
    compiled = torch.compile(model, backend="autosp")
    batch = autosp.prepare_batch({"input_ids": ids, "labels": ids.clone()})
    found, parts = loss_and_gradients(model, compiled, batch)
    worst = max(((parts[n] - whole[n]).abs().max() / whole[n].abs().max()).item() for n in whole)
    return found, expected, worst


def main() -> None:
    state = autosp.initialize({"autosp": {"inner_backend": "aot_eager"}}, device_type="cpu")
    found, expected, worst = compare(33)
    if state.sp_rank == 0:
        print(f"{state.sp_size} ranks: loss {found:.6f}; one process: {expected:.6f}; gradients differ by {worst:.1e}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
