"""The rule of experts: equal modules of one list that are called on rows of their own, as a mixture
of experts calls them.

It only matches, by what a run showed; nothing here changes a model or measures anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from fastlinear.profile.records import LinearSite

_LISTS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Experts:
    """Equal modules of one list, called with different numbers of rows.

    Attributes:
        fqn: the module that holds the list.
        names: of the experts.
        rows: of each in one step; 0 for one that was not called.
        layers: for each layer of an expert its linears, one an expert.
    """

    fqn: str
    names: tuple[str, ...]
    rows: tuple[int, ...]
    layers: tuple[tuple[str, ...], ...]

    @property
    def linears(self) -> tuple[str, ...]:
        """All linears, layer by layer."""
        return tuple(name for layer in self.layers for name in layer)


def match(model: nn.Module, sites: Iterable[LinearSite]) -> list[Experts]:
    """The lists of equal modules of which several ran, not all on as many rows."""
    known = {site.fqn: site for site in sites if site.kind == "linear"}
    found = []
    for home, held in model.named_modules():
        if type(held) not in _LISTS or len(held) < 2:
            continue
        names = [f"{home}.{key}" if home else key for key in held._modules]
        modules = [module for module in held._modules.values() if module is not None]
        if len(modules) < len(names) or len({_kind(module) for module in modules}) > 1:
            continue
        inner = [n for n, m in modules[0].named_modules() if isinstance(m, nn.Linear)]
        layers = tuple(tuple(f"{n}.{i}" if i else n for n in names) for i in inner)
        if not layers or not all(name in known for layer in layers for name in layer):
            continue
        rows = tuple(_rows(known[name]) for name in layers[0])
        if sum(r > 0 for r in rows) > 1 and len(set(rows)) > 1:
            found.append(Experts(_holder(model, home), tuple(names), rows, layers))
    return found


def _kind(module: nn.Module) -> tuple[object, ...]:
    """What equal modules share."""
    shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())
    return type(module), shapes


def _rows(site: LinearSite) -> int:
    return site.rows if site.calls and all(math.prod(shape) for shape in site.shapes) else 0


def _holder(model: nn.Module, fqn: str) -> str:
    """The module around a list, or around lists of lists."""
    while fqn and type(model.get_submodule(fqn)) in _LISTS:
        fqn = fqn.rpartition(".")[0]
    return fqn
