"""Modules whose class defines ``__call__`` itself and leaves ``nn.Module``'s out.

No hook fires around such a module, so no profile sees it run, and no ``forward`` put on it would be
called: there is nothing to rewrite until it is renamed.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable
from types import FunctionType
from typing import Any

from torch import nn

from fastlinear.core.global_names import names_of
from fastlinear.profile.records import Finding

CODE = "own_call"
_ON = frozenset({"__call__", "_call_impl", "_wrapped_call_impl"})  # what leads on to nn.Module's
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_HOMES = ("torch", "fastlinear")


def bypasses(module: nn.Module) -> bool:
    """Whether calling it is not calling ``nn.Module.__call__``, as far as its code shows."""
    own: Any = type(module).__call__
    if own is nn.Module.__call__:
        return False
    own = inspect.unwrap(own)
    if str(getattr(own, "__module__", "")).partition(".")[0] in _HOMES:
        return False
    return not isinstance(own, FunctionType) or not _ON & set(names_of(own.__code__))


def bypassing_child(parent: nn.Module, names: Iterable[str]) -> str | None:
    """The class of a module that ``bypasses``, among the parent's of these names and those that
    containers of these names hold; of all its children where it is a container. Or None."""
    children = parent._modules
    waiting = (
        [*children] if isinstance(parent, _CONTAINERS) else [n for n in names if n in children]
    )
    held = [m for n in waiting if (m := children[n]) is not None]
    held += [inner for m in held if isinstance(m, _CONTAINERS) for inner in m.children()]
    return next((type(m).__qualname__ for m in held if bypasses(m)), None)


def findings(model: nn.Module, ran: Container[nn.Module]) -> list[Finding]:
    """One for each module with parameters that ``bypasses``; ``ran``: those seen to run."""
    return [
        _finding(fqn, module)
        for fqn, module in model.named_modules()
        if bypasses(module) and module not in ran and any(True for _ in module.parameters())
    ]


def _finding(fqn: str, module: nn.Module) -> Finding:
    name = type(module).__qualname__
    return Finding.untimed(
        code=CODE,
        fqn=fqn,
        title=f"{name} defines __call__ itself",
        message=(
            f"{name}.__call__ does not go through nn.Module's, so no hook sees it run and no other "
            f"forward can take its place: not measured, and never rewritten. Rename {name}.__call__"
            " to forward."
        ),
        details={
            "advice": f"a {name} whose __call__ is named forward",
            "not_measured": "its class defines __call__ itself",
        },
    )
