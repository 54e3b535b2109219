"""Linears on one input, or on the parts of one."""
