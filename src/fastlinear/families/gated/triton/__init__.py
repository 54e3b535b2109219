"""Backends in Triton."""
