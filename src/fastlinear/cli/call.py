"""One call of an op described by options: shapes, dtype, layout."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import torch
import typer

from fastlinear.core.errors import InputError
from fastlinear.core.precision import FLOAT_DTYPES

if TYPE_CHECKING:
    from fastlinear.core.problem import Problem
    from fastlinear.dispatch.explain import Explanation

FAMILIES = ("linear_act", "mlp", "diagonal_linear", "gated_mlp")
_FEATURES, _LAYERS, _WIDTH, _HIDDEN = 1024, 8, 64, 4
_LINEAR, _MLP = "One linear layer (linear_act), or a gated MLP", "A chain of layers (mlp)"
_GATE = "A gated MLP (gated_mlp)"
_DIAGONAL, _GATED = "diagonal_linear", "gated_mlp"
_NO_MEMORY = "allocate memory"  # in what torch raises on a CPU

Family = Annotated[
    str,
    typer.Argument(
        help="The op: linear_act (a linear layer), mlp (a chain of them in one), diagonal_linear "
        "(--width features, each with a weight of its own) or gated_mlp (gate, up and down)."
    ),
]
M = Annotated[int, typer.Option("--m", "--batch", min=1, help="Tokens: rows of x.")]
K = Annotated[
    int | None,
    typer.Option(
        "--k",
        min=1,
        help=f"In features; {_FEATURES} if left out.",
        show_default=False,
        rich_help_panel=_LINEAR,
    ),
]
N = Annotated[
    int | None,
    typer.Option(
        "--n",
        min=1,
        help=f"Out features; {_FEATURES} if left out, for gated_mlp as many as --k.",
        show_default=False,
        rich_help_panel=_LINEAR,
    ),
]
Hidden = Annotated[
    int | None,
    typer.Option(
        "--hidden",
        min=1,
        help=f"Features of the gate and of the up projection; {_HIDDEN} times --k if left out.",
        show_default=False,
        rich_help_panel=_GATE,
    ),
]
Stacked = Annotated[
    str | None,
    typer.Option(
        "--stacked",
        help="gate_up, up_gate or interleaved: how gate and up lie in one weight; two if left out.",
        show_default=False,
        rich_help_panel=_GATE,
    ),
]
Widths = Annotated[
    str | None,
    typer.Option(
        "--widths",
        metavar="N0,N1,…,NL",
        help="Features of the input and of every layer's output.",
        show_default=False,
        rich_help_panel=_MLP,
    ),
]
Layers = Annotated[
    int | None,
    typer.Option(
        "--layers",
        min=1,
        help=f"How many layers of --width features, instead of --widths; else {_LAYERS}.",
        show_default=False,
        rich_help_panel=_MLP,
    ),
]
Width = Annotated[
    int | None,
    typer.Option(
        "--width",
        min=1,
        help=f"Features of the input and of each of --layers; {_WIDTH} if left out.",
        show_default=False,
        rich_help_panel=_MLP,
    ),
]
FinalActivation = Annotated[
    str | None,
    typer.Option(
        "--final-activation",
        help="After the last layer; none if left out. --activation follows all others.",
        show_default=False,
        rich_help_panel=_MLP,
    ),
]
FastMatmul = Annotated[
    bool,
    typer.Option(
        "--allow-fast-matmul",
        help="Let Strassen compete: its error is bounded for the whole matrix only.",
        rich_help_panel=_MLP,
    ),
]
Activation = Annotated[
    str | None,
    typer.Option(
        help="none, relu, relu2, silu, gelu, gelu_tanh, sigmoid, tanh, quick_gelu, leaky_relu; "
        "if left out none, for mlp relu, for gated_mlp silu.",
        show_default=False,
    ),
]
Bias = Annotated[bool, typer.Option(help="With a bias of one number for each out feature.")]
Layout = Annotated[
    str,
    typer.Option(
        "--weight-layout", help="nk: contiguous, as in nn.Linear. kn: transposed, as in Conv1D."
    ),
]
Train = Annotated[bool, typer.Option("--train", help="The backward and its pieces as well.")]


@dataclass(frozen=True)
class Call:
    """What the options say of a call; None where an option was left out.

    Raises:
        InputError: an unknown family, an option of another family, or a value that does not fit.
    """

    family: str
    m: int
    dtype: str
    device: str
    activation: str | None
    bias: bool
    layout: str
    k: int | None
    n: int | None
    widths: str | None
    layers: int | None
    width: int | None
    final_activation: str | None
    allow_fast_matmul: bool
    hidden: int | None = None
    stacked: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "family", self.family.replace("-", "_"))
        if self.family not in FAMILIES:
            _fail(
                "fastlinear",
                f"op in {', '.join(FAMILIES)}",
                repr(self.family),
                "`fastlinear doctor` lists them with their backends.",
            )
        of_linear = {"--k": self.k, "--n": self.n}
        of_mlp = {
            "--widths": self.widths,
            "--layers": self.layers,
            "--width": self.width,
            "--final-activation": self.final_activation,
            "--allow-fast-matmul": self.allow_fast_matmul or None,
        }
        of_gate = {"--hidden": self.hidden, "--stacked": self.stacked}
        families: dict[str, dict[str, Any]] = {
            "linear_act": of_linear,
            "mlp": of_mlp,
            _DIAGONAL: {"--width": self.width},
            _GATED: of_linear | of_gate,
        }
        own, every = families[self.family], of_linear | of_mlp | of_gate
        given = [n for n, value in every.items() if n not in own and value is not None]
        if given:
            _fail(
                f"fastlinear: {self.family}",
                f"its own options ({', '.join(own)})",
                ", ".join(given),
                {
                    "linear_act": "These belong to another op: name it first, as in "
                    "mlp --widths 64,128,10 or gated_mlp --hidden 4096.",
                    "mlp": "Give --widths, or --layers and --width.",
                    _DIAGONAL: "It has one size besides the rows: --width.",
                    _GATED: "Its sizes are --k, --hidden and --n.",
                }[self.family],
            )
        if self.family == _DIAGONAL and self.layout != "nk":
            _fail(
                f"fastlinear: {self.family}",
                "its own options (--width)",
                "--weight-layout",
                "Its weight is a vector, which has no layout: leave the option out.",
            )
        if self.layout not in ("nk", "kn"):
            _fail(
                "--weight-layout",
                "nk or kn",
                repr(self.layout),
                "nk is nn.Linear's (N, K), kn the (K, N) of a Conv1D.",
            )

    def explain(self, backend: str | None, train: bool) -> Explanation:
        """Which backend the call takes."""
        from fastlinear.ops.explain import explain

        options: dict[str, Any] = {"activation": self._activation}
        if self.family == _GATED:
            x, weights, biases = self._tensors()
            named = {"up": (weights[1], biases[1]), "down": (weights[2], biases[2])}
            for half, (weight, bias) in named.items():
                options |= {f"{half}_weight": weight, f"{half}_bias": bias}
            options |= {"stacked": self.stacked, "backend": backend, "needs_grad": train}
            return explain(x, weights[0], biases[0], **options)
        if self.family == "mlp":
            options |= {
                "final_activation": self._final,
                "allow_fast_matmul": self.allow_fast_matmul,
            }
        return explain(*self._tensors(), backend=backend, needs_grad=train, **options)

    def problems(self, train: bool, captured: bool) -> list[Problem]:
        """Every Problem that decides about the call, in the order in which to tune them."""
        from fastlinear.ops.diagonal_linear import selection as diagonal
        from fastlinear.ops.gated_mlp import selection as gated
        from fastlinear.ops.linear_act import selection as linear_act
        from fastlinear.ops.mlp import selection as mlp

        forward = replace(self.forward(train), captured=captured)
        order = {"linear_act": linear_act, "mlp": mlp, _DIAGONAL: diagonal, _GATED: gated}
        return list(order[self.family].tuning_order(forward))

    def forward(self, train: bool) -> Problem:
        """The forward Problem of the call."""
        x, weights, biases = self._tensors()
        if self.family == "mlp":
            from fastlinear.ops.mlp import selection as mlp
            from fastlinear.ops.mlp.validation import validate as validate_mlp

            names = self._activation, self._final
            validate_mlp(x, weights, biases, *names)
            return mlp.problem_of(x, weights, biases, *names, self.allow_fast_matmul, train)
        if self.family == _DIAGONAL:
            from fastlinear.ops.diagonal_linear.op import validate as validate_diagonal
            from fastlinear.ops.diagonal_linear.problem import problem_of

            validate_diagonal(x, weights, biases, self._activation)
            return problem_of(x, biases, None, self._activation, train)
        if self.family == _GATED:
            from fastlinear.ops.gated_mlp.selection import problem_of as gated_problem
            from fastlinear.ops.gated_mlp.validation import validate as validate_gated

            order = "apart" if self.stacked is None else self.stacked
            validate_gated(_GATED, x, weights, biases, self._activation, order, None, None)
            return gated_problem(x, weights, biases, self._activation, order, None, train)
        from fastlinear.ops.linear_act import selection as linear_act
        from fastlinear.ops.linear_act.op import validate

        validate(x, weights, biases, self._activation)
        return linear_act.problem_of(x, weights, biases, self._activation, train)

    @property
    def _activation(self) -> str:
        return self.activation or {"mlp": "relu", _GATED: "silu"}.get(self.family, "none")

    @property
    def _final(self) -> str:
        return self.final_activation or "none"

    def _tensors(self) -> tuple[torch.Tensor, Any, Any]:
        """Uninitialised x (M, n_0); weight and bias, or a list of each for mlp, gate, up and down
        for gated_mlp; vectors for diagonal_linear."""
        from fastlinear.cli.load import usable_device

        where, kind = usable_device(self.device), FLOAT_DTYPES[self.dtype]

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=kind, device=where)

        self._check_memory(where, kind)
        if self.family == _DIAGONAL:
            k = self.width or _FEATURES
            return empty(self.m, k), empty(k), empty(k) if self.bias else None
        sizes = self._sizes()

        def matrix(k: int, n: int) -> torch.Tensor:
            return empty(k, n).t() if self.layout == "kn" else empty(n, k)

        if self.family == _GATED:
            return self._gated(empty, matrix, *sizes)
        weights = [matrix(k, n) for k, n in pairwise(sizes)]
        biases = [empty(n) if self.bias else None for n in sizes[1:]]
        x = empty(self.m, sizes[0])
        return (x, weights, biases) if self.family == "mlp" else (x, weights[0], biases[0])

    def _gated(self, empty: Any, matrix: Any, k: int, h: int, n: int) -> tuple[Any, Any, Any]:
        from fastlinear.ops.gated_mlp.stacking import Biases, Weights

        apart = self.stacked is None
        first = h if apart else 2 * h
        weights = Weights(matrix(k, first), matrix(k, h) if apart else None, matrix(h, n))
        held = [None if w is None or not self.bias else empty(w.shape[0]) for w in weights]
        return empty(self.m, k), weights, Biases(*held)

    def _check_memory(self, where: torch.device, kind: torch.dtype) -> None:
        """Raise InputError where x, the weights and the result alone exceed the memory there is."""
        if self.family == _DIAGONAL:
            elements = 2 * self.m * (self.width or _FEATURES)
        else:
            sizes = self._sizes()
            elements = self.m * (sizes[0] + sizes[-1]) + sum(k * n for k, n in pairwise(sizes))
            if self.family == _GATED:
                elements += sizes[0] * sizes[1]
        there = memory_of(where)
        if elements * kind.itemsize > there:
            _fail(
                f"fastlinear: {self.family}",
                f"a call that fits the {there / 2**30:.0f} GiB of {where}",
                f"one whose tensors take {elements * kind.itemsize / 2**30:.0f} GiB",
                "Ask for fewer rows or features.",
            )

    def _sizes(self) -> tuple[int, ...]:
        """n_0, n_1, … n_L; K, H and N of a gated MLP."""
        if self.family == _GATED:
            k = self.k or _FEATURES
            return k, self.hidden or _HIDDEN * k, self.n or k
        if self.family == "linear_act":
            return self.k or _FEATURES, self.n or _FEATURES
        if self.widths is None:
            return (self.width or _WIDTH,) * ((self.layers or _LAYERS) + 1)
        if self.layers is not None or self.width is not None:
            _fail(
                "--widths",
                "either --widths or --layers and --width",
                "both",
                "--layers and --width make a chain of equal widths.",
            )
        parts = [part.strip() for part in self.widths.split(",")]
        sizes = tuple(int(part) for part in parts if part.isascii() and part.isdecimal())
        if len(sizes) != len(parts) or len(sizes) < 2 or min(sizes) < 1:
            _fail(
                "--widths",
                "two or more whole numbers from 1 on, with commas between them",
                repr(self.widths),
                "For example 64,128,10: two layers, from 64 features to 128 to 10.",
            )
        return sizes


@contextmanager
def within_memory(what: str) -> Iterator[None]:
    """Inside it memory that runs out is an InputError that names what was under way."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and _NO_MEMORY not in str(error):
            raise
        raise InputError(
            "fastlinear",
            f"memory for {what}: its tensors, several times, and some in float64",
            "less than it takes",
            "Ask for fewer rows or features.",
        ) from error


def memory_of(device: torch.device) -> int:
    """Bytes of memory that a device has; without an end where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if not hasattr(os, "sysconf"):
        return sys.maxsize
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _fail(function: str, expected: str, received: str, remedy: str) -> NoReturn:
    raise InputError(function, expected, received, remedy)
