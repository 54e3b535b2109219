"""What each op's call is made of, for ``fastlinear explain`` and ``fastlinear tune``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor

from fastlinear.core.errors import InputError

if TYPE_CHECKING:
    from fastlinear.core.problem import Problem

FEATURES, LAYERS, WIDTH, HIDDEN, GROUPS, GROUP_FEATURES = 1024, 8, 64, 4, 16, 64
_SHARED = "... k"


@dataclass(frozen=True)
class Options:
    """The options of a call; None where an option was left out."""

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
    hidden: int | None = None
    stacked: str | None = None
    groups: int | None = None
    x_layout: str | None = None
    length: int | None = None


class Kind:
    """One op: its options, its tensors, and what decides about a call of it.

    Attributes:
        options: what besides tokens, dtype, activation, bias and layout a call of it may name: the
            option, and the attribute of ``Options`` that has it.
        remedy: what to do where an option of another op was given.
        activation: of a call that names none.
    """

    options: ClassVar[dict[str, str]]
    remedy: ClassVar[str]
    activation: ClassVar[str] = "none"

    def act(self, call: Options) -> str:
        """The activation, by default the op's."""
        return call.activation or self.activation

    def check(self, call: Options) -> None:
        """Raise InputError for options that do not fit each other."""

    def elements(self, call: Options) -> int:
        """Numbers in x, in the parameters and in the result."""
        raise NotImplementedError

    def tensors(self, call: Options, draw: Draw) -> tuple[Tensor, Any, Any]:
        """Uninitialised x, weight or weights, bias or biases."""
        raise NotImplementedError

    def asked(self, call: Options, given: tuple[Tensor, Any, Any]) -> tuple[tuple[Any, ...], Any]:
        """Positional and keyword arguments of ``fastlinear.explain``."""
        return given, {"activation": self.act(call)}

    def forward(self, call: Options, given: tuple[Tensor, Any, Any], train: bool) -> Problem:
        """The forward Problem."""
        raise NotImplementedError

    def order(self, forward: Problem) -> Sequence[Problem]:
        """Every Problem that decides about the call, in the order in which to tune them."""
        raise NotImplementedError


class Draw:
    """Uninitialised tensors of one dtype on one device, matrices in the layout asked for."""

    def __init__(self, where: torch.device, kind: torch.dtype, layout: str) -> None:
        self._where, self._kind, self._layout = where, kind, layout

    def empty(self, *shape: int) -> Tensor:
        """Of this shape."""
        return torch.empty(shape, dtype=self._kind, device=self._where)

    def matrix(self, k: int, n: int, *groups: int) -> Tensor:
        """A weight (N, K), of groups (G, N, K)."""
        if self._layout == "kn":
            return self.empty(*groups, k, n).mT
        return self.empty(*groups, n, k)


def _product_elements(m: int, sizes: Sequence[int]) -> int:
    return m * (sizes[0] + sizes[-1]) + sum(k * n for k, n in pairwise(sizes))


class _Linear(Kind):
    options: ClassVar = {"--k": "k", "--n": "n"}
    remedy = (
        "These belong to another op: name it first, as in mlp --widths 64,128,10, "
        "gated_mlp --hidden 4096 or grouped_linear --groups 16."
    )

    def _sizes(self, call: Options) -> tuple[int, int]:
        return call.k or FEATURES, call.n or FEATURES

    def elements(self, call: Options) -> int:
        return _product_elements(call.m, self._sizes(call))

    def tensors(self, call: Options, draw: Draw) -> tuple[Tensor, Any, Any]:
        k, n = self._sizes(call)
        return draw.empty(call.m, k), draw.matrix(k, n), draw.empty(n) if call.bias else None

    def forward(self, call: Options, given: tuple[Tensor, Any, Any], train: bool) -> Problem:
        from fastlinear.ops.linear_act import selection
        from fastlinear.ops.linear_act.op import validate

        validate(*given, self.act(call))
        return selection.problem_of(*given, self.act(call), train)

    def order(self, forward: Problem) -> Sequence[Problem]:
        from fastlinear.ops.linear_act import selection

        return selection.tuning_order(forward)


