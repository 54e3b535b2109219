"""Linears of one list, of any sizes."""
