"""Benchmarks of fastlinear: part of a checkout, in no wheel."""

BENCHMARKS_OF = "fastlinear"
"""By this line ``fastlinear bench`` tells this package from others called ``benchmarks``."""
