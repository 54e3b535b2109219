"""Python state that a model's step writes: a replayed graph runs no Python and would lose it."""

from __future__ import annotations

import dis
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from fastlinear.profile.effects import class_forward, functions_of, writes

LOOKED_FOR = "in the run that shows what a step writes"
_REGISTRIES = frozenset(vars(nn.Module()))
_WRITES = frozenset({"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL"})


@dataclass(frozen=True)
class Written:
    """What one step writes to a module besides tensors.

    Attributes:
        reason: one sentence.
        names: the attributes and globals written.
    """

    reason: str
    names: frozenset[str]


def why_not_replayed(model: nn.Module, step: Callable[[], object]) -> str | None:
    """What one step writes to the modules besides tensors, or None; see ``written``."""
    for module in model.modules():
        found = writes(module)
        if found is not None:
            return f"{found}, which a replay would not."
    return next((w.reason for w in written(model, step).values()), None)


def written(model: nn.Module, step: Callable[[], object]) -> dict[nn.Module, Written]:
    """The modules that one step writes to besides tensors.

    The code of every module is looked at, and one step is run to see whether a list, dict, set or
    deque among their attributes is another afterwards.
    """
    found: dict[nn.Module, Written] = {}
    for module in model.modules():
        reason = writes(module)
        if reason is not None:
            found[module] = Written(_sentence(reason), frozenset(_names_written(module)))
    before = [(m, name, held, _content(held)) for m, name, held in _containers(model)]
    step()
    for module, name, held, content in before:
        now = _content(held)
        if len(now) == len(content) and all(a is b for a, b in zip(now, content, strict=True)):
            continue
        reason = _sentence(f"A step changes {type(module).__qualname__}.{name}")
        known = found.get(module, Written(reason, frozenset()))
        found[module] = Written(known.reason, known.names | {name})
    return found


def why_not_replayed_alone(part: nn.Module, found: Mapping[nn.Module, Written]) -> str | None:
    """Why a part must not be replayed where the model's step writes what ``written`` found, or
    None: it is written inside the part, or the part's code names something written elsewhere."""
    inside = set(part.modules())
    for module in inside & found.keys():
        return found[module].reason
    elsewhere = {name for w in found.values() for name in w.names}
    for module in part.modules():
        for function in _functions(module):
            for code in _codes(function.__code__):
                read = sorted(elsewhere.intersection(code.co_names))
                if read:
                    return (
                        f"{function.__qualname__} reads {read[0]}, which the model writes in a "
                        "step: a replay would not see it change."
                    )
    return None


def _sentence(what: str) -> str:
    return f"{what}, which a replay would not."


def _names_written(module: nn.Module) -> Iterator[str]:
    for function in _functions(module):
        for code in _codes(function.__code__):
            for step in dis.get_instructions(code):
                if step.opname in _WRITES:
                    yield step.argval


def _functions(module: nn.Module) -> Sequence[FunctionType]:
    """The forward of its class and what that calls; none for torch's own modules."""
    forward: Any = inspect.unwrap(class_forward(module))
    if not isinstance(forward, FunctionType) or str(forward.__module__).split(".")[0] == "torch":
        return []
    return functions_of(module, forward)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _containers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in _REGISTRIES and isinstance(value, list | dict | set | deque):
                yield module, name, value


def _content(held: Any) -> list[Any]:
    """The objects in a container, keys included."""
    return [*held.keys(), *held.values()] if isinstance(held, dict) else list(held)
