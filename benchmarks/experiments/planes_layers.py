"""Layers, gated MLPs and groups, ragged ones too, in float32 by planes, on a Hopper:
``python -m benchmarks.experiments.planes_layers --out FILE``.

One run times PyTorch's own operations, the launches that split, and calls that split x beforehand
or where it is multiplied, each in a CUDA graph that rotates over inputs. A row is one case, with
the microseconds of each way.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import fastlinear as fl
from benchmarks.experiments.configurations.kind import turns
from fastlinear.calibration.measure import device_us
from fastlinear.core.errors import UnsupportedError
from fastlinear.dispatch.backend import family
from fastlinear.families.grouped.ragged import planes, products
from fastlinear.families.grouped.ragged.triton import backend as triton
from fastlinear.families.linear.cuda import planes_backend, planes_product
from fastlinear.families.linear.cuda.planes_split import Source, split
from fastlinear.fastpath import lookup

Layer = tuple[int, int, int]
"""Rows, features before and after."""
LAYERS: tuple[Layer, ...] = (
    (65536, 256, 256),
    (65536, 64, 256),
    (65536, 256, 64),
    (131072, 128, 128),
    (16384, 256, 256),
    (8192, 512, 512),
    (1024, 1024, 1024),
    (8192, 4096, 4096),
    (16384, 1024, 4096),
)
GATES: tuple[Layer, ...] = (
    (4096, 4096, 4096),
    (4096, 1024, 4096),
    (8192, 768, 2048),
    (512, 512, 1408),
)
"""Tokens, features and hidden features."""
GROUPS: tuple[tuple[int, int, int, int], ...] = (
    (4096, 8, 512, 512),
    (8192, 4, 1024, 1024),
    (1024, 16, 256, 256),
    (256, 10, 256, 256),
    (2048, 32, 128, 128),
    (16384, 8, 64, 64),
    (500, 5, 300, 700),
)
"""Tokens, groups, features before and after."""
RAGGED: tuple[tuple[int, int, int, int], ...] = (
    (24576, 64, 2048, 1408),
    (8192, 8, 1024, 4096),
    (4096, 8, 512, 512),
    (16384, 32, 256, 256),
    (1024, 64, 512, 1024),
    (65536, 16, 128, 64),
)
"""Rows of all groups, which have half to one and a half times the mean; then as ``GROUPS``."""
GROUP_BACKENDS = ("eager", "baddbmm", "triton", "planes")
GATE_BACKENDS = ("eager", "elementwise", "planes")
DEPTHS = (8, 16, 32, 40, 64, 96, 128, 160, 256, 512, 1024, 4096)
KINDS = ("layer", "gated", "groups", "ragged", "errors")
_ALL = (True, True, True)
Row = dict[str, Any]
Time = Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], float | None]


def layer(size: Layer, place: torch.device, time: Time) -> Row:
    """A layer with gelu and a bias: forward, with what the backward needs, and backward."""
    m, k, n = size
    sets = [_layer_inputs(size, place) for _ in range(turns(m * (k + 2 * n), torch.float32))]
    gelu, derivative = torch.nn.functional.gelu, torch.ops.aten.gelu_backward

    def eager_backward(x: Tensor, w: Tensor, b: Tensor, dy: Tensor, pre: Tensor) -> Any:
        d = derivative(dy, pre)
        return d @ w, d.t() @ x, d.sum(0)

    def both(x: Tensor, w: Tensor, *_: Tensor) -> Any:
        return split((Source(x, by_rows=True), Source(w, by_rows=True)))

    us = {
        "eager": time(lambda x, w, b, *_: gelu(torch.nn.functional.linear(x, w, b)), sets),
        "eager backward": time(eager_backward, sets),
        "splits": time(both, sets),
    }
    for name, late in (("split", False), ("read", True)):
        with mock.patch.object(planes_backend, "is_read", _of(late)):
            for kept in (False, True):
                us[f"{name} forward{' kept' * kept}"] = time(
                    lambda x, w, b, dy, pre, kept=kept: planes_backend.forward(
                        x, w, b, "gelu", kept
                    ),
                    sets,
                )
            us[f"{name} dx"] = time(lambda x, w, b, dy, pre: planes_backend.grad_input(dy, w), sets)
    us["backward"] = time(
        lambda x, w, b, dy, pre: planes_backend.backward(dy, pre, x, w, "gelu", _ALL), sets
    )
    return {"case": "layer", "M": m, "K": k, "N": n, "us": us}


def _layer_inputs(size: Layer, place: torch.device) -> tuple[Tensor, ...]:
    m, k, n = size
    shapes = (m, k), (n, k), (n,), (m, n), (m, n)
    return tuple(torch.randn(shape, device=place) for shape in shapes)


def _of(late: bool) -> Callable[[Source, int], bool]:
    return lambda source, _: late and planes_product.can_be_read(source)


def gate(size: Layer, place: torch.device, time: Time) -> Row:
    """A gated MLP with silu, by name of the backend: forward, and with gradients."""
    m, k, h = size
    x, dy = (torch.randn(m, k, device=place) for _ in range(2))
    weights = [torch.randn(s, device=place) * s[1] ** -0.5 for s in ((h, k), (h, k), (k, h))]
    leaves = [t.requires_grad_() for t in (x, *weights)]

    def call(name: str) -> Tensor:
        return fl.gated_mlp(*leaves, activation="silu", backend=name)

    us = {}
    for name in GATE_BACKENDS:
        with torch.no_grad():
            us[name] = time(lambda name=name: call(name), [()])
        us[f"{name} with gradients"] = time(
            lambda name=name: torch.autograd.grad(call(name), leaves, dy), [()]
        )
    return {"case": "gated", "M": m, "K": k, "H": h, "us": us}


def groups(size: tuple[int, int, int, int], place: torch.device, time: Time) -> Row:
    """Groups with gelu and a bias, tokens first, by name of the backend: forward, with what the
    backward needs, and backward."""
    m, count, k, n = size
    x, y = (torch.randn(1, m, count, features, device=place) for features in (k, n))
    w, b = torch.randn(count, n, k, device=place), torch.randn(count, n, device=place)
    known = family("grouped_linear")
    us = {}
    for piece in ("forward", "backward"):
        for backend in known.candidates(piece):
            if backend.name not in GROUP_BACKENDS:
                continue
            run = backend.load()
            if piece == "backward":
                given: tuple[Any, ...] = y, y, x, w, "gelu", _ALL, "tokens"
                us[f"{backend.name} backward"] = time(run, [given])
                continue
            for kept in (False, True):
                given = x, w, b, "gelu", kept, "tokens"
                us[f"{backend.name} forward{' kept' * kept}"] = time(run, [given])
    return {"case": "groups", "M": m, "G": count, "K": k, "N": n, "us": us}


def ragged(size: tuple[int, int, int, int], place: torch.device, time: Time) -> Row:
    """Groups of unequal sizes with gelu and biases by each backend; PyTorch's a group at a time, by
    sizes that the host knows."""
    m, count, k, n = size
    shares = torch.rand(count, generator=torch.Generator().manual_seed(0)) + 0.5
    sizes = (shares / shares.sum() * m).long()
    sizes[-1] += m - int(sizes.sum())
    given = sizes.to(place)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=place)

    sets = [
        (normal(m, k), normal(count, n, k) * k**-0.5, normal(count, n), normal(m, n), normal(m, n))
        for _ in range(turns(m * (k + 2 * n) + count * n * k, torch.float32))
    ]
    ways: dict[str, tuple[Any, Any, Any]] = {
        "eager": (products.forward, products.gradients, sizes.tolist()),
        "triton": (triton.forward, triton.backward, given),
        "planes": (planes.forward, planes.backward, given),
    }
    us: dict[str, float | None] = {}
    for name, (forward, backward, of) in ways.items():
        for kept in (False, True):

            def run(x: Tensor, w: Tensor, b: Tensor, *_: Tensor) -> Any:
                return forward(x, w, of, b, "gelu", kept)  # noqa: B023

            us[f"{name} forward{' kept' * kept}"] = time(run, sets)

        def back(x: Tensor, w: Tensor, _: Tensor, dy: Tensor, pre: Tensor) -> Any:
            return backward(dy, pre, x, w, of, "gelu", _ALL)  # noqa: B023

        us[f"{name} backward"] = time(back, sets)
    return {"case": "ragged", "M": m, "G": count, "K": k, "N": n, "us": us}


def data(m: int, k: int, n: int, place: torch.device) -> Iterator[tuple[str, Tensor, Tensor]]:
    """x (M, K) and a weight (N, K), by what they are drawn from."""

    def normal(rows: int, spread: float = 1.0) -> Tensor:
        return torch.randn(rows, k, device=place) * spread

    x, w = normal(m), normal(n)
    yield "Gaussian", x, w
    yield "uniform", torch.rand_like(x), 2 * torch.rand_like(w) - 1
    yield "heavy tails", x / (normal(m).square() + normal(m).square()).sqrt(), w
    yield "after relu", x.relu(), w
    yield "all positive", x.relu(), w.abs()
    spread = torch.randn(n, 1, device=place).mul(0.5).exp() * 0.02
    yield "as if trained", torch.nn.functional.gelu(1.5 * x), w * spread


def errors(k: int, place: torch.device, m: int = 4096, n: int = 512) -> Iterator[Row]:
    """Of products, relative in the 2-norm: PyTorch's, and ours by each way."""
    for name, x, w in data(m, k, n, place):
        oracle = x.double() @ w.double().t()
        found = {"eager": x @ w.t()}
        b, split_x = split((Source(w, by_rows=True), Source(x, by_rows=True)))
        for way, a in ("split", split_x), ("read", Source(x)):
            found[way] = planes_product.product(a, b)[0]
        error = {
            way: float((y.double() - oracle).norm() / oracle.norm()) for way, y in found.items()
        }
        yield {"case": "errors", "M": m, "K": k, "N": n, "data": name, "error": error}


