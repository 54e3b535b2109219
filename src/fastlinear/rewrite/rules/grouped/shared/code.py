"""What the code of a forward does between the calls of linears that share results."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Sequence
from types import FunctionType
from typing import Any

from torch import nn

from fastlinear.core.global_names import names_of
from fastlinear.profile.effects import class_forward, functions_of

_READS = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_UNSEEN = frozenset({"data", "numpy"})  # through which tensors are written without a count
_STORES = frozenset({"STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"})


def why_not_shared(module: nn.Module) -> str | None:
    """Why its linears must not share results whatever a run shows, or None."""
    forward = _forward(module)
    if forward is None:
        return "its forward is no Python function"
    for function in functions_of(module, forward):
        named = sorted(_UNSEEN.intersection(names_of(function.__code__)))
        if named:
            return f"{function.__qualname__} names {named[0]}, through which writes are not seen"
    return None


def writes_nothing_between(module: nn.Module, names: Sequence[str]) -> bool:
    """Whether the forward's own code writes nothing in place between the calls of these linears
    inside the module, as far as it shows; what it calls there is not looked at."""
    forward = _forward(module)
    if forward is None:
        return False
    firsts = {name.partition(".")[0] for name in names}
    code = list(dis.get_instructions(forward.__code__))
    calls = [i for i, step in enumerate(code) if step.opname in _READS and step.argval in firsts]
    if {code[i].argval for i in calls} != firsts:  # some are called by other code
        return False
    first, last = calls[0], calls[-1]
    for step in code[last:]:
        if "JUMP_BACKWARD" in step.opname and step.argval <= code[last].offset:
            return False  # a loop: what stands before them may run between them
    inner = any(inspect.iscode(step.argval) for step in code[first:last])
    constants = forward.__code__.co_consts
    return not inner and not any(_writes(step, constants) for step in code[first:last])


def _forward(module: nn.Module) -> FunctionType | None:
    forward: Any = inspect.unwrap(class_forward(module))
    return forward if isinstance(forward, FunctionType) else None


def _writes(step: dis.Instruction, constants: Sequence[Any]) -> bool:
    if step.opname in _STORES:
        return True
    if step.opname == "BINARY_OP":
        return step.argrepr.endswith("=")
    name = constants[step.arg or 0] if step.opname == "KW_NAMES" else step.argval
    if step.opname in _READS:
        return str(name).endswith("_") and not str(name).endswith("__")
    return isinstance(name, tuple) and "out" in name  # names of arguments
