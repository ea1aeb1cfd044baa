"""Triton kernels and their launchers. Each file is one kernel, or those that only make sense together."""
