"""Which names a function's code looks up among its globals."""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType

_GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})


@lru_cache(maxsize=1024)
def global_names(code: CodeType) -> tuple[str, ...]:
    """The names it reads as globals, each once. ``code.co_names`` holds those of attributes too,
    and a global may have the name of an attribute.

    >>> import torch
    >>> global_names((lambda model, x: torch.relu(model.fc1(x))).__code__)
    ('torch',)
    """
    steps = dis.get_instructions(code)
    return tuple(dict.fromkeys(step.argval for step in steps if step.opname in _GLOBAL_OPS))
