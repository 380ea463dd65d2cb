"""Fused numeric kernels: numba on the CPU, Warp on CUDA, and a plain torch reference of each."""
