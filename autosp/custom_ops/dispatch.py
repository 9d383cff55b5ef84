"""Which implementation runs a tensor: the Triton kernels, or the plain-PyTorch path.

The choice is made by capability and never by a device's name: Triton imports, its active driver serves the device that
the tensors are on, and that device's architecture has what the kernels use. ``AUTOSP_TRITON=0`` forces the plain path;
``TRITON_INTERPRET=1``, set before triton is imported, runs the kernels on CPU tensors in Triton's interpreter.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from ..errors import ConfigError

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# bf16 arithmetic conversions and 64-bit address arithmetic at full speed start with this CUDA architecture.
_MIN_CUDA_ARCH = 80


def triton_usable(*tensors: torch.Tensor) -> bool:
    """Whether the Triton kernels can take all of ``tensors``.

    Args:
        tensors: the operands. Kernels take float32, bfloat16 and float16 values (integers and booleans are not looked
        at).

    Returns:
        True when every tensor lives on one device that the kernels serve, in a dtype that they load.

    Raises:
        ConfigError: ``AUTOSP_TRITON`` is neither empty, 0 nor 1.
    """
    setting = os.environ.get("AUTOSP_TRITON") or "1"
    if setting not in ("0", "1"):
        raise ConfigError(
            f"AUTOSP_TRITON is {setting!r}; allowed are 0 (plain PyTorch) and 1 (kernels where they can run)"
        )
    if setting == "0" or not tensors or not _triton_importable():
        return False
    if len({tensor.device for tensor in tensors}) != 1:
        return False
    if any(tensor.is_floating_point() and tensor.dtype not in _KERNEL_DTYPES for tensor in tensors):
        return False
    return _device_served(tensors[0].device.type, tensors[0].device.index)


@functools.lru_cache(maxsize=1)
def _triton_importable() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        import triton  # noqa: F401
    except ImportError:  # a Triton built for another Python or another libc: the same as none
        return False
    return True


@functools.lru_cache(maxsize=64)
def _device_served(device_type: str, index: int | None) -> bool:
    if triton_interpreted():
        return device_type == "cpu"
    if device_type in ("cpu", "meta"):
        return False
    from triton.runtime import driver

    try:
        served = driver.active.get_active_torch_device().type
        target = driver.active.get_current_target()
    except RuntimeError:  # Triton's own error for "no active driver"
        return False
    if served != device_type:
        return False
    if target.backend != "cuda":
        return True
    major, minor = torch.cuda.get_device_capability(index)
    return major * 10 + minor >= _MIN_CUDA_ARCH


def triton_interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
