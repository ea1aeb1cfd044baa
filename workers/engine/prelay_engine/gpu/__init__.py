"""The engine on a GPU: Triton kernels, CUDA graphs, memory. Imported only where a worker computes on one."""
