"""Kernels in C++ for this very CPU: linears, attention over KV blocks, and whole decoders of the common kind."""