class _Chain(Kind):
    options: ClassVar = {
        "--widths": "widths",
        "--layers": "layers",
        "--width": "width",
        "--final-activation": "final_activation",
    }
    remedy = "Give --widths, or --layers and --width."
    activation = "relu"

    def _sizes(self, call: Options) -> tuple[int, ...]:
        """n_0, n_1, … n_L."""
        if call.widths is None:
            return (call.width or WIDTH,) * ((call.layers or LAYERS) + 1)
        if call.layers is not None or call.width is not None:
            fail(
                "--widths",
                "either --widths or --layers and --width",
                "both",
                "--layers and --width make a chain of equal widths.",
            )
        parts = [part.strip() for part in call.widths.split(",")]
        sizes = tuple(int(part) for part in parts if part.isascii() and part.isdecimal())
        if len(sizes) != len(parts) or len(sizes) < 2 or min(sizes) < 1:
            fail(
                "--widths",
                "two or more whole numbers from 1 on, with commas between them",
                repr(call.widths),
                "For example 64,128,10: two layers, from 64 features to 128 to 10.",
            )
        return sizes

    def elements(self, call: Options) -> int:
        return _product_elements(call.m, self._sizes(call))

    def tensors(self, call: Options, draw: Draw) -> tuple[Tensor, Any, Any]:
        sizes = self._sizes(call)
        weights = [draw.matrix(k, n) for k, n in pairwise(sizes)]
        biases = [draw.empty(n) if call.bias else None for n in sizes[1:]]
        return draw.empty(call.m, sizes[0]), weights, biases

    def asked(self, call: Options, given: tuple[Tensor, Any, Any]) -> tuple[tuple[Any, ...], Any]:
        final = call.final_activation or "none"
        return given, {"activation": self.act(call), "final_activation": final}

    def forward(self, call: Options, given: tuple[Tensor, Any, Any], train: bool) -> Problem:
        from fastlinear.ops.mlp import selection
        from fastlinear.ops.mlp.validation import validate

        names = self.act(call), call.final_activation or "none"
        validate(*given, *names)
        return selection.problem_of(*given, *names, train)

    def order(self, forward: Problem) -> Sequence[Problem]:
        from fastlinear.ops.mlp import selection

        return selection.tuning_order(forward)


class _Diagonal(Kind):
    options: ClassVar = {"--width": "width"}
    remedy = "It has one size besides the rows: --width."

    def check(self, call: Options) -> None:
        if call.layout != "nk":
            fail(
                f"fastlinear: {call.family}",
                "its own options (--width)",
                "--weight-layout",
                "Its weight is a vector, which has no layout: leave the option out.",
            )

    def elements(self, call: Options) -> int:
        return 2 * call.m * (call.width or FEATURES)

    def tensors(self, call: Options, draw: Draw) -> tuple[Tensor, Any, Any]:
        k = call.width or FEATURES
        return draw.empty(call.m, k), draw.empty(k), draw.empty(k) if call.bias else None

    def forward(self, call: Options, given: tuple[Tensor, Any, Any], train: bool) -> Problem:
        from fastlinear.ops.diagonal_linear.op import validate
        from fastlinear.ops.diagonal_linear.problem import problem_of

        validate(*given, self.act(call))
        x, _, bias = given
        return problem_of(x, bias, None, self.act(call), train)

    def order(self, forward: Problem) -> Sequence[Problem]:
        from fastlinear.dispatch.steps import tuning_order

        return tuning_order(forward)


