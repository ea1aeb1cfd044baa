"""KV pools in the memory of a GPU, exported to other processes by CUDA IPC or through pinned host memory."""
