"""Linears that a forward calls with one tensor, where that forward cannot be traced."""
