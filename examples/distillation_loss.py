"""A distillation loss written in plain PyTorch on two models' logits, run with the vocabulary sharded.

    torchrun --nproc-per-node 2 examples/distillation_loss.py

Both heads are sharded over two ranks, so that neither model's logits exist whole anywhere; the script prints the loss
and the largest difference of a gradient against one process.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import autosp

CONFIG = {
    "sequence_parallel_size": 1,
    "tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True},
    "autosp": {"inner_backend": "aot_eager"},
}
VOCAB = 257


class Distillation(nn.Module):
    """KL from a teacher to a student at a temperature (Hinton et al. 2015), with cross entropy on the labels."""

    def __init__(self, student: nn.Module, teacher: nn.Module, temperature: float = 2.0) -> None:
        super().__init__()
        self.student, self.teacher, self.temperature = student, teacher.requires_grad_(False), temperature

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        student = self.student(input_ids, labels=labels, use_cache=False)
        with torch.no_grad():
            target = self.teacher(input_ids, use_cache=False).logits
        kl = F.kl_div(
            F.log_softmax(student.logits / self.temperature, dim=-1),
            F.log_softmax(target / self.temperature, dim=-1),
            reduction="none",
            log_target=True,
        ).sum(-1)
        return 0.5 * student.loss + 0.5 * self.temperature**2 * kl.mean()


def make_model(seed: int, width: int) -> nn.Module:
    torch.manual_seed(seed)
    sizes = dict(intermediate_size=96, num_hidden_layers=1, num_attention_heads=4)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, hidden_size=width, tie_word_embeddings=False, **sizes))


def compare(length: int = 17) -> tuple[float, float, float]:
    """Loss over the ranks, loss in one process, and the largest difference of a gradient relative to its maximum."""
    student, teacher = make_model(0, 32), make_model(1, 64)
    reference = Distillation(copy.deepcopy(student), copy.deepcopy(teacher))
    state = autosp.initialize(CONFIG, model=student, device_type="cpu")
    autosp.shard_lm_head(teacher, state.mesh["tp"])
    both = Distillation(student, teacher)
    step = torch.compile(both, backend="autosp")

    ids = torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(2))
    expected = reference(ids, ids)
    expected.backward()
    found = step(**autosp.prepare_batch({"input_ids": ids, "labels": ids.clone()}))
    found.backward()
    worst = 0.0
    for name, parameter in reference.student.named_parameters():
        layer, grad = student.get_submodule(name.rpartition(".")[0]), parameter.grad
        if isinstance(layer, autosp.VocabParallelLinear):
            grad = grad[layer.vocab_start_index : layer.vocab_end_index]
        difference = (student.get_parameter(name).grad - grad).abs().max() / parameter.grad.abs().max()
        worst = max(worst, difference.item())
    return found.item(), expected.item(), worst


def main() -> None:
    found, expected, worst = compare()
    if torch.distributed.get_rank() == 0:
        print(f"tp 2: loss {found:.6f}; one process: {expected:.6f}; gradients differ by {worst:.1e}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
