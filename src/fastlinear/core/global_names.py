"""Which names a function's code looks up among its globals."""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType

_GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})


GENERATOR = "<genexpr>"
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", GENERATOR})


def own_codes(code: CodeType) -> tuple[CodeType, ...]:
    """A function's code and that of the comprehensions and generator expressions in it. Python 3.12
    and later have the former in the function's own code."""
    inner = (c for c in code.co_consts if isinstance(c, CodeType) and c.co_name in _COMPREHENSIONS)
    return (code, *(found for c in inner for found in own_codes(c)))


def names_of(code: CodeType) -> tuple[str, ...]:
    """``co_names`` of a function's code and of the comprehensions in it, each once."""
    return tuple(dict.fromkeys(name for own in own_codes(code) for name in own.co_names))


@lru_cache(maxsize=1024)
def global_names(code: CodeType) -> tuple[str, ...]:
    """The names it reads as globals, in comprehensions too, each once. ``code.co_names`` holds
    those of attributes as well, and a global may have the name of an attribute.

    >>> import torch
    >>> global_names((lambda model, x: torch.relu(model.fc1(x))).__code__)
    ('torch',)
    """
    steps = (step for own in own_codes(code) for step in dis.get_instructions(own))
    return tuple(dict.fromkeys(step.argval for step in steps if step.opname in _GLOBAL_OPS))
