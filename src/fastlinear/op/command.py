"""Calls that options describe: what ``fastlinear explain`` and ``fastlinear tune`` take."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.dispatch.explain import Explanation
from fastlinear.op.front import Front
from fastlinear.op.spec import Arguments, leaves

FEATURES, GROUPS, GROUP_FEATURES = 1024, 16, 64
"""Sizes of a call that names none."""


@dataclass(frozen=True)
class Option:
    """An option of a family's calls.

    Attributes:
        flag: what is written on the command line, for example ``"--k"``.
        help: one sentence.
        default: its value where it is left out.
        kind: int, for sizes from 1 on, or str.
        metavar: what stands for its value in the help.
    """

    flag: str
    help: str
    default: Any = None
    kind: type = int
    metavar: str | None = None

    @property
    def name(self) -> str:
        """The key of its value."""
        return self.flag.lstrip("-").replace("-", "_")


GROUP_OPTIONS = (
    Option("--k", f"In features of a group; {GROUP_FEATURES} if left out.", GROUP_FEATURES),
    Option("--n", "Out features of a group; as --k if left out."),
    Option("--groups", f"How many linear layers; {GROUPS} if left out.", GROUPS),
)
"""Of families with many linear layers in a call."""


@dataclass(frozen=True)
class Request:
    """A call as its options describe it, and the uninitialised tensors it is made of.

    Attributes:
        family: the op's name.
        m: tokens.
        activation: the family's default where none was given.
        bias: whether the call has biases.
        layout: of matrices: ``"nk"`` or ``"kn"``.
        options: the family's own, by name.
    """

    family: str
    m: int
    activation: str
    bias: bool
    layout: str
    options: Mapping[str, Any]
    dtype: torch.dtype
    device: torch.device

    def __getitem__(self, name: str) -> Any:
        """The value of one of the family's options."""
        return self.options[name]

    def empty(self, *shape: int) -> Tensor:
        """A tensor of this shape."""
        if self.device.type == "meta":  # no storage, whose size could overflow
            return torch.empty((), dtype=self.dtype, device=self.device).expand(shape)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def matrix(self, k: int, n: int, *groups: int) -> Tensor:
        """A weight (N, K), of groups (G, N, K)."""
        return self.empty(*groups, k, n).mT if self.layout == "kn" else self.empty(*groups, n, k)

    def vector(self, *shape: int) -> Tensor | None:
        """A bias, or None in a call without."""
        return self.empty(*shape) if self.bias else None


@dataclass(frozen=True)
class Command:
    """How options describe the calls of a family.

    Attributes:
        front: the family's front end.
        options: its own, beside those that all families have.
        about: what the op is, in a few words.
        remedy: what to do where an option of another family was given.
        arguments: the call without a forced backend.
        activation: of a call that names none.
        without: options of all families that it has no use for → what to say where one is given.
        explain: the public function, where that says more than the front end.
        check: raises InputError for what can be explained but not tuned.
    """

    front: Front
    options: tuple[Option, ...]
    about: str
    remedy: str
    arguments: Callable[[Request], Arguments]
    activation: str = "none"
    without: Mapping[str, str] = field(default_factory=dict)
    explain: Callable[..., Explanation] | None = None
    check: Callable[[Arguments], None] | None = None

    def explained(self, request: Request, backend: str | None, train: bool) -> Explanation:
        """Which backend the call takes."""
        call = (*self.arguments(request), backend)
        if self.explain is None:
            return self.front.explain(call, train)
        _, positional, keywords = self.front.spec.called(call)
        return self.explain(*positional, **keywords, needs_grad=train)

    def forward(self, request: Request, train: bool) -> Problem:
        """The forward Problem of the call."""
        call = (*self.arguments(request), None)
        if self.check is not None:
            self.check(call)
        self.front.spec.validate(*call)
        return self.front.spec.problem(call, train)

    def bytes(self, request: Request) -> int:
        """What the call's tensors take; none is made."""
        try:
            call = self.arguments(replace(request, device=torch.device("meta")))
        except (RuntimeError, TypeError, OverflowError):  # a size, or all, beyond 64 bits
            return sys.maxsize
        return sum(math.prod(t.shape) * t.itemsize for t in leaves(call) if t is not None)
