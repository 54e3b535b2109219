"""The rule of gated_mlp: modules that compute a gated MLP on linear layers of their own.

It only matches; nothing here changes a model or measures anything. What a module computes is found
on a small copy of it in float64, not by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from fastlinear.nn.gated_match import Gated, recognise, weights_of
from fastlinear.ops.gated_mlp.stacking import hidden, out_features
from fastlinear.profile.graph import TENSOR, Observed
from fastlinear.profile.records import LinearSite
from fastlinear.rewrite.exchange.gated_forward import call_gated
from fastlinear.rewrite.exchange.traceable import why_not
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.match.chain import all_different, one_pass
from fastlinear.rewrite.match.chain_gated import GatedChain
from fastlinear.rewrite.match.eligible import refuse_linear, refuse_module
from fastlinear.rewrite.rules.grouped_chains import why_not_traced

# Numbers of hidden size that pass over memory between the products: the activation (2) and the gate
# (3); backward the gate's two gradients (6) and the activation's (3); against one pass each way.
_PASSES = {"inference": (5, 3), "train": (14, 9)}


@dataclass(frozen=True, eq=False)
class GatedSite:
    """A module that computes a gated MLP, or a gated linear layer.

    Attributes:
        fqn, module: the module.
        gated: how it computes it.
    """

    fqn: str
    module: nn.Module
    gated: Gated

    @property
    def sizes(self) -> tuple[int, int, int]:
        """K, H and N (H without a down projection)."""
        weights, _ = weights_of(self.module, self.gated)
        return weights.gate.shape[1], hidden(weights), out_features(weights)

    def instead(self) -> Callable[[Tensor], Tensor] | None:
        """The same by ``gated_mlp``, on the module's own parameters as they are at each call; None
        where the module drops what the gate lets through."""
        gated = self.gated
        if gated.dropout and self.module.training:
            return None
        return lambda x: call_gated(x, *weights_of(self.module, gated), gated, None)

    def passes(self, mode: str) -> tuple[int, int]:
        """Numbers of hidden size, for each token, that PyTorch's own operations between the
        products read and write, and that one fused pass each way does."""
        return _PASSES[mode]

    @property
    def products(self) -> str:
        """Which matrix products it runs, in words."""
        k, h, n = self.sizes
        first = f"{k} → 2·{h} (gate and up stacked)"
        if self.gated.up is not None:
            first = f"{k} → {h} twice (gate, up)"
        return first if self.gated.down is None else f"{first}, {h} → {n} (down)"

    @property
    def advice(self) -> str:
        """The line that puts one in the module's place."""
        return "fl.nn.GatedMLP.from_module(module)"


def chains(
    model: nn.Module,
    candidates: Mapping[str, Candidate],
    sites: Mapping[str, LinearSite],
    arguments: Mapping[nn.Module, Observed],
    *,
    backend: str | None,
) -> list[GatedChain]:
    """The gated MLPs of a model that may become one call.

    Args:
        model: the model, unchanged.
        candidates: what the rule of linear_act found; a gated MLP takes none but these.
        sites: what the profile says about each linear.
        arguments: what modules were called with.
        backend: a forced backend of gated_mlp, or None.
    """
    found = []
    for site in match(model):
        observed = arguments.get(site.module)
        prefix = f"{site.fqn}." if site.fqn else ""
        names = [prefix + name for name in site.gated.names]
        if (
            observed is None
            or observed.arguments() != ((TENSOR,), {})
            or why_not(site.module) is not None
            or why_not_traced(site.module, observed) is not None
            or (site.gated.dropout and site.module.training)
            or not all(n in candidates and sites[n].parent_fqn == site.fqn for n in names)
        ):
            continue
        members = tuple(candidates[n] for n in names)
        if one_pass(members) and all_different(members):
            found.append(
                GatedChain(
                    fqn=site.fqn,
                    module=site.module,
                    members=members,
                    activation=site.gated.activation,
                    final_activation="none",
                    backend=backend,
                    gated=site.gated,
                    observed=observed,
                )
            )
    return found


def match(model: nn.Module) -> list[GatedSite]:
    """The gated MLPs of a model that no hook, parametrization or swap stands upon."""
    return list(_found(model))


def _found(model: nn.Module) -> Iterator[GatedSite]:
    for fqn, module in model.named_modules():
        if refuse_module(module) is not None:
            continue
        gated = recognise(module)
        if gated is None:
            continue
        names = [f"{fqn}.{name}" if fqn else name for name in gated.names]
        layers = [module._modules[name] for name in gated.names]
        if any(
            layer is None or refuse_linear(model, name, layer) is not None
            for name, layer in zip(names, layers, strict=True)
        ):
            continue
        yield GatedSite(fqn, module, gated)
