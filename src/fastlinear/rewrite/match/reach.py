"""Whether a model's own code reaches into a Sequential instead of only calling it.

A linear that computes its activation as well is right only while the activation module runs right
after it. ``self.net(x)`` keeps to that, whatever path a call takes; ``self.net[0](x)``, a loop over
``self.net`` or a name for it may run the linear alone, perhaps on a path no run has shown.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType, FunctionType

from torch import nn

_CONSTRUCTION = ("init", "reset")  # in the name of a method that only sets values


def reached_into(model: nn.Module, holder: nn.Module) -> str | None:
    """The first method that does more with ``holder`` than call it, as ``Class.method``, or None.

    Looked at are the methods of the modules that hold it directly, but for those that construct or
    initialise.
    """
    for module in model.modules():
        names = {name for name, child in module._modules.items() if child is holder}
        for method in _methods(type(module)) if names else ():
            if any(c in method.__name__ for c in _CONSTRUCTION):
                continue
            if any(_reads(code, names) for code in _codes(method.__code__)):
                return method.__qualname__
    return None


def _methods(kind: type) -> Iterator[FunctionType]:
    for base in kind.__mro__:
        if base.__module__.split(".")[0] == "torch":
            continue
        for value in vars(base).values():
            function = value.fget if isinstance(value, property) else value
            function = getattr(function, "__func__", function)
            function = getattr(function, "__wrapped__", function)
            if isinstance(function, FunctionType):
                yield function


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _reads(code: CodeType, names: set[str]) -> bool:
    """Whether an attribute of one of these names is read other than to be called at once."""
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_ATTR" and step.argval in names:
            called = "NULL" in step.argrepr  # Python 3.12 and later: loaded as a method
            if not called:
                return True
    return False
