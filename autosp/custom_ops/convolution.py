"""``autosp::token_conv1d``: a convolution along tokens after which every token is where it was."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ._library import define


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, left: int, dilation: int, groups: int) -> Tensor:
    right = int(weight.shape[-1] - 1) * dilation - left
    return F.conv1d(F.pad(x, (left, right)), weight, bias, 1, 0, dilation, groups)


token_conv1d = define(
    "token_conv1d(Tensor input, Tensor weight, Tensor? bias, int left, int dilation, int groups) -> Tensor",
    forward=_convolve,
    fake=lambda x, weight, bias, left, dilation, groups: x.new_empty(*x.shape[:-2], weight.shape[0], x.shape[-1]),
    autograd=_convolve,
)
