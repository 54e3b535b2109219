"""Products with a weight per group amid other work: ``bmm``, ``baddbmm`` and ``einsum`` with a
parameter of the module that calls them, as findings.

They are seen while the model runs. Nothing rewrites them: where their results go is not followed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.core.function_mode import KnowingMode
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.core.wrappers import PLAIN
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped.op import grouped_linear
from fastlinear.families.grouped.selection import problem_of
from fastlinear.rewrite.fusion import Fusion
from fastlinear.rewrite.in_code import in_code
from fastlinear.rewrite.rules.grouped.advice import advised, cost_of, report
from fastlinear.rewrite.session import Session

WHY = "what its forward does with the result is not followed"
_BMM = (torch.bmm, Tensor.bmm)
_BADDBMM = (torch.baddbmm, Tensor.baddbmm)


@dataclass
class Product:
    """Calls of one product with a parameter.

    Attributes:
        fqn: of the parameter.
        parameter: it.
        run: the call as it was made, on what it was given.
        x: that.
        bias: what it adds, (G, N), or None.
        turned: whether the parameter is (G, K, N).
        layout: of x.
        name: of the function.
        grad: whether the gradient of x is wanted.
        calls: how many a step makes.
    """

    fqn: str
    parameter: nn.Parameter
    run: Callable[[Tensor], Tensor]
    x: Tensor
    bias: Tensor | None
    turned: bool
    layout: str
    name: str
    grad: bool
    calls: int = 1


class Products(KnowingMode):
    """While on, sees products with three-dimensional parameters of the model; the first call of
    each parameter is kept with its input.

    Args:
        model: whose parameters count.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        plain = ((n, p) for n, p in model.named_parameters() if type(p) in PLAIN)
        cubes = ((n, p) for n, p in plain if p.dim() == 3 and p.numel())
        self._known = {p.data_ptr(): (name, p) for name, p in cubes if p.device.type != "meta"}
        self.found: dict[str, Product] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not kwargs and (func in _BMM or func in _BADDBMM or func is torch.einsum):
            self._look(func, args)
        return func(*args, **(kwargs or {}))

    def _look(self, func: Any, args: tuple[Any, ...]) -> None:
        equation, bias, given = None, None, args
        if func is torch.einsum:
            if len(args) == 2 and isinstance(args[1], list | tuple):
                given = (args[0], *args[1])
            equation, *given = given  # type: ignore[assignment]
        elif func in _BADDBMM:
            bias, *given = args  # type: ignore[assignment]
        if len(given) != 2 or not all(type(t) in (Tensor, nn.Parameter) for t in given):
            return
        x, weight = given
        if weight.dim() != 3 or weight.data_ptr() not in self._known or not x.numel():
            return
        fqn, parameter = self._known[weight.data_ptr()]
        if fqn in self.found:
            self.found[fqn].calls += 1
            return
        read = _read(weight, parameter, equation)
        if read is None or x.dtype is not weight.dtype or _autocast(x):
            return
        turned, layout = read
        n = parameter.shape[2 if turned else 1]
        if bias is not None and bias.shape != (len(parameter), 1, n):
            return
        grad, x = x.requires_grad, x.detach().clone()

        def run(x: Tensor) -> Tensor:
            if equation is not None:
                return torch.einsum(equation, x, parameter)
            w = parameter if turned else parameter.transpose(1, 2)
            y: Tensor = torch.bmm(x, w) if bias is None else torch.baddbmm(bias, x, w)
            return y

        flat = None if bias is None else bias.flatten(1)
        name = getattr(func, "__name__", "product")
        self.found[fqn] = Product(fqn, parameter, run, x, flat, turned, layout, name, grad)


def _autocast(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)


def _read(weight: Tensor, parameter: Tensor, equation: str | None) -> tuple[bool, str] | None:
    """Whether the parameter is (G, K, N), and the layout of x; None for what is no such product."""
    straight = weight.shape == parameter.shape and weight.stride() == parameter.stride()
    if equation is None:
        mirrored = parameter.transpose(1, 2)
        if straight:
            return True, "g ... k"
        same = weight.shape == mirrored.shape and weight.stride() == mirrored.stride()
        return (False, "g ... k") if same else None
    sides = equation.replace(" ", "").split("->")
    operands = sides[0].split(",")
    if not straight or len(sides) != 2 or len(operands) != 2 or "." in equation:
        return None
    (x, w), y = operands, sides[1]
    if len(w) != 3 or any(len(set(s)) != len(s) for s in (x, w, y)):
        return None
    g = w[0]
    for turned, k, n in ((True, w[1], w[2]), (False, w[2], w[1])):
        rest = "".join(c for c in x if c not in (g, k))
        for layout, before, after in (
            ("... g k", f"{rest}{g}{k}", f"{rest}{g}{n}"),
            ("g ... k", f"{g}{rest}{k}", f"{g}{rest}{n}"),
        ):
            if (x, y) == (before, after) and n not in x:
                return turned, layout
    return None


def of_product(session: Session, product: Product) -> Fusion | None:
    """What there is to measure of it."""
    p, x, turned = product.parameter, product.x, product.turned
    if x.dtype not in DTYPE_NAMES:
        return None

    def weight() -> Tensor:
        return p.transpose(1, 2) if turned else p

    def before(x: Tensor) -> tuple[Tensor, ...]:
        return (product.run(x),)

    def after(x: Tensor) -> tuple[Tensor, ...]:
        return (grouped_linear(x, weight(), product.bias, layout=product.layout),)

    groups, n, k = weight().shape
    tokens = x.numel() // (groups * k)
    module, _, _ = product.fqn.rpartition(".")
    view = f"{in_code(session.model, product.fqn)}{'.transpose(1, 2)' if turned else ''}"
    held = "" if product.bias is None else f", bias of shape ({groups}, {n})"
    told = report(
        session,
        kind="product",
        title=f"{groups} groups of {k} to {n} features",
        words=f"{product.name} multiplies {groups} groups by {product.fqn!r} amid other work",
        advice=f"fl.grouped_linear(x, {view}{held}, layout={product.layout!r})",
        linears=(product.fqn,),
        cost=cost_of(tokens, x.numel(), groups * n * k, groups * n, x.element_size()),
    )
    rows = layouts.blocks(x, product.layout, groups, k)
    order = layouts.order_of(product.layout, x.shape)
    return advised(
        *(session, told),
        fqn=module,
        x=x,
        calls=product.calls,
        input_grad=product.grad,
        before=before,
        after=after,
        tensors=[p],
        problem=problem_of(rows, weight(), product.bias, "none", order, session.train),
        alike=(product.name, product.layout, turned),
    )
