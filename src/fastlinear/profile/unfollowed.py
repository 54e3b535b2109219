"""The parameters a step multiplies by that are no followed site's: named, with the reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fastlinear.profile.observe import linear_kind
from fastlinear.profile.products import Product, Products
from fastlinear.profile.records import Finding, LinearSite, NotFollowed
from fastlinear.profile.step import eager_modules

CODE = "not_followed"
USED_BY_PARENT = "used_by_parent"
_AS_PARAMETER = "used_as_parameter"
USED_ELSEWHERE = {USED_BY_PARENT, _AS_PARAMETER}
_AS_A_WHOLE = "compiled_part"
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_TITLES = {  # what could be linear layers, and is not
    "pointwise_convolution": "convolution of kernel 1",
    "torch_module": "packed weights in PyTorch's own code",
    "stacked": "stacked weights",
}


@dataclass
class _Uses:
    """The products with one parameter that no site computes.

    Attributes:
        flops: of these, by its share of each product's parameters.
        products, how: the products, and what each reads of it.
    """

    flops: float = 0.0
    products: list[Product] = field(default_factory=list)
    how: list[str] = field(default_factory=list)


def not_followed(
    model: nn.Module, products: Products, sites: Sequence[LinearSite]
) -> tuple[NotFollowed, ...]:
    """What is no followed site's, most flops first.

    Args:
        model: the model watched.
        products: what one forward multiplies by.
        sites: its sites.
    """
    names = {module: name for name, module in reversed(list(model.named_modules()))}
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    written = {(s.fqn, s.parent_fqn) for s in sites if s.module_class == "Parameter"}
    uses: dict[str, _Uses] = {}
    for product in products.found:
        if type(product.by).__module__.startswith("fastlinear."):
            continue  # a layer of ours
        by = names.get(product.by, "") if product.by is not None else ""
        layer = _layer(model, by)
        own = _names(model, layer) if layer is not None else set()
        operands = [o for factor in product.operands for o in factor]
        held = [o for o in operands if o.fqn in own or (o.fqn, by) in written]
        total = sum(sizes[o.fqn] for o in operands)
        for o in operands:
            if o in held:
                continue
            one = uses.setdefault(o.fqn, _Uses())
            one.flops += 0.0 if held else product.flops * sizes[o.fqn] / max(1, total)
            one.products.append(product)
            one.how.append(o.how)
    whole = max(1.0, products.flops)
    found = [_named(model, names, fqn, one, whole) for fqn, one in uses.items()]
    return tuple(sorted(found, key=lambda one: -one.flops))


def told(
    model: nn.Module, sites: Iterable[LinearSite], left: Iterable[NotFollowed]
) -> tuple[LinearSite, ...]:
    """The sites; of those whose forward does not run, what multiplies by their weights."""
    weights = dict(model.named_parameters())
    sites = tuple(sites)
    elsewhere = {id(weights[one.fqn]): (with_hint(one), USED_BY_PARENT) for one in left}
    for site in sites:
        if site.module_class == "Parameter" and site.parent_fqn is not None:
            by = type(model.get_submodule(site.parent_fqn)).__qualname__
            text = f"The code of {by} multiplies by its weight, as {site.fqn!r}, and does not call"
            elsewhere.setdefault(id(weights[site.fqn]), (f"{text} it.", _AS_PARAMETER))
    shown = []
    for site in sites:
        if site.code == "not_called":
            weight = getattr(model.get_submodule(site.fqn), "weight", None)
            if id(weight) in elsewhere:
                reason, flag = elsewhere[id(weight)]
                site = replace(site, reason=reason, flags=(*site.flags, flag))
        shown.append(site)
    return tuple(shown)


def with_hint(one: NotFollowed) -> str:
    """The reason, and the hint where there is one."""
    return one.reason if one.hint is None else f"{one.reason} {one.hint}"


def findings(left: Iterable[NotFollowed]) -> list[Finding]:
    """One for each module with weights that could be linear layers' and are not."""
    homes: dict[tuple[str, str, str], list[NotFollowed]] = {}
    for one in left:
        if one.hint is not None and one.code in _TITLES:
            home = one.fqn.rpartition(".")[0]
            homes.setdefault((home, one.code, one.hint), []).append(one)
    found = []
    for (home, code, hint), members in homes.items():
        names = ", ".join(one.fqn[len(home) :].lstrip(".") for one in members)
        share = sum(one.share for one in members)
        finding = Finding.untimed(
            CODE,
            home,
            f"not followed: {_TITLES[code]}",
            f"{names}: {share:.1%} of the forward's flops. {members[0].reason} {hint} "
            "Not measured.",
            {
                "kind": code,
                "advice": hint.rstrip("."),
                "parameters": [one.fqn for one in members],
                "share": share,
            },
        )
        found.append(replace(finding, flops=sum(one.flops for one in members)))
    return found


