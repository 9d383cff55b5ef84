"""Whether the Triton kernels may run for a tensor: by capability, not by the name of a device."""

from __future__ import annotations

import functools
import os

import torch

from autosp.errors import ConfigError


@functools.cache
def _triton_importable() -> bool:
    try:
        import triton
        import triton.language  # noqa: F401
    except ImportError:
        return False
    return True


def use_triton(tensor: torch.Tensor) -> bool:
    """True when the kernels can run on ``tensor``.

    They need Triton, a 16- or 32-bit floating-point tensor, and a device that Triton compiles for (a CUDA device of
    compute capability 8.0 or more) or Triton's interpreter (``TRITON_INTERPRET=1``). ``AUTOSP_TRITON=0`` forbids them.

    Raises:
        ConfigError: ``AUTOSP_TRITON`` is neither empty, 0 nor 1.
    """
    setting = os.environ.get("AUTOSP_TRITON", "1") or "1"
    if setting not in ("0", "1"):
        raise ConfigError(
            f"AUTOSP_TRITON is {setting!r}; allowed are 0 (plain PyTorch) and 1 (kernels where they can run)"
        )
    if setting == "0" or tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    if not _triton_importable():
        return False
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        return True
    if tensor.device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(tensor.device) >= (8, 0)
