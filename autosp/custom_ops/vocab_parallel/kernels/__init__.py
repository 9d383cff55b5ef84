"""Triton kernels of the vocabulary-parallel losses; imported only where ``dispatch.triton_usable`` says so."""
