"""Triton kernels of block attention; imported only where ``dispatch.triton_usable`` says so."""
