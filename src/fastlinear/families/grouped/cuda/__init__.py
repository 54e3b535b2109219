"""Backends in CUDA C++."""
