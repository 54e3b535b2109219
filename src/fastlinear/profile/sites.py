"""From an observed run to sites: every Linear-shaped module and the activation after it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from torch import Tensor, nn

from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.profile.follower import Follower, follower_of
from fastlinear.profile.graph import Use
from fastlinear.profile.observe import Call, Observation, linear_kind
from fastlinear.profile.recognise import Recognised
from fastlinear.profile.records import LinearSite


@dataclass(frozen=True)
class Share:
    """Where an activation's time is recorded, and how much of it belongs to one site.

    Attributes:
        fqn: module the records name.
        function: the function inside that module, or None for the whole module.
        fraction: the site's elements over all elements it processed.
    """

    fqn: str
    function: str | None
    fraction: float


@dataclass(frozen=True)
class Found:
    """The sites, and for fused candidates where their activation's time is."""

    sites: tuple[LinearSite, ...]
    shares: dict[str, Share]


def find_sites(model: nn.Module, seen: Observation, real_calls: Counter[nn.Module]) -> Found:
    """Every Linear-shaped module of the model with its surroundings.

    Args:
        model: the model observed.
        seen: what one forward showed.
        real_calls: how often each module runs when nothing but module hooks watches.
    """
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    owners = Counter(
        id(p)
        for m in model.modules()
        for p in {id(p): p for p in m._parameters.values() if p is not None}.values()
    )
    known: dict[nn.Module, Recognised | None] = {}
    sites, shares = [], {}
    for module in model.modules():
        kind = linear_kind(module)
        if kind is None:
            continue
        calls = seen.calls.get(module, [])
        follower = follower_of(module, calls, seen, real_calls, known)
        site = _site(module, kind, names, calls, follower, real_calls[module], owners, seen)
        if follower.use is not None and follower.known is not None:
            site = replace(site, flags=site.flags + _activation_flags(follower, calls, seen, names))
            shares[site.fqn] = _share(site, follower.use, calls, seen, names)
        sites.append(site)
    sites += on_parameters(model, names, seen)
    return Found(tuple(sites), shares)


ON_PARAMETERS = "on_parameters"
"""The code of a site that is no module: ``F.linear`` and the like on parameters."""


def on_parameters(
    model: nn.Module, names: dict[nn.Module, list[str]], seen: Observation
) -> list[LinearSite]:
    """The linears that the model's code writes on parameters, by the names of their weights."""
    sites = []
    for name, weight in model.named_parameters():
        calls = seen.products.get(id(weight), [])
        if not calls or not calls[0].shape:
            continue
        callers = list(dict.fromkeys(c.caller for c in calls))
        first = calls[0]
        assert first.caller is not None
        k = first.shape[-1]
        kinds = list(dict.fromkeys((c.shape, c.layout) for c in calls))
        sites.append(
            LinearSite(
                fqn=name,
                parent_fqn=names[first.caller][0],
                kind="linear",
                module_class="Parameter",
                in_features=k,
                out_features=weight.numel() // max(1, k),
                bias=first.bias,
                calls=len(calls),
                shapes=tuple(shape for shape, _ in kinds),
                rows=sum(_rows(c.shape) for c in calls),
                dtype=first.dtype,
                weight_dtype=DTYPE_NAMES.get(weight.dtype, str(weight.dtype)),
                device=str(weight.device),
                input_grad=any(c.input_grad for c in calls),
                weight_grad=seen.grad_enabled and weight.requires_grad,
                x_layouts=tuple(layout for _, layout in kinds),
                activation=None,
                activation_fqn=None,
                how="none",
                node=None,
                code=ON_PARAMETERS if len(callers) == 1 else "several_callers",
                reason="It is written on parameters in the forward that is named; what follows it "
                "is found when that is traced, by optimize_.",
            )
        )
    return sites


def _site(
    module: nn.Module,
    kind: str,
    names: dict[nn.Module, list[str]],
    calls: list[Call],
    follower: Follower,
    real_calls: int,
    owners: Counter[int],
    seen: Observation,
) -> LinearSite:
    weight = module.weight
    assert isinstance(weight, Tensor)
    n, k = weight.shape if kind == "linear" else reversed(weight.shape)
    kinds = list(dict.fromkeys((c.shape, c.layout) for c in calls))
    caller = calls[0].caller if calls else None
    use, what = follower.use, follower.known
    grads = seen.grad_enabled
    weight_dtype = DTYPE_NAMES.get(weight.dtype, str(weight.dtype))
    return LinearSite(
        fqn=names[module][0],
        parent_fqn=names[caller][0] if caller is not None else None,
        kind=kind,
        module_class=type(module).__name__,
        in_features=int(k),
        out_features=int(n),
        bias=getattr(module, "bias", None) is not None,
        calls=real_calls,
        shapes=tuple(shape for shape, _ in kinds),
        rows=sum(_rows(c.shape) for c in calls) if real_calls else 0,
        dtype=calls[0].dtype if calls else weight_dtype,
        weight_dtype=weight_dtype,
        device=str(weight.device),
        input_grad=any(c.input_grad for c in calls),
        weight_grad=grads and weight.requires_grad,
        x_layouts=tuple(layout for _, layout in kinds),
        activation=what.name if what else None,
        activation_fqn=names[use.module][0] if use and use.module is not None else None,
        how="none" if use is None else "function" if use.module is None else "modules",
        node=use.name if use else None,
        code=follower.code,
        reason=follower.reason,
        flags=_flags(module, names, owners),
    )


def _rows(shape: tuple[int, ...]) -> int:
    if not shape:
        return 0  # of a sparse or nested input
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows


def _hooked(module: nn.Module) -> bool:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name, None) for name in kinds)


def _flags(
    module: nn.Module, names: dict[nn.Module, list[str]], owners: Counter[int]
) -> tuple[str, ...]:
    weight = module._parameters.get("weight")
    plain = type(module) is nn.Linear or type(module).__name__ == "Conv1D"
    facts = {
        "subclass": not plain,
        "hooks": _hooked(module),
        "parametrized": hasattr(module, "parametrizations"),
        "weight_subclass": type(weight) is not nn.Parameter,
        "shared_weight": weight is not None and owners[id(weight)] > 1,
        "patched_forward": "forward" in module.__dict__,
        "several_names": len(names[module]) > 1,
    }
    return tuple(name for name, holds in facts.items() if holds)


def _activation_flags(
    follower: Follower,
    calls: list[Call],
    seen: Observation,
    names: dict[nn.Module, list[str]],
) -> tuple[str, ...]:
    flags = []
    assert follower.use is not None
    assert follower.known is not None
    module = follower.use.module
    if module is not None:
        if seen.module_calls[module] != len(calls) or len(names[module]) > 1:
            flags.append("shared_activation")
        if _hooked(module):
            flags.append("activation_hooks")
    if follower.known.inplace:
        flags.append("activation_inplace")
    return tuple(flags)


def _share(
    site: LinearSite,
    use: Use,
    calls: list[Call],
    seen: Observation,
    names: dict[nn.Module, list[str]],
) -> Share:
    if use.module is not None:
        where, total = names[use.module][0], seen.elements[use.module]
    else:
        caller = calls[0].caller
        assert caller is not None
        where, total = names[caller][0], seen.elements[caller, use.name]
    own = site.rows * site.out_features
    name = None if use.module is not None else use.name
    return Share(where, name, min(1.0, own / total) if total else 1.0)
