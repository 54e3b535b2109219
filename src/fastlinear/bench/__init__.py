"""Benchmarks: cases as data, peers in their best layout, rows with everything needed to judge."""

from fastlinear.bench.heat import heatmap, print_heat
from fastlinear.bench.plot import plot
from fastlinear.bench.rows import behind, read_rows, write_rows
from fastlinear.bench.run import run
from fastlinear.bench.table import build_table, write_table

__all__ = [
    "behind",
    "build_table",
    "heatmap",
    "plot",
    "print_heat",
    "read_rows",
    "run",
    "write_rows",
    "write_table",
]