def _layer(model: nn.Module, fqn: str) -> nn.Module | None:
    """The Linear-shaped module that this is, or in which it lies."""
    parts = fqn.split(".") if fqn else []
    for depth in range(len(parts), -1, -1):
        module = model.get_submodule(".".join(parts[:depth]))
        if linear_kind(module) is not None:
            return module
    return None


def _names(model: nn.Module, layer: nn.Module) -> set[str]:
    own = {id(p) for p in layer.parameters()}
    return {name for name, p in model.named_parameters() if id(p) in own}


def _named(
    model: nn.Module, names: dict[nn.Module, str], fqn: str, uses: _Uses, whole: float
) -> NotFollowed:
    weight = model.get_parameter(fqn)
    most = max(uses.products, key=lambda p: p.flops)
    by = most.by if most.by is not None else model
    ops = tuple(dict.fromkeys(p.op for p in uses.products))
    code, reason, hint = _why(model, fqn, tuple(weight.shape), by, uses, " and ".join(ops))
    return NotFollowed(
        fqn=fqn,
        parent_fqn=names.get(by, ""),
        shape=tuple(weight.shape),
        ops=ops,
        calls=sum(p.calls for p in uses.products),
        flops=uses.flops,
        share=uses.flops / whole,
        code=code,
        reason=reason,
        hint=hint,
    )


def _why(
    model: nn.Module, fqn: str, shape: tuple[int, ...], by: nn.Module, uses: _Uses, ops: str
) -> tuple[str, str, str | None]:
    """The code, one sentence, and a hint or None."""
    name = type(by).__qualname__
    home = type(by).__module__.partition(".")[0]
    owner = model.get_submodule(fqn.rpartition(".")[0])
    products = uses.products
    if owner not in eager_modules(model):
        text = "It lies in a part of the model that is compiled or scripted and runs as a whole, "
        return _AS_A_WHOLE, f"{text}whose linears are not told apart.", None
    if all(p.elementwise for p in products):
        return "elementwise", f"{name} multiplies by it element by element ({ops}).", None
    if all(p.constant for p in products):
        text = "What it is multiplied by is a parameter or a constant as well, so the product is "
        return "constant", f"{text}the same for all inputs ({ops}).", None
    if linear_kind(owner) is not None and owner is not by:
        text = f"The code of {name} multiplies by its weight ({ops}) and does not call the layer."
        return "by_parent", text, _hint_of_torch(owner, ops)
    if isinstance(by, _RECURRENT):
        text = f"{name} multiplies by it step by step in PyTorch's own code ({ops})."
        return "recurrent", text, None
    windows = next((p.windows for p in products if p.windows is not None), None)
    if windows is not None:
        return _convolution(*windows)
    if home == "torch":
        text = f"{name} multiplies by it in PyTorch's own code ({ops}), which optimize_ leaves."
        return "torch_module", text, _hint_of_torch(owner, ops)
    if len(shape) > 2:
        sizes = " x ".join(map(str, shape))
        text = f"The code of {name} multiplies by it as one or more matrices ({ops}); optimize_ "
        text += f"follows weights of two dimensions, and it has {len(shape)} ({sizes})."
        hint = "fl.nn.GroupedLinear, fl.grouped_linear and fl.ragged_linear take such weights."
        return "stacked", text, hint if len(shape) == 3 and shape[0] > 1 else None
    if any(not p.op.startswith("aten::") for p in products):
        return "library_op", f"{name} gives it to {ops}, an op of another library.", None
    if "computed" in uses.how:
        text = f"What the code of {name} multiplies by is computed from it first ({ops})."
        return "computed", text, None
    if "part" in uses.how:
        return "part", f"The code of {name} multiplies by a part of it at a time ({ops}).", None
    text = f"The code of {name} multiplies by it in a form that optimize_ does not follow ({ops})."
    return "written", text, None


def _convolution(sizes: tuple[int, ...], groups: int) -> tuple[str, str, str | None]:
    if math.prod(sizes) == 1 and groups == 1:
        text = "It is a convolution of kernel 1, a linear over the channels; optimize_ follows "
        hint = "As an nn.Linear on channels last it would be a site."
        return "pointwise_convolution", f"{text}linear layers only.", hint
    kernel = " x ".join(map(str, sizes))
    text = f"It is the kernel of a convolution ({kernel}"
    text += f", {groups} groups" if groups > 1 else ""
    return "convolution", f"{text}), which is no linear layer.", None


def _hint_of_torch(owner: nn.Module, ops: str) -> str | None:
    if isinstance(owner, nn.MultiheadAttention | NonDynamicallyQuantizableLinear):
        text = "Four nn.Linear around torch.nn.functional.scaled_dot_product_attention would be "
        return f"{text}sites."
    if "_transformer_encoder_layer_fwd" in ops:
        return "With torch.backends.mha.set_fastpath_enabled(False) PyTorch calls it as a layer."
    return None
