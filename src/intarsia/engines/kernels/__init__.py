"""Kernels of our own for GPUs, in Triton, as operators that no compiler takes apart."""
