"""Kernels of our own for GPUs, in Triton, as operators that compilers do not decompose."""
