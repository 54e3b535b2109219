"""One call of an op described by options: shapes, dtype, layout."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from fastlinear.cli.families import (
    FAMILIES,
    FEATURES,
    GROUP_FEATURES,
    GROUPS,
    HIDDEN,
    KINDS,
    LAYERS,
    WIDTH,
    Draw,
    Kind,
    Options,
    fail,
)
from fastlinear.core.errors import InputError
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.ops.common.activations import NAMES

if TYPE_CHECKING:
    from fastlinear.core.problem import Problem
    from fastlinear.dispatch.explain import Explanation

_LINEAR = "One linear layer (linear_act), a gated MLP, or the linear layer of a group"
_MLP = "A chain of layers (mlp)"
_GATE = "A gated MLP (gated_mlp)"
_GROUPED = "Many linear layers of one size (grouped_linear, ragged_linear, unequal_linear)"
_NO_MEMORY = "allocate memory"  # in what torch raises on a CPU

Family = Annotated[
    str,
    typer.Argument(
        help="The op: linear_act (a linear layer), mlp (a chain of them in one), diagonal_linear "
        "(--width features, each with a weight of its own), gated_mlp (gate, up and down), "
        "grouped_linear (--groups linear layers of one size), ragged_linear (the same, "
        "of --m rows that the groups share) or unequal_linear (--groups of sizes up to --k, --n)."
    ),
]
M = Annotated[int, typer.Option("--m", "--batch", min=1, help="Tokens: rows of x.")]
K = Annotated[
    int | None,
    typer.Option(
        "--k",
        min=1,
        help=f"In features; {FEATURES} if left out, for groups {GROUP_FEATURES}.",
        show_default=False,
        rich_help_panel=_LINEAR,
    ),
]
N = Annotated[
    int | None,
    typer.Option(
        "--n",
        min=1,
        help=f"Out features; {FEATURES} if left out, for gated_mlp and groups as --k.",
        show_default=False,
        rich_help_panel=_LINEAR,
    ),
]
Hidden = Annotated[
    int | None,
    typer.Option(
        "--hidden",
        min=1,
        help=f"Features of the gate and of the up projection; {HIDDEN} times --k if left out.",
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
Groups = Annotated[
    int | None,
    typer.Option(
        "--groups",
        min=1,
        help=f"How many linear layers; {GROUPS} if left out.",
        show_default=False,
        rich_help_panel=_GROUPED,
    ),
]
XLayout = Annotated[
    str | None,
    typer.Option(
        "--x-layout",
        metavar="LAYOUT",
        help="x's dimensions, as in grouped_linear's layout: '... (g k)' if left out, '... g k', "
        "'g ... k', 'b (g k) ...', 'b g k ...' or '... k'.",
        show_default=False,
        rich_help_panel=_GROUPED,
    ),
]
Length = Annotated[
    int | None,
    typer.Option(
        "--length",
        min=1,
        help="Tokens of each sequence where x's layout begins with b; all --m if left out.",
        show_default=False,
        rich_help_panel=_GROUPED,
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
        help=f"How many layers of --width features, instead of --widths; else {LAYERS}.",
        show_default=False,
        rich_help_panel=_MLP,
    ),
]
Width = Annotated[
    int | None,
    typer.Option(
        "--width",
        min=1,
        help=f"Features of the input and of each of --layers; {WIDTH} if left out.",
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
Activation = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(NAMES)}; if left out none, for mlp relu, for gated_mlp silu.",
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
class Call(Options):
    """A call as the options describe it.

    Raises:
        InputError: an unknown family, an option of another family, or a value that does not fit.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "family", self.family.replace("-", "_"))
        if self.family not in FAMILIES:
            fail(
                "fastlinear",
                f"op in {', '.join(FAMILIES)}",
                repr(self.family),
                "`fastlinear doctor` lists them with their backends.",
            )
        own = self._kind.options
        every = {flag: name for kind in KINDS.values() for flag, name in kind.options.items()}
        given = [
            f
            for f, name in every.items()
            if f not in own and getattr(self, name) not in (None, False)
        ]
        if given:
            fail(
                f"fastlinear: {self.family}",
                f"its own options ({', '.join(own)})",
                ", ".join(given),
                self._kind.remedy,
            )
        if self.layout not in ("nk", "kn"):
            fail(
                "--weight-layout",
                "nk or kn",
                repr(self.layout),
                "nk is nn.Linear's (N, K), kn the (K, N) of a Conv1D.",
            )
        self._kind.check(self)

    def explain(self, backend: str | None, train: bool) -> Explanation:
        """Which backend the call takes."""
        from fastlinear.ops.explain import explain

        given, options = self._kind.asked(self, self._tensors())
        return explain(*given, backend=backend, needs_grad=train, **options)

    def problems(self, train: bool, captured: bool) -> list[Problem]:
        """Every Problem that decides about the call, in the order in which to tune them."""
        return list(self._kind.order(replace(self.forward(train), captured=captured)))

    def forward(self, train: bool) -> Problem:
        """The forward Problem of the call."""
        return self._kind.forward(self, self._tensors(), train)

    @property
    def _kind(self) -> Kind:
        return KINDS[self.family]

    def _tensors(self) -> tuple[torch.Tensor, Any, Any]:
        """Uninitialised, as the op takes them."""
        from fastlinear.cli.load import usable_device

        where, kind = usable_device(self.device), FLOAT_DTYPES[self.dtype]
        taken, there = self._kind.elements(self) * kind.itemsize, memory_of(where)
        if taken > there:
            fail(
                f"fastlinear: {self.family}",
                f"a call that fits the {there / 2**30:.0f} GiB of {where}",
                f"one whose tensors take {taken / 2**30:.0f} GiB",
                "Ask for fewer rows or features.",
            )
        return self._kind.tensors(self, Draw(where, kind, self.layout))


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
