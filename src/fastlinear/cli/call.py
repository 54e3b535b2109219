"""One call of an op described by options: shapes, dtype, layout."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import torch
import typer

from fastlinear.activations.reference import NAMES
from fastlinear.cli.families import command_of
from fastlinear.core.errors import InputError
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.dispatch.backend import names

if TYPE_CHECKING:
    from fastlinear.core.problem import Problem
    from fastlinear.dispatch.explain import Explanation
    from fastlinear.op.command import Command, Request

_NO_MEMORY = "allocate memory"  # in what torch raises on a CPU

Family = Annotated[str, typer.Argument(help="The op.")]
M = Annotated[int, typer.Option("--m", "--batch", min=1, help="Tokens: rows of x.")]
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
class Call:
    """A call as the options describe it.

    Attributes:
        given: options that ops declare → their values, of those that were given.

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
    given: Mapping[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "family", self.family.replace("-", "_"))
        if command_of(self.family) is None:
            raise InputError(
                "fastlinear",
                f"op in {', '.join(names())}",
                repr(self.family),
                "`fastlinear doctor` lists them with their backends.",
            )
        command = self._command
        own = [option.flag for option in command.options]
        if foreign := [flag for flag in self.given if flag not in own]:
            self._refuse(", ".join(foreign), command.remedy)
        if self.layout not in ("nk", "kn"):
            raise InputError(
                "--weight-layout",
                "nk or kn",
                repr(self.layout),
                "nk is nn.Linear's (N, K), kn the (K, N) of a Conv1D.",
            )
        shared = {
            "--activation": self.activation is not None,
            "--no-bias": not self.bias,
            "--weight-layout": self.layout != "nk",
        }
        for flag, remedy in command.without.items():
            if shared[flag]:
                self._refuse(flag, remedy)

    def explain(self, backend: str | None, train: bool) -> Explanation:
        """Which backend the call takes."""
        return self._command.explained(self._request(), backend, train)

    def problems(self, train: bool, captured: bool) -> list[Problem]:
        """Every Problem that decides about the call, in the order in which to tune them."""
        from fastlinear.dispatch.steps import tuning_order

        forward = self._command.forward(self._request(), train)
        return list(tuning_order(replace(forward, captured=captured)))

    @property
    def _command(self) -> Command:
        command = command_of(self.family)
        assert command is not None
        return command

    def _refuse(self, received: str, remedy: str) -> NoReturn:
        own = ", ".join(option.flag for option in self._command.options)
        raise InputError(f"fastlinear: {self.family}", f"its own options ({own})", received, remedy)

    def _request(self) -> Request:
        """The call, which fits the device's memory."""
        from fastlinear.cli.load import usable_device
        from fastlinear.op.command import Request

        command, where = self._command, usable_device(self.device)
        request = Request(
            self.family,
            self.m,
            self.activation or command.activation,
            self.bias,
            self.layout,
            {o.name: self.given.get(o.flag, o.default) for o in command.options},
            FLOAT_DTYPES[self.dtype],
            where,
        )
        taken, there = command.bytes(request), memory_of(where)
        if taken > there:
            raise InputError(
                f"fastlinear: {self.family}",
                f"a call that fits the {there / 2**30:.0f} GiB of {where}",
                f"one whose tensors take {taken / 2**30:.0f} GiB",
                "Ask for fewer rows or features.",
            )
        return request


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