class _Gated(Kind):
    options: ClassVar = {"--k": "k", "--n": "n", "--hidden": "hidden", "--stacked": "stacked"}
    remedy = "Its sizes are --k, --hidden and --n."
    activation = "silu"

    def _sizes(self, call: Options) -> tuple[int, int, int]:
        k = call.k or FEATURES
        return k, call.hidden or HIDDEN * k, call.n or k

    def elements(self, call: Options) -> int:
        sizes = self._sizes(call)
        return _product_elements(call.m, sizes) + sizes[0] * sizes[1]

    def tensors(self, call: Options, draw: Draw) -> tuple[Tensor, Any, Any]:
        from fastlinear.ops.gated_mlp.stacking import Biases, Weights

        k, h, n = self._sizes(call)
        apart = call.stacked is None
        gate, up = draw.matrix(k, h if apart else 2 * h), draw.matrix(k, h) if apart else None
        weights = Weights(gate, up, draw.matrix(h, n))
        held = [None if w is None or not call.bias else draw.empty(w.shape[0]) for w in weights]
        return draw.empty(call.m, k), weights, Biases(*held)

    def asked(self, call: Options, given: tuple[Tensor, Any, Any]) -> tuple[tuple[Any, ...], Any]:
        x, weights, biases = given
        more = {"up_weight": weights[1], "up_bias": biases[1]}
        more |= {"down_weight": weights[2], "down_bias": biases[2], "stacked": call.stacked}
        return (x, weights[0], biases[0]), {"activation": self.act(call), **more}

    def forward(self, call: Options, given: tuple[Tensor, Any, Any], train: bool) -> Problem:
        from fastlinear.ops.gated_mlp.selection import problem_of
        from fastlinear.ops.gated_mlp.validation import validate

        order = "apart" if call.stacked is None else call.stacked
        validate(call.family, *given, self.act(call), order, None)
        return problem_of(*given, self.act(call), order, None, train)

    def order(self, forward: Problem) -> Sequence[Problem]:
        from fastlinear.ops.gated_mlp import selection

        return selection.tuning_order(forward)


