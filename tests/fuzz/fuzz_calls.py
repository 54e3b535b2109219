"""Random calls of every public op and layer: their tensors, our result and PyTorch's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastlinear as fl
from fastlinear.activations.reference import NAMES
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.compare import KINKED

DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
ROWS = (0, 1, 1, 2, 3, 5, 8, 17, 33, 64)
WIDTHS = (0, 1, 2, 3, 5, 8, 16, 17, 31, 32, 33, 64, 65, 100)
Tensors = Mapping[str, Tensor]


@dataclass
class Call:
    """One kind of call.

    Attributes:
        tensors: what it reads, by name; integers among them are sizes.
        ours: (tensors, backend) → results.
        torchs: tensors of any dtype → the same by PyTorch's own ops.
        text: the call in one line.
    """

    tensors: dict[str, Tensor]
    ours: Callable[[Tensors, str | None], list[Tensor]]
    torchs: Callable[[Tensors], list[Tensor]]
    text: str


class Draw:
    """Draws shapes, numbers and memory layouts; ``seed`` says which."""

    def __init__(self, seed: int, dtype: torch.dtype, activation: str) -> None:
        self.rng = random.Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)
        self.dtype, self.activation = dtype, activation

    def width(self, least: int = 0) -> int:
        """A number of features."""
        return self.rng.choice([w for w in WIDTHS if w >= least])

    def lead(self) -> tuple[int, ...]:
        """Dimensions of the rows, down to none."""
        rows = self.rng.choice(ROWS)
        return self.rng.choice([(rows,), (rows,), (rows,), (2, rows), (rows, 1, 3), ()])

    def values(self, *shape: int) -> Tensor:
        """Numbers that all dtypes hold; whole ones where a derivative jumps, so that rounding
        decides no side."""
        if self.activation in KINKED:
            drawn = torch.randint(-2, 3, shape, generator=self.numbers).float()
        else:
            drawn = torch.randn(shape, generator=self.numbers).bfloat16().float()
        return drawn.to(self.dtype)

    def weight(self, *shape: int) -> Tensor:
        """A weight whose products are of size one, by a power of two; laid out at random."""
        power = max(0, shape[-1].bit_length() - 1) // 2
        return self.laid(self.values(*shape) * 2.0**-power)

    def x(self, *shape: int) -> Tensor:
        """An input, laid out at random."""
        return self.laid(self.values(*shape))

    def bias(self, *shape: int) -> Tensor | None:
        """A bias or None."""
        return self.laid(self.values(*shape)) if self.rng.random() < 0.7 else None

    def laid(self, t: Tensor) -> Tensor:
        """The same numbers (of the first index, where it is expanded) in other memory."""
        way = self.rng.choice(
            ("dense", "dense", "turned", "sliced", "offset", "expanded", "negated")
        )
        if way == "turned" and t.dim() > 1:
            order = self.rng.sample(range(t.dim()), t.dim())
            back = sorted(range(t.dim()), key=lambda d: order[d])
            return t.permute(order).contiguous().permute(back)
        if way == "sliced" and t.dim():
            d = self.rng.randrange(t.dim())
            return torch.stack([t, torch.full_like(t, torch.nan)], d + 1).flatten(d, d + 1)[
                (slice(None),) * d + (slice(None, None, 2),)
            ]
        if way == "offset":
            return torch.cat([t.new_full((3,), torch.nan), t.flatten()])[3:].view(t.shape)
        if way == "expanded" and t.dim() and t.shape[0]:
            return t[:1].expand(t.shape)
        if way == "negated":
            return torch._neg_view(-t)
        return t


def _act(name: str, t: Tensor) -> Tensor:
    return activation_of(name).value(t)


def _given(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: t for name, t in tensors.items() if t is not None}


def _linear_act(d: Draw) -> Call:
    lead, k, n, act = d.lead(), d.width(), d.width(), d.activation
    return Call(
        _given(x=d.x(*lead, k), w=d.weight(n, k), b=d.bias(n)),
        lambda t, be: [fl.linear_act(t["x"], t["w"], t.get("b"), activation=act, backend=be)],
        lambda t: [_act(act, F.linear(t["x"], t["w"], t.get("b")))],
        f"linear_act {lead} {k}->{n}",
    )


def _chain(t: Tensors, layers: int, act: str, final: str) -> list[Tensor]:
    h = t["x"]
    for i in range(layers):
        h = _act(final if i == layers - 1 else act, F.linear(h, t[f"w{i}"], t.get(f"b{i}")))
    return [h]


def _mlp(d: Draw) -> Call:
    layers = d.rng.choice((1, 2, 2, 3))
    if d.activation in KINKED and d.dtype.itemsize == 2:
        layers = 1  # what rounding of a layer leaves may change the side of a kink in the next
    act = d.activation
    final = d.rng.choice(("none", act))
    sizes, lead = [d.width(1) for _ in range(layers + 1)], d.lead()
    tensors = {"x": d.x(*lead, sizes[0])}
    for i in range(layers):
        tensors[f"w{i}"] = d.weight(sizes[i + 1], sizes[i])
        tensors |= _given(**{f"b{i}": d.bias(sizes[i + 1])})

    def ours(t: Tensors, be: str | None) -> list[Tensor]:
        weights = [t[f"w{i}"] for i in range(layers)]
        biases = [t.get(f"b{i}") for i in range(layers)]
        return [fl.mlp(t["x"], weights, biases, act, final, backend=be)]

    return Call(
        tensors, ours, lambda t: _chain(t, layers, act, final), f"mlp {lead} {sizes} {final}"
    )


def _gate(t: Tensors, act: str) -> Tensor:
    gate = F.linear(t["x"], t["gate"], t.get("gate_b"))
    return _act(act, gate) * F.linear(t["x"], t["up"], t.get("up_b"))


def _gated_linear(d: Draw) -> Call:
    lead, k, h, act = d.lead(), d.width(), d.width(1), d.activation
    given = _given(
        x=d.x(*lead, k),
        gate=d.weight(h, k),
        up=d.weight(h, k),
        gate_b=d.bias(h),
        up_b=d.bias(h),
    )
    return Call(
        given,
        lambda t, be: [
            fl.gated_linear(
                *(t["x"], t["gate"], t["up"], t.get("gate_b"), t.get("up_b")),
                activation=act,
                backend=be,
            )
        ],
        lambda t: [_gate(t, act)],
        f"gated_linear {lead} {k}->{h}",
    )


def _gated_mlp(d: Draw) -> Call:
    lead, k, h, n, act = d.lead(), d.width(), d.width(1), d.width(1), d.activation
    given = _given(
        x=d.x(*lead, k),
        gate=d.weight(h, k),
        up=d.weight(h, k),
        down=d.weight(n, h),
        gate_b=d.bias(h),
        up_b=d.bias(h),
        down_b=d.bias(n),
    )
    names = ("x", "gate", "up", "down", "gate_b", "up_b", "down_b")
    return Call(
        given,
        lambda t, be: [fl.gated_mlp(*(t.get(n) for n in names), activation=act, backend=be)],  # type: ignore[arg-type]
        lambda t: [F.linear(_gate(t, act), t["down"], t.get("down_b"))],
        f"gated_mlp {lead} {k}->{h}->{n}",
    )


_LAYOUTS: dict[str, Callable[[Tensor, int], Tensor]] = {  # x → x by group (G, ..., K)
    "... (g k)": lambda x, g: x.unflatten(-1, (g, -1) if x.shape[-1] else (g, 0)).movedim(-2, 0),
    "... g k": lambda x, g: x.movedim(-2, 0),
    "g ... k": lambda x, g: x,
    "... k": lambda x, g: x.expand(g, *x.shape),
}


def _by_group(t: Tensors, layout: str, act: str) -> list[Tensor]:
    groups = t["w"].shape[0]
    xs = _LAYOUTS[layout](t["x"], groups)
    ys = [
        _act(act, F.linear(xs[g], t["w"][g], t["b"][g] if "b" in t else None))
        for g in range(groups)
    ]
    if layout == "g ... k":
        return [torch.stack(ys)]
    return [torch.stack(ys, -2) if layout == "... g k" else torch.cat(ys, -1)]


def _grouped_linear(d: Draw) -> Call:
    groups, k, n, act = d.rng.choice((1, 2, 3, 7)), d.width(1), d.width(1), d.activation
    lead, layout = d.lead(), d.rng.choice(tuple(_LAYOUTS)[:3])
    shape = {
        "... (g k)": (*lead, groups * k),
        "... g k": (*lead, groups, k),
        "g ... k": (groups, *lead, k),
    }[layout]
    return Call(
        _given(x=d.x(*shape), w=d.weight(groups, n, k), b=d.bias(groups, n)),
        lambda t, be: [
            fl.grouped_linear(t["x"], t["w"], t.get("b"), act, layout=layout, backend=be)
        ],
        lambda t: _by_group(t, layout, act),
        f"grouped_linear {layout!r} {shape} ->{n}",
    )


def _ragged_linear(d: Draw) -> Call:
    groups, k, n, act = d.rng.choice((1, 2, 5)), d.width(1), d.width(1), d.activation
    sizes = [d.rng.choice((0, 1, 2, 7, 20)) for _ in range(groups)]
    rows = sum(sizes) + d.rng.choice((0, 0, 3))

    def torchs(t: Tensors) -> list[Tensor]:
        found, at = [], 0
        for g, size in enumerate(t["sizes"].tolist()):
            b = t["b"][g] if "b" in t else None
            found.append(_act(act, F.linear(t["x"][at : at + size], t["w"][g], b)))
            at += size
        return [torch.cat([*found, found[0].new_zeros(t["x"].shape[0] - at, n)])]

    return Call(
        _given(
            x=d.x(rows, k),
            w=d.weight(groups, n, k),
            sizes=torch.tensor(sizes),
            b=d.bias(groups, n),
        ),
        lambda t, be: [
            fl.ragged_linear(t["x"], t["w"], t["sizes"], t.get("b"), activation=act, backend=be)
        ],
        torchs,
        f"ragged_linear {sizes} of {rows} {k}->{n}",
    )


def _experts(d: Draw) -> Call:
    top, tensors, text = _routed(d)
    act, options = d.activation, {"activation": d.activation}
    order = d.rng.choice(("gate_up", "interleaved"))
    return Call(
        tensors,
        lambda t, be: [
            fl.experts(
                *(t["x"], t["index"], t["r"], t["up"], t["w"], t.get("up_b"), t.get("b")),
                **options,
                stacked=order,
                backend=be,
            )
        ],
        lambda t: [_by_choice(t, top, act, order)],
        f"experts {order} {text}",
    )


def _routed(d: Draw) -> tuple[int, dict[str, Tensor], str]:
    """Tokens' choices, the tensors of a call, and its text."""
    experts, top, h, i = d.rng.choice((1, 2, 5)), d.rng.choice((1, 2, 3)), d.width(1), d.width(1)
    rows = d.rng.choice(ROWS)
    tensors = _given(
        x=d.x(rows, h),
        index=torch.randint(-1, experts + 1, (rows, top), generator=d.numbers),
        r=d.x(rows, top),
        up=d.weight(experts, 2 * i, h),
        w=d.weight(experts, h, i),
        up_b=d.bias(experts, 2 * i),
        b=d.bias(experts, h),
    )
    return top, tensors, f"{rows} x {top} of {experts}, {h}->{i}"


