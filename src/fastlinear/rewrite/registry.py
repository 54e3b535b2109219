"""The rewrite rules that are folders of their own: every package in ``rules/`` is one.

A rule's package has ``FAMILY``, the family that settings name to allow it, ``REWRITES``, and
``find(session) -> list[Fusion]``. Nothing else registers it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastlinear.rewrite import rules
from fastlinear.rewrite.fusion import Fusion
from fastlinear.rewrite.session import Session


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: its folder's.
        family: the family that settings name to allow it.
        find: what it finds in a model.
        rewrites: whether ``optimize_`` puts what it finds in place; else it is a finding.
    """

    name: str
    family: str
    find: Callable[[Session], list[Fusion]]
    rewrites: bool


def _rules() -> tuple[Rule, ...]:
    found = []
    for module in pkgutil.iter_modules(rules.__path__, f"{rules.__name__}."):
        if module.ispkg:
            package: Any = importlib.import_module(module.name)
            if not hasattr(package, "find"):
                continue
            name = module.name.rpartition(".")[2]
            found.append(Rule(name, package.FAMILY, package.find, package.REWRITES))
    return tuple(found)


RULES = _rules()
