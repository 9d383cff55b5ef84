"""A GRPO loss written in plain PyTorch on ``model(...).logits``, run with the vocabulary and the sequence sharded.

    torchrun --nproc-per-node 4 examples/grpo_loss.py

Nothing in `Policy` knows of ranks. One line of JSON shards the LM head over two ranks and the tokens over two; the
script prints the loss and the largest difference of a gradient against one process with the whole model.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import autosp

CONFIG = {
    "sequence_parallel_size": 2,
    "tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True},
    "autosp": {"inner_backend": "aot_eager"},
}
VOCAB = 257


class Policy(nn.Module):
    """A causal language model and its GRPO loss (Shao et al. 2024, equation 3, clipped, with an entropy bonus)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, advantages: Tensor, old_logprobs: Tensor, completion: Tensor) -> Tensor:
        logits = self.model(input_ids, use_cache=False).logits[:, :-1].float() / 0.9
        logprobs = torch.log_softmax(logits, dim=-1)
        chosen = logprobs.gather(-1, input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        ratio = (chosen - old_logprobs[:, 1:]).exp()
        gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
        mask = completion[:, 1:]
        return -((gain + 0.01 * entropy) * mask).sum() / mask.sum()


def make_batch(length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (2, length), generator=generator)
    return {
        "input_ids": ids,
        "advantages": torch.tensor([1.0, -0.7]),
        "old_logprobs": -5.5 + 0.1 * torch.randn(2, length, generator=generator),
        "completion": (torch.arange(length) >= length // 3).float().expand(2, length).contiguous(),
    }


def compare(length: int = 17) -> tuple[float, float, float]:
    """Loss over the ranks, loss in one process, and the largest difference of a gradient relative to its maximum."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, tie_word_embeddings=False, **sizes))
    reference = Policy(copy.deepcopy(model))
    autosp.initialize(CONFIG, model=model, device_type="cpu")
    policy = Policy(model)
    step = torch.compile(policy, backend="autosp")

    expected = reference(**make_batch(length))
    expected.backward()
    found = step(**autosp.prepare_batch(make_batch(length)))
    found.backward()
    worst = 0.0
    for name, parameter in reference.named_parameters():
        layer, grad = policy.get_submodule(name.rpartition(".")[0]), parameter.grad
        if isinstance(layer, autosp.VocabParallelLinear):
            grad = grad[layer.vocab_start_index : layer.vocab_end_index]
        difference = (policy.get_parameter(name).grad - grad).abs().max() / parameter.grad.abs().max()
        worst = max(worst, difference.item())
    return found.item(), expected.item(), worst


def main() -> None:
    found, expected, worst = compare()
    if torch.distributed.get_rank() == 0:
        print(f"sp 2 x tp 2: loss {found:.6f}; one process: {expected:.6f}; gradients differ by {worst:.1e}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