def _by_choice(t: Tensors, top: int, act: str, order: str) -> Tensor:
    """Each expert on all tokens that name it, one choice after the other."""
    y = torch.zeros_like(t["x"])
    for j in range(top):
        for e in range(len(t["w"])):
            (rows,) = torch.where(t["index"][:, j] == e)
            both = F.linear(t["x"][rows], t["up"][e], t["up_b"][e] if "up_b" in t else None)
            halves = both.unflatten(-1, (-1, 2)).unbind(-1) if order == "interleaved" else None
            gate, up = halves or both.chunk(2, -1)
            out = F.linear(_act(act, gate) * up, t["w"][e], t["b"][e] if "b" in t else None)
            y = y.index_add(0, rows, (out * t["r"][rows, j, None]).to(y.dtype))
    return y


def _unequal_linear(d: Draw) -> Call:
    groups, act = d.rng.choice((1, 2, 4)), d.activation
    tensors: dict[str, Tensor] = {}
    for g in range(groups):
        k, n = d.width(), d.width()
        tensors |= _given(
            **{f"x{g}": d.x(*d.lead(), k), f"w{g}": d.weight(n, k), f"b{g}": d.bias(n)}
        )
    each = range(groups)
    return Call(
        tensors,
        lambda t, be: fl.unequal_linear(
            *([t[f"{name}{g}"] for g in each] for name in "xw"),
            [t.get(f"b{g}") for g in each],
            activation=act,
            backend=be,
        ),
        lambda t: [_act(act, F.linear(t[f"x{g}"], t[f"w{g}"], t.get(f"b{g}"))) for g in each],
        f"unequal_linear of {groups}",
    )


