"""The rule of gated_mlp: modules that compute a gated MLP on linear layers of their own, and
nothing else. Those in forwards that do more are found in their traces (see ``match.gates``).

It only matches; nothing here changes a model or measures anything. What a module computes is found
by ``match.gated_module``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlinear.activations.reference import activation as activation_of
from fastlinear.families.gated.problem import NAME
from fastlinear.families.gated.stacking import Biases, Weights, hidden, out_features, split_pre
from fastlinear.nn.recognised import Gated
from fastlinear.profile.effects import class_forward
from fastlinear.profile.graph import TENSOR, Observed
from fastlinear.rewrite.fusion import Fusion, WholeForward
from fastlinear.rewrite.in_code import in_code
from fastlinear.rewrite.match.candidate import all_different, named, one_pass
from fastlinear.rewrite.match.eligible import refuse_linear, refuse_module
from fastlinear.rewrite.match.written import Written
from fastlinear.rewrite.rules.gated.forward import call_gated, gated_forward
from fastlinear.rewrite.rules.gated.fuse import fused_gate
from fastlinear.rewrite.rules.gated.recognise import recognise
from fastlinear.rewrite.session import Session
from fastlinear.rewrite.swap.functional_linear import AsLayer, FunctionalLinear

DROPS = "in training it drops what the gate lets through"


@dataclass(frozen=True, eq=False)
class GatedSite:
    """A module that computes a gated MLP, or a gated linear layer.

    Attributes:
        fqn, module: the module, or that whose forward computes it beside other things.
        gated: how it is computed.
        part: whether the module does more.
        advised: whether one call does the same, by hand as well.
        glu: whether PyTorch's own ``glu`` computes it.
        opened: how a part makes one of gate and up, where that is written out.
        written: those of its linears that a part writes on parameters, by name.
    """

    fqn: str
    module: nn.Module
    gated: Gated
    part: bool = False
    advised: bool = True
    glu: bool = False
    opened: Written | None = None
    written: Mapping[str, FunctionalLinear] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Its linears by their names in the model."""
        return tuple(f"{self.fqn}.{n}" if self.fqn else n for n in self.gated.names)

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        """Its linears."""
        return tuple(self._layer(name) for name in self.gated.names)

    def _layer(self, name: str) -> Any:
        held = self.written.get(name)
        return self.module.get_submodule(name) if held is None else AsLayer(held, self.module)

    @property
    def held(self) -> tuple[Weights, Biases]:
        """Its parameters, as they are now."""
        held = [self._held(n) for n in (self.gated.gate, self.gated.up, self.gated.down)]
        weights, biases = zip(*held, strict=True)
        return Weights(*weights), Biases(*biases)

    def _held(self, name: str | None) -> tuple[Any, Tensor | None]:
        if name is None:
            return None, None
        layer, written = self._layer(name), self.written.get(name)
        turned = written is not None and written.turned
        return (layer.weight.t() if turned else layer.weight), layer.bias

    @property
    def parameters(self) -> list[Tensor]:
        """The same as the model holds them."""
        return [t for a in self.layers for t in (a.weight, a.bias) if t is not None]  # type: ignore[misc]

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of its weights in the model."""
        written = {f"{self.fqn}.{n}" if self.fqn else n for n in self.written}
        return tuple(n if n in written else f"{n}.weight" for n in self.names)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """K, H and N (H without a down projection)."""
        weights, _ = self.held
        return weights.gate.shape[1], hidden(weights), out_features(weights)

    def before(self, x: Tensor) -> Tensor:
        """What the module does with the value that both halves read; hooks of layers are not
        run."""
        if not self.part:
            y: Tensor = self.module.forward(x)
            return y
        gated, layers = self.gated, list(self.layers)

        def call(layer: nn.Module, x: Tensor) -> Tensor:
            return type(layer).forward(layer, x)  # type: ignore[no-any-return]

        first = call(layers.pop(0), x)
        second = None if gated.up is None else call(layers.pop(0), x)
        if self.glu:
            h = F.glu(first if second is None else torch.cat([second, first], -1), -1)
        else:
            gate, up = split_pre((first, second), gated.order)
            if self.opened is not None:
                h = self.opened.run(gate, up)
            else:
                h = activation_of(gated.activation).value(gate) * up
        return call(layers.pop(0), h) if gated.down is not None else h

    def instead(self) -> Callable[[Tensor], Tensor] | None:
        """The same by ``gated_mlp``, on the module's own parameters as they are at each call; None
        where the module drops what the gate lets through."""
        gated = self.gated
        if gated.dropout and self.module.training:
            return None
        return lambda x: call_gated(x, *self.held, gated, None)

    @property
    def products(self) -> str:
        """Which matrix products it runs, in words."""
        k, h, n = self.sizes
        first = f"{k} → 2·{h} (gate and up stacked)"
        if self.gated.up is not None:
            first = f"{k} → {h} twice (gate, up)"
        return first if self.gated.down is None else f"{first}, {h} → {n} (down)"

    def advice(self, model: nn.Module) -> str:
        """What puts one in the place of the module, a part of that model."""
        if not self.part:
            return f"fl.nn.GatedMLP.from_module({in_code(model, self.fqn)})"
        name = "gated_linear" if self.gated.down is None else "gated_mlp"
        inside = dict(zip(self.names, self.gated.names, strict=True))
        on = [in_code(model, n) for n, own in inside.items() if own not in self.written]
        layers = [f"the parameters of {', '.join(on)}"] if on else []
        for n, own in inside.items():
            if own in self.written:
                turned = ".t()" if self.written[own].turned else ""
                layers.append(f"{in_code(model, n)}{turned}")
        return f"fl.{name} on {', '.join(layers)}"


def chains(
    session: Session, found: Iterable[GatedSite], left_alone: dict[str, str]
) -> list[Fusion]:
    """Those of the gated MLPs ``found`` that may become one call; ``left_alone`` is filled with why
    the others may not, by the first of their linears."""
    backend = session.backends.get(NAME)
    made = []
    for site in found:
        observed = session.arguments.get(site.module)
        reason = _why_not(session, site, observed)
        if reason is not None:
            left_alone[site.names[0]] = reason
            continue
        assert observed is not None
        members = tuple(session.candidates[n] for n in site.names)
        given = site.module, site.gated, observed, backend
        made.append(
            fused_gate(
                *(site.fqn, site.module, members, site.gated),
                WholeForward(partial(gated_forward, *given)),
                backend=backend,
                title=named(site.fqn),
                original=partial(type(site.module).forward, site.module),
            )
        )
    return made


def _why_not(session: Session, site: GatedSite, observed: Observed | None) -> str | None:
    if observed is None:
        return "these inputs never call it"
    if observed.arguments() != ((TENSOR,), {}):
        return "it is called with its input as a keyword argument, or with more than that"
    if site.gated.dropout and site.module.training:
        return DROPS
    for name in site.names:
        if (why := session.why_not(name, site.fqn)) is not None:
            return why
    members = tuple(session.candidates[n] for n in site.names)
    if not (one_pass(members) and all_different(members)):
        return "one of its linears is there twice, or is called by others as well"
    return None


def match(model: nn.Module) -> list[GatedSite]:
    """The gated MLPs of a model that no hook, parametrization or swap stands upon."""
    return list(_found(model))


def _found(model: nn.Module) -> Iterator[GatedSite]:
    for fqn, module in model.named_modules():
        if refuse_module(module) is not None:
            continue
        gated = recognise(module)
        if isinstance(gated, str):
            continue
        names = [f"{fqn}.{name}" if fqn else name for name in gated.names]
        layers = [module._modules[name] for name in gated.names]
        if any(
            layer is None or refuse_linear(model, name, layer) is not None
            for name, layer in zip(names, layers, strict=True)
        ):
            continue
        glu = any(type(m) is nn.GLU for m in module.children()) or _names_glu(module)
        yield GatedSite(fqn, module, gated, glu=glu)


def _names_glu(module: nn.Module) -> bool:
    code = getattr(class_forward(module), "__code__", None)
    return code is not None and "glu" in code.co_names
