"""The only way to torch.library: every op fastlinear registers goes through here.

Registered ops serve ``torch.compile`` and export. Eager calls do not pass here, because a
registered op costs microseconds a call that small layers cannot spare.

Every op has a last argument ``revision``. PyTorch keeps compiled graphs on disk by what they call,
not by what the formula of a call was: without it a graph of another version of fastlinear would be
taken for one of this.

An op is declared first and gets its functions later. An exported program names ops of families that
the process has not imported, so ``import fastlinear`` declares all of them
(``families.declared``). The first call of a declared op imports its family, whose ``register_op``
fills the functions in.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from fastlinear.core.errors import UnsupportedError

_LIBRARY = torch.library.Library("fastlinear", "DEF")
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_dispatch_modes = torch._C._len_torch_dispatch_stack


@dataclass(eq=False)
class _Op:
    """A registered op, with the functions that its kernels call.

    Attributes:
        schema: arguments and returns, without the revision.
        count: how many arguments that are; its functions take these.
        load: imports the family, which registers the functions.
        functions: ``"implementation"``, ``"fake"`` and others by name, once they are registered.
    """

    name: str
    schema: str
    count: int
    load: Callable[[], object]
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Callable[..., Any]:
        if not self.functions:
            with _disable_current_modes():  # of a trace, which would make its tensors fake
                self.load()
        return self.functions[name]


_OPS: dict[str, _Op] = {}
REVISION = ""


def set_revision(version: str) -> None:
    """Tell the calls traced from here on from those of another version or other schemas."""
    global REVISION
    schemas = "".join(op.name + op.schema for op in _OPS.values())
    REVISION = f"{version}-{zlib.crc32(schemas.encode()):08x}"


def call(name: str, *arguments: Any) -> Any:
    """Call a registered op as this version of fastlinear means it."""
    return getattr(torch.ops.fastlinear, name)(*arguments, REVISION)


def declare_family(
    name: str, operands: str, options: str, load: Callable[[], object], *, saves: int | None
) -> None:
    """Declare the two ops of a family, which ``op.registered`` gives their functions.

    Args:
        name: of the family.
        operands, options: parameters of the forward, as in a schema; all tensors come first.
        load: imports the family.
        saves: the most tensors that the forward saves; None where their number is unbounded.
    """
    results = ("Tensor", *(["Tensor[]"] if saves is None else ["Tensor"] * saves))
    found = results[0] if len(results) == 1 else f"({', '.join(results)})"
    given = f"{operands}, {options}"
    schema = f"({given}, bool needs_grad, str backend) -> {found}"
    _add_formula(_define(name, schema, load))
    schema = f"(Tensor dy, Tensor[] saved, {given}, bool[] needs, str backend) -> Tensor[]"
    _define(f"{name}_backward", schema, load)


def declare_eager_op(name: str, schema: str, load: Callable[[], object]) -> None:
    """Declare an op that its family registers by ``register_eager_op``; no result of it may share
    memory with an argument."""
    _add_before_autograd(_define(name, schema, load))


def register_op(
    name: str,
    *,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> None:
    """Give a declared op its functions.

    Args:
        name: op name.
        implementation: the eager implementation for both devices.
        fake: shapes, dtypes and strides of the results, without computing.
        backward, setup_context: the autograd formula, as ``torch.library.register_autograd`` takes.
            Its gradients cannot be differentiated: that raises UnsupportedError.
    """
    functions = {"implementation": implementation, "fake": fake}
    if backward is not None and setup_context is not None:
        functions |= {"backward": _once(name, backward), "setup_context": setup_context}
    _OPS[name].functions = functions


def register_eager_op(
    name: str,
    *,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    differentiable: Callable[..., Any],
) -> None:
    """Give an op that does what an eager function of ours does its functions.

    A compiled graph that needs no gradients calls it: no formula stands before the function, which
    records its own where the graph, exported, is run with gradients after all. Where such a graph
    is traced once more, nothing can be recorded inside the function: a registered op with a
    formula takes its place.

    Args:
        name: op name.
        implementation: the function, for both devices, with or without gradients.
        fake: shapes, dtypes and strides of the results, without computing.
        differentiable: the same through a registered op that has an autograd formula.
    """
    functions = {"implementation": implementation, "fake": fake, "differentiable": differentiable}
    _OPS[name].functions = functions


def _define(name: str, schema: str, load: Callable[[], object]) -> _Op:
    arguments, returns = schema.split(") -> ")
    op = _OPS[name] = _Op(name, schema, arguments.count(",") + 1, load)
    _LIBRARY.define(f'{name}{arguments}, str revision="") -> {returns}')

    def implementation(*args: Any) -> Any:
        return op["implementation"](*args[: op.count])

    def fake(*args: Any) -> Any:
        return op["fake"](*args[: op.count])

    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, implementation, key)
    torch.library.register_fake(f"fastlinear::{name}", fake, lib=_LIBRARY)
    return op


def _add_formula(op: _Op) -> None:
    def backward(ctx: Any, *grads: Any) -> Any:
        found = op["backward"](ctx, *grads)
        return *found, *[None] * (len(ctx.needs_input_grad) - len(found))  # revision, if given

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        op["setup_context"](ctx, inputs[: op.count], output)

    torch.library.register_autograd(
        f"fastlinear::{op.name}", backward, setup_context=setup_context, lib=_LIBRARY
    )


def _add_before_autograd(op: _Op) -> None:
    registered = getattr(torch.ops.fastlinear, op.name).default

    def before_autograd(keys: Any, *args: Any) -> Any:
        if not _dispatch_modes() and type(args[0]) in _PLAIN:
            return op["implementation"](*args[: op.count])
        if torch.is_grad_enabled() and _needs_grad(args):
            return op["differentiable"](*args[: op.count])
        with torch._C._AutoDispatchBelowAutograd():
            return registered.redispatch(keys & torch._C._after_autograd_keyset, *args)

    for key in ("AutogradCPU", "AutogradCUDA"):
        _LIBRARY.impl(op.name, before_autograd, key, with_keyset=True)


def _once(name: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    """``backward``, whose gradients raise where they are differentiated.

    Without this they would carry what autograd sees inside the implementation of another op, which
    is less than all: a saved pre-activation has lost its tie to x, a kernel has none.
    """

    def formula(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            found, structure = tree_flatten(backward(ctx, *grads))
        tensors = [t for t in found if t is not None]
        read = [t for t in tree_flatten((ctx.saved_tensors, grads))[0] if t is not None]
        marked = iter(_Once.apply(name, len(tensors), *tensors, *read))  # type: ignore[no-untyped-call]
        return tree_unflatten([t if t is None else next(marked) for t in found], structure)

    return formula


class _Once(torch.autograd.Function):
    """Gradients as they are, tied to all they were computed from by a node that raises."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: torch.Tensor) -> tuple[Any, ...]:
        ctx.name = name
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(
            ctx.name,
            "to be differentiated once where it is a registered op, as in a compiled function",
            "a derivative of its gradients (create_graph=True)",
            "Call it outside the compiled function: there it is differentiable to any order.",
        )


def _needs_grad(args: Sequence[Any]) -> bool:
    """Whether a tensor among the arguments, or in a list among them, needs a gradient."""
    return any(
        _needs_grad(a) if isinstance(a, (list, tuple)) else getattr(a, "requires_grad", False)
        for a in args
    )