def _diagonal_linear(d: Draw) -> Call:
    lead, k, act = d.lead(), d.width(), d.activation
    shape = (*lead, k)
    residual = d.x(*shape) if d.rng.random() < 0.4 else None

    def torchs(t: Tensors) -> list[Tensor]:
        y = t["x"] * t["w"]
        y = _act(act, y + t["b"] if "b" in t else y)
        return [t["r"] + y if "r" in t else y]

    return Call(
        _given(x=d.x(*shape), w=d.weight(k), b=d.bias(k), r=residual),
        lambda t, be: [fl.diagonal_linear(t["x"], t["w"], t.get("b"), act, t.get("r"), backend=be)],
        torchs,
        f"diagonal_linear {shape}",
    )


OPS: dict[str, Callable[[Draw], Call]] = {
    "linear_act": _linear_act,
    "mlp": _mlp,
    "gated_linear": _gated_linear,
    "gated_mlp": _gated_mlp,
    "grouped_linear": _grouped_linear,
    "ragged_linear": _ragged_linear,
    "experts": _experts,
    "unequal_linear": _unequal_linear,
    "diagonal_linear": _diagonal_linear,
}
"""How calls of each public function are drawn."""


def _nn_mlp(d: Draw) -> Call:
    layers = 1 if d.activation in KINKED and d.dtype.itemsize == 2 else d.rng.choice((1, 2, 3))
    sizes, lead, act = [d.width(1) for _ in range(layers + 1)], d.lead(), d.activation
    final, bias = d.rng.choice(("none", act)), d.rng.random() < 0.6
    layer = fl.nn.MLP(sizes, act, final, bias, dtype=d.dtype)
    return _of_layer(
        layer,
        d,
        lead,
        sizes[0],
        lambda t: _chain(t, layers, act, final),
        f"MLP {sizes} {final}",
        {"weight": "w{}", "bias": "b{}"},
    )