class _Grouped(Kind):
    options: ClassVar = {
        "--k": "k",
        "--n": "n",
        "--groups": "groups",
        "--x-layout": "x_layout",
        "--length": "length",
    }
    remedy = "Its sizes are --groups, and --k and --n of each group."

    def _sizes(self, call: Options) -> tuple[int, int, int]:
        k = call.k or GROUP_FEATURES
        return call.groups or GROUPS, k, call.n or k

    def _layout(self, call: Options) -> str:
        return call.x_layout or "... (g k)"

    def check(self, call: Options) -> None:
        from fastlinear.ops.grouped_linear.layout import LAYOUTS, NAMES, SHARED

        layout, length = self._layout(call), call.length
        if layout not in NAMES:
            fail(
                "--x-layout",
                ", ".join(map(repr, NAMES)),
                repr(layout),
                "It names x's dimensions: g groups, k features, b batch, ... any others.",
            )
        channels = layout != SHARED and LAYOUTS[layout].order == "channels"
        if length is not None and (not channels or call.m % length):
            fail(
                "--length",
                "a divisor of --m, in layouts that begin with b",
                f"{length} of {call.m} tokens as {layout!r}",
                "x is (B, G·K, L) with B·L = --m: leave --length out for one long sequence.",
            )

    def elements(self, call: Options) -> int:
        groups, k, n = self._sizes(call)
        return groups * _product_elements(call.m, (k, n))

    def tensors(self, call: Options, draw: Draw) -> tuple[Tensor, Any, Any]:
        groups, k, n = self._sizes(call)
        m, length = call.m, call.length or call.m
        shape = {
            "... (g k)": (m, groups * k),
            "... g k": (m, groups, k),
            "g ... k": (groups, m, k),
            "b (g k) ...": (m // length, groups * k, length),
            "b g k ...": (m // length, groups, k, length),
            _SHARED: (m, k),
        }[self._layout(call)]
        bias = draw.empty(groups, n) if call.bias else None
        return draw.empty(*shape), draw.matrix(k, n, groups), bias

    def asked(self, call: Options, given: tuple[Tensor, Any, Any]) -> tuple[tuple[Any, ...], Any]:
        return given, {"activation": self.act(call), "layout": self._layout(call)}

    def forward(self, call: Options, given: tuple[Tensor, Any, Any], train: bool) -> Problem:
        from fastlinear.ops.grouped_linear import layout as layouts
        from fastlinear.ops.grouped_linear.selection import problem_of
        from fastlinear.ops.grouped_linear.validation import validate

        layout = self._layout(call)
        groups, k, n = self._sizes(call)
        if layout == layouts.SHARED:
            fail(
                "--x-layout",
                "a layout in which every group has an input of its own",
                f"{layout!r}, one input for all: one linear layer of all groups' features",
                f"Tune that: linear_act --k {k} --n {groups * n}.",
            )
        x, weight, bias = given
        validate(x, weight, bias, self.act(call), layout)
        rows, order = layouts.blocks(x, layout, groups, k), layouts.order_of(layout, x.shape)
        return problem_of(rows, weight, bias, self.act(call), order, train)

    def order(self, forward: Problem) -> Sequence[Problem]:
        from fastlinear.ops.grouped_linear import selection

        return selection.tuning_order(forward)


class _Ragged(Kind):
    options: ClassVar = {"--k": "k", "--n": "n", "--groups": "groups"}
    remedy = "Its sizes are --m rows of all groups, --groups, and --k and --n of each group."

    def _sizes(self, call: Options) -> tuple[int, int, int]:
        k = call.k or GROUP_FEATURES
        return call.groups or GROUPS, k, call.n or k

    def elements(self, call: Options) -> int:
        groups, k, n = self._sizes(call)
        return call.m * (k + n) + groups * k * n

    def tensors(self, call: Options, draw: Draw) -> tuple[Tensor, Any, Any]:
        groups, k, n = self._sizes(call)
        bias = draw.empty(groups, n) if call.bias else None
        return draw.empty(call.m, k), draw.matrix(k, n, groups), bias

    def asked(self, call: Options, given: tuple[Tensor, Any, Any]) -> tuple[tuple[Any, ...], Any]:
        x, weight, _ = given
        sizes = torch.full((len(weight),), call.m // len(weight), device=x.device)
        return given, {"activation": self.act(call), "group_sizes": sizes}

    def forward(self, call: Options, given: tuple[Tensor, Any, Any], train: bool) -> Problem:
        from fastlinear.ops.common.activations import activation
        from fastlinear.ops.ragged_linear.problem import problem_of

        return problem_of(*given, activation(self.act(call), call.family).name, train)

    def order(self, forward: Problem) -> Sequence[Problem]:
        return (forward,)


class _Unequal(Kind):
    options: ClassVar = {"--k": "k", "--n": "n", "--groups": "groups"}
    remedy = "Its sizes are --m rows of each group, --groups, and --k and --n of the largest group."

    def _sizes(self, call: Options) -> list[tuple[int, int]]:
        """(K, N) of each group, in eight steps from an eighth of the largest to the largest."""
        k = call.k or GROUP_FEATURES
        n = call.n or k
        parts = [g % 8 + 1 for g in range(call.groups or GROUPS)]
        return [(max(1, k * part // 8), max(1, n * part // 8)) for part in parts]

    def elements(self, call: Options) -> int:
        return sum(_product_elements(call.m, size) for size in self._sizes(call))

    def tensors(self, call: Options, draw: Draw) -> tuple[Any, Any, Any]:
        sizes = self._sizes(call)
        biases = [draw.empty(n) for _, n in sizes] if call.bias else None
        xs = [draw.empty(call.m, k) for k, _ in sizes]
        return xs, [draw.matrix(k, n) for k, n in sizes], biases

    def forward(self, call: Options, given: tuple[Any, Any, Any], train: bool) -> Problem:
        from fastlinear.ops.common.activations import activation
        from fastlinear.ops.unequal_linear.problem import problem_of

        return problem_of(*given, activation(self.act(call), call.family).name, train)

    def order(self, forward: Problem) -> Sequence[Problem]:
        return (forward,)


KINDS: dict[str, Kind] = {
    "linear_act": _Linear(),
    "mlp": _Chain(),
    "diagonal_linear": _Diagonal(),
    "gated_mlp": _Gated(),
    "grouped_linear": _Grouped(),
    "ragged_linear": _Ragged(),
    "unequal_linear": _Unequal(),
}
FAMILIES = tuple(KINDS)


def fail(function: str, expected: str, received: str, remedy: str) -> NoReturn:
    """Raise InputError."""
    raise InputError(function, expected, received, remedy)
