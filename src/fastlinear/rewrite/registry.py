"""The rewrite rules: every package in ``rules/`` that finds or says something is one.

A rule's package has ``FAMILY``, the family that settings name to allow it, and one or both of
``find(session) -> list[Fusion]`` and ``findings(session) -> list[Told]``. Nothing else registers
it. Further names are optional; see ``Rule``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any

from fastlinear.rewrite import rules
from fastlinear.rewrite.finding import Told
from fastlinear.rewrite.fusion import Fusion
from fastlinear.rewrite.session import Session


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: its folder's.
        family: the family that settings name to allow it.
        names: what its fusions and plans call it (``NAMES``), by default the folder's name; the
            first is the code of its findings.
        rewrites: whether ``optimize_`` puts what it finds in place (``REWRITES``).
        find: what it finds in a model.
        findings: what it says, in the end; by default a finding on each fusion that gains.
        parts: how many parts a loop in a module's forward finds, as far as the rule knows.
        after: the rules that choose their linears before it (``AFTER``).
    """

    name: str
    family: str
    names: tuple[str, ...]
    rewrites: bool
    find: Callable[[Session], list[Fusion]]
    findings: Callable[[Session], list[Told]]
    parts: Callable[[Session, str], int | None]
    after: tuple[str, ...]


def _rule(name: str, package: Any) -> Rule:
    names: tuple[str, ...] = getattr(package, "NAMES", (name,))
    rewrites: bool = getattr(package, "REWRITES", hasattr(package, "find"))
    find: Callable[[Session], list[Fusion]] = getattr(package, "find", lambda _: [])

    def findings(session: Session) -> list[Told]:
        made = [f for f in session.found if f.rule in names] if rewrites else find(session)
        told = (session.finding(f, len(made) - i) for i, f in enumerate(made, 1))
        return [one for one in told if one is not None]

    return Rule(
        name=name,
        family=package.FAMILY,
        names=names,
        rewrites=rewrites,
        find=find,
        findings=getattr(package, "findings", findings),
        parts=getattr(package, "parts", lambda *_: None),
        after=getattr(package, "AFTER", ()),
    )


def _rules() -> tuple[Rule, ...]:
    found = {}
    for module in pkgutil.iter_modules(rules.__path__):
        package: Any = importlib.import_module(f"{rules.__name__}.{module.name}")
        if hasattr(package, "FAMILY"):
            found[module.name] = _rule(module.name, package)
    names = [name for rule in found.values() for name in rule.names]
    assert len(names) == len(set(names)), f"rules share a name: {sorted(names)}"
    order = TopologicalSorter({name: rule.after for name, rule in found.items()})
    return tuple(found[name] for name in order.static_order())


RULES = _rules()


def rule_of(name: str) -> Rule:
    """The rule whose fusions have this name."""
    return next(rule for rule in RULES if name in rule.names)
