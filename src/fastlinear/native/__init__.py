"""Compilers, compiled libraries and the CUDA driver."""