def _nn_gated(d: Draw) -> Call:
    k, h, n, lead, act = d.width(1), d.width(1), d.width(1), d.lead(), d.activation
    layer = fl.nn.GatedMLP(k, h, n, d.rng.random() < 0.6, act, dtype=d.dtype)
    names = iter(("gate", "up", "down"))
    short = dict(zip(dict(layer.named_children()), names, strict=False))

    def torchs(t: Tensors) -> list[Tensor]:
        return [F.linear(_gate(t, act), t["down"], t.get("down_b"))]

    return _of_layer(layer, d, lead, k, torchs, f"GatedMLP {k}->{h}->{n}", {}, short)


def _nn_simple(
    made: Callable[[Draw], tuple[Any, int, Callable[[Tensors], list[Tensor]], str]],
) -> Any:
    def of(d: Draw) -> Call:
        layer, features, torchs, text = made(d)
        return _of_layer(layer, d, d.lead(), features, torchs, text, {"weight": "w", "bias": "b"})

    return of


def _of_layer(
    layer: Any,
    d: Draw,
    lead: tuple[int, ...],
    features: int,
    torchs: Callable[[Tensors], list[Tensor]],
    text: str,
    kinds: Mapping[str, str],
    short: Mapping[str, str] | None = None,
) -> Call:
    """The call of a layer whose parameters have drawn numbers."""
    tensors, counts = {"x": d.x(*lead, features)}, dict.fromkeys(("weight", "bias"), 0)
    for path, p in layer.named_parameters():
        owner, _, kind = path.rpartition(".")
        p.data = (d.weight(*p.shape) if kind == "weight" else d.laid(d.values(*p.shape))).detach()
        if short is not None:
            name = short[owner] + ("" if kind == "weight" else "_b")
        else:
            name = kinds[kind].format(counts[kind])
        counts[kind] += 1
        tensors[name] = p
    return Call(tensors, lambda t, _: [layer(t["x"])], torchs, f"nn.{text} {lead}")