def rows(place: torch.device, time: Time, kinds: Sequence[str] = KINDS) -> Iterator[Row]:
    """All cases of these kinds."""
    for size in LAYERS if "layer" in kinds else ():
        with torch.no_grad():
            yield layer(size, place, time)
    for size in GATES if "gated" in kinds else ():
        yield gate(size, place, time)
    for of_groups in GROUPS if "groups" in kinds else ():
        with torch.no_grad():
            yield groups(of_groups, place, time)
    for unequal in RAGGED if "ragged" in kinds else ():
        with torch.no_grad():
            yield ragged(unequal, place, time)
    for k in DEPTHS if "errors" in kinds else ():
        yield from errors(k, place)


def main() -> None:
    """Time all cases, and write a line of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="rows, JSON lines")
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=KINDS, help="only these")
    given = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise UnsupportedError(
            "benchmarks.experiments.planes_layers",
            "a Hopper (compute capability 9.0)",
            "another device, or none that torch sees",
            "Run it on an H100 or H200.",
        )
    lookup.wait(lookup.PATIENCE_S)  # launches begin early by it
    place = torch.device("cuda")
    torch.manual_seed(0)
    with given.out.open("w") as file:
        for row in rows(place, lambda run, sets: device_us(run, sets, place), given.kind):
            found = row.get("us") or (row["data"], row["error"])
            print(row["case"], *(row[s] for s in "MGKNH" if s in row), found, flush=True)
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
