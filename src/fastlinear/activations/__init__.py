"""Activations by name, in every dialect that kernels are written in."""