def _linear_layer(d: Draw) -> Any:
    k, n, act = d.width(1), d.width(1), d.activation
    layer = fl.nn.Linear(k, n, d.rng.random() < 0.6, act, dtype=d.dtype)
    return layer, k, lambda t: [_act(act, F.linear(t["x"], t["w"], t.get("b")))], f"Linear {k}->{n}"


def _grouped_layer(d: Draw) -> Any:
    g, k, n, act = d.rng.choice((1, 2, 5)), d.width(1), d.width(1), d.activation
    layer = fl.nn.GroupedLinear(g, k, n, d.rng.random() < 0.6, act, dtype=d.dtype)
    return layer, g * k, lambda t: _by_group(t, "... (g k)", act), f"GroupedLinear {g} {k}->{n}"


def _diagonal_layer(d: Draw) -> Any:
    k, act = d.width(1), d.activation
    layer = fl.nn.DiagonalLinear(k, d.rng.random() < 0.6, act, dtype=d.dtype)

    def torchs(t: Tensors) -> list[Tensor]:
        y = t["x"] * t["w"]
        return [_act(act, y + t["b"] if "b" in t else y)]

    return layer, k, torchs, f"DiagonalLinear {k}"


def _nn_experts(d: Draw) -> Call:
    top, t, text = _routed(d)
    bias, act = "up_b" in t, d.activation
    experts, h, i = t["w"].shape
    layer = fl.nn.Experts(experts, h, i, bias, act, dtype=d.dtype)
    names = {"gate_up_proj": "up", "down_proj": "w", "gate_up_proj_bias": "up_b"}
    tensors = {name: t[name] for name in ("x", "index", "r")}
    for path, p in layer.named_parameters():
        name = names.get(path, "b")
        p.data = t[name].detach() if name in t else d.laid(d.values(*p.shape))
        tensors[name] = p
    return Call(
        tensors,
        lambda t, _: [layer(t["x"], t["index"], t["r"])],
        lambda t: [_by_choice(t, top, act, "gate_up")],
        f"nn.Experts {text}",
    )


LAYERS: dict[str, Callable[[Draw], Call]] = {
    "Experts": _nn_experts,
    "MLP": _nn_mlp,
    "GatedMLP": _nn_gated,
    "Linear": _nn_simple(_linear_layer),
    "GroupedLinear": _nn_simple(_grouped_layer),
    "DiagonalLinear": _nn_simple(_diagonal_layer),
}
"""The same of each layer."""
CALLS = {**OPS, **{f"nn.{name}": drawn for name, drawn in LAYERS.items()}}
ACTIVATIONS = NAMES
