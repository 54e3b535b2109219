"""Callables recorded as CUDA graphs and replayed."""
