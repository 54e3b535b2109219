"""Float32 products by AMX beside PyTorch's: ``python -m benchmarks.experiments.amx_planes``.

A number is a sum of three bfloat16 planes; six products of planes give float32's accuracy. One
thread of each, in one interleaved run. Rows are appended to a file.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.environment import environment
from fastlinear.core.timing import interleave, paired_ratio
from fastlinear.kernels.cpu.grouped import half_products
from fastlinear.native import cpp_build

PLANES = 3
STEPS = 4096
STEP_FLOPS = 2 * 32 * 32 * 32
DEPTH = 512
OURS = {
    "product": "of planes that are there",
    "known weight": "x is split as well",
    "whole": "both are",
}


def library() -> ctypes.CDLL:
    """The product, its splits and its inner loop, in C++."""
    found = cpp_build.load(Path(__file__).with_name("planes.cpp"))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    for name, pointers, numbers in (
        ("split_rows", 2, 2),
        ("split_columns", 2, 2),
        ("product", 3, 3),
        ("tile_loop", 3, 1),
    ):
        function = getattr(found, name)
        function.argtypes, function.restype = [pointer] * pointers + [number] * numbers, None
    return found


def measured(m: int, k: int, n: int, rounds: int) -> dict[str, Any]:
    """The row of one size.

    Raises:
        SystemExit: no AMX here, rows or columns are no multiple of 32, or the depth none of 512.
    """
    if half_products() != "tiles":
        raise SystemExit("amx_planes: a processor with AMX (amx_tile, amx_bf16) is needed")
    if m % 32 or n % 32 or k % DEPTH:
        raise SystemExit(f"amx_planes: M and N in 32s and K in {DEPTH}s are needed, not {m, k, n}")
    run = library()
    torch.manual_seed(0)
    x, w = torch.randn(m, k), torch.randn(n, k)
    y, tile = torch.empty(m, n), torch.empty(16, 16)
    a, b = (torch.empty(PLANES * t.numel(), dtype=torch.bfloat16) for t in (x, w))

    def split_x() -> None:
        run.split_rows(x.data_ptr(), a.data_ptr(), m, k)

    def split_w() -> None:
        run.split_columns(w.data_ptr(), b.data_ptr(), n, k)

    def product() -> None:
        run.product(a.data_ptr(), b.data_ptr(), y.data_ptr(), m, n, k)

    def known_weight() -> None:
        split_x()
        product()

    def whole() -> None:
        split_w()
        known_weight()

    runs: dict[str, Callable[[], Any]] = {
        "torch": lambda: torch.mm(x, w.t()),
        "split x": split_x,
        "split w": split_w,
        "product": product,
        "known weight": known_weight,
        "whole": whole,
        "tile loop": lambda: run.tile_loop(a.data_ptr(), b.data_ptr(), tile.data_ptr(), STEPS),
    }
    whole()
    errors = {"torch": error(x @ w.t(), x, w), "planes": error(y, x, w)}
    times = interleave(runs, device=torch.device("cpu"), metric="wall", rounds=rounds, budget_s=60)
    row: dict[str, Any] = {"experiment": "amx-planes", "m": m, "k": k, "n": n, "errors": errors}
    for name, samples in times.items():
        row[name] = {"us": list(samples.us), "median_us": samples.median_us}
        if name == "tile loop":
            row[name]["tflops"] = STEPS * STEP_FLOPS / samples.median_us / 1e6
        elif not name.startswith("split"):
            row[name]["tflops"] = 2 * m * k * n / samples.median_us / 1e6
        if name in OURS:
            ratio = paired_ratio(times["torch"], samples)
            row[name]["times torch"] = [ratio.median, ratio.low, ratio.high]
    return row


def error(y: Tensor, x: Tensor, w: Tensor) -> float:
    """Largest difference to float64, over the largest number."""
    wide = x.double() @ w.double().t()
    return float((y.double() - wide).abs().max() / wide.abs().max())


def main() -> None:
    """Measure sizes, print a line each, append rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sizes", nargs="+", default=["256,512,512", "1024,1024,1024", "2048,2048,2048"]
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for size in options.sizes:
        m, k, n = map(int, size.split(","))
        row = measured(m, k, n, options.rounds)
        peer, loop = row["torch"]["tflops"], row["tile loop"]["tflops"]
        print(
            f"{m}x{k}x{n}: PyTorch {peer:.2f} TF, errors {row['errors']}, inner loop {loop:.2f} TF"
        )
        for name, what in OURS.items():
            ratio, low, high = row[name]["times torch"]
            rate = row[name]["tflops"]
            print(f"  {rate:.2f} TF, {ratio:.2f} times ({low:.2f} to {high:.2f}): {what}")
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps({**row, "env": environment(torch.device("cpu"))}) + "\n")


if __name__ == "__main__":
    main()
