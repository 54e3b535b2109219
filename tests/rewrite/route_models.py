"""Small models that between them are rewritten by every route, and which routes there are."""

from __future__ import annotations

import ast
import copy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import fastlinear as fl
from fastlinear.rewrite import exchange
from fastlinear.rewrite.match import links

CLOCK = {"cpp": 50.0, "onednn": 50.0, "whole_cpp": 50.0, "pieces": 50.0, "after": 50.0}
"""Times of the contenders of a clock on which a rewrite is faster."""
CONFIG = fl.Config(draws=1, optimizer_steps=1, time_budget_s=600)
_EXCHANGE = Path(exchange.__file__).parent


class _Holder(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class Parent(_Holder):
    """A linear with its activation module in a written forward, then one without."""

    def __init__(self) -> None:
        super().__init__(fc=nn.Linear(16, 16), act=nn.LeakyReLU(), norm=nn.LayerNorm(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.act(self.fc(x)))


class WrittenChain(_Holder):
    def __init__(self) -> None:
        super().__init__(
            a=nn.Linear(16, 16), b=nn.Linear(16, 16), act=nn.ReLU(), drop=nn.Dropout(0.5)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(self.act(self.a(x)))) * 2


class Blocks(_Holder):
    """A chain that goes on through a block, whose first pair is no part of it."""

    def __init__(self) -> None:
        block = nn.Sequential(
            *(nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16)),
            *(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()),
        )
        super().__init__(block=block, head=nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x)) + 1


class Held(nn.Module):
    """Linears written on parameters: a pair, and a chain."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b", "c"):
            self.register_parameter(name, nn.Parameter(torch.randn(16, 16) / 4))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.relu(F.linear(x, self.a)))
        return F.linear(F.relu(F.linear(x, self.b)), self.c)


class HeldGate(nn.Module):
    """A gated MLP written on parameters, amid other work."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b", "c"):
            self.register_parameter(name, nn.Parameter(torch.randn(16, 16) / 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.a)) * F.linear(x, self.b), self.c) + x


class Gate(_Holder):
    def __init__(self) -> None:
        super().__init__(g=nn.Linear(16, 24), u=nn.Linear(16, 24), d=nn.Linear(24, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.d(F.silu(self.g(x)) * self.u(x))


class GateAmid(Gate):
    """A gated MLP in a forward that does more."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x * 2)


class HalvesAmid(_Holder):
    """A gated linear whose halves one layer computes, in a forward that does more."""

    def __init__(self) -> None:
        super().__init__(both=nn.Linear(16, 32), d=nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return x + self.d(F.gelu(gate) * up)


class HalvesAt1(HalvesAmid):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=1)
        return x + self.d(F.gelu(gate) * up)


class Row(_Holder):
    """Three linears that read one value."""

    def __init__(self) -> None:
        super().__init__(q=nn.Linear(16, 16), k=nn.Linear(16, 8), v=nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) * torch.cat([self.k(x), self.v(x)], -1).sigmoid()


class Parts(_Holder):
    """A loop over chunks amid other work."""

    def __init__(self) -> None:
        super().__init__(projs=nn.ModuleList(nn.Linear(4, 5) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        parts = x.chunk(len(self.projs), -1)
        found = [proj(part) for proj, part in zip(self.projs, parts, strict=False)]
        return torch.cat(found, -1).sin()


class Loop(Parts):
    """A loop over chunks and nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.chunk(x, len(self.projs), dim=-1)
        return torch.cat([proj(part) for proj, part in zip(self.projs, parts, strict=True)], -1)


class Towers(_Holder):
    def __init__(self) -> None:
        tower = lambda: nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))  # noqa: E731
        super().__init__(towers=nn.ModuleList(tower() for _ in range(5)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([tower(x) for tower in self.towers], -1)


class Heads(_Holder):
    """Linears of a list that differ in size, each on an input of its own."""

    def __init__(self) -> None:
        super().__init__(heads=nn.ModuleList(nn.Linear(16, 2 + i) for i in range(9)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.silu(head(x + i)) for i, head in enumerate(self.heads)], -1)


class Stack(nn.Module):
    """A weight of its own per group."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4, 6) / 2)
        self.b = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bgk,gkn->bgn", x, self.w) + self.b


class Convolution(_Holder):
    def __init__(self) -> None:
        super().__init__(conv=nn.Conv1d(16, 24, 1, groups=4))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x[..., None]).squeeze(-1)


def stacked() -> nn.Sequential:
    return nn.Sequential(nn.Unflatten(-1, (4, 4)), Stack(), nn.Flatten())


def pairs() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(16, 32), nn.LeakyReLU(), nn.LayerNorm(32)),
        *(nn.Linear(32, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)),
    )


def chain() -> nn.Sequential:
    """A chain, and a pair before it, in one Sequential."""
    return nn.Sequential(
        *(nn.Linear(16, 32), nn.SiLU(), nn.LayerNorm(32)),
        *(nn.Linear(32, 16), nn.LeakyReLU(), nn.Dropout(0.5), nn.Linear(16, 4)),
    )


MODELS: dict[str, tuple[Any, set[str]]] = {
    "plain": (lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)), {"forwards"}),
    "plain Conv1D": (lambda: nn.Sequential(Conv1D(8, 16), nn.LayerNorm(8)), {"forwards"}),
    "pairs in a Sequential": (pairs, {"sequential_forward", "call_linear_act"}),
    "chain in a Sequential": (chain, {"sequential_forward", "call_linear_act", "call_mlp"}),
    "pair in a forward": (Parent, {"guard", "call_fused_linear"}),
    "chain in a forward": (WrittenChain, {"guard", "call_fused_chain"}),
    "chain through a block": (Blocks, {"guard", "call_fused_chain", "call_fused_linear"}),
    "written on parameters": (Held, {"guard", "call_held_of", "call_chain_of"}),
    "gate on parameters": (HeldGate, {"guard", "call_gate_on"}),
    "gated module": (Gate, {"guard", "call_gated"}),
    "gate in a forward": (GateAmid, {"guard", "call_gate"}),
    "halves in a forward": (HalvesAmid, {"guard", "call_gate"}),
    "halves of one rank": (HalvesAt1, {"guard", "call_gate_of"}),
    "row": (Row, {"guard", "call_row"}),
    "parts": (Parts, {"guard", "call_parts"}),
    "loop": (Loop, {"guard", "call_grouped"}),
    "towers": (Towers, {"guard", "call_towers"}),
    "list": (Heads, {"guard", "call_list"}),
    "stacked weights": (stacked, {"guard", "call_grouped"}),
    "grouped convolution": (Convolution, {"grouped_forward", "call_grouped"}),
}
"""Name → how to make the model, and what it exercises: files of ``rewrite.exchange`` that make
forwards, and fused calls."""
X = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))


def rewritten(name: str) -> tuple[nn.Module, nn.Module, Any]:
    """The model rewritten, the same as it was, and the result. Needs a clock set to ``CLOCK``."""
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    plain = copy.deepcopy(model)
    result = fl.optimize_(model, X, config=CONFIG)
    assert result.kept, [(s.fqn, s.code, s.reason) for s in result.sites]
    return model, plain, result


def makers() -> set[str]:
    """The files that make forwards to put in place: those that call ``swap.mark``."""
    found = set()
    for file in _EXCHANGE.glob("*.py"):
        calls = (n.func for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call))
        if any(isinstance(f, ast.Name) and f.id == "mark" for f in calls):
            found.add(file.stem)
    return found


def fused_calls() -> set[str]:
    """What the forwards built of traces call: every ``call_…`` that these are given."""
    return {name for name in vars(links) if name.startswith("call_")}


def exercised(model: nn.Module) -> set[str]:
    """The files that made the model's forwards, and the functions of ``rewrite.exchange`` that one
    call of it runs."""
    found = {f.__module__.rpartition(".")[2] for f in owners(model).values()}

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(_EXCHANGE)):
            found.add(frame.f_code.co_qualname.partition(".")[0])

    sys.setprofile(look)
    try:
        model(X)
    finally:
        sys.setprofile(None)
    return found


def owners(model: nn.Module) -> dict[str, Any]:
    """Name → the forward put in place, of the modules that have one."""
    forwards = {n: m.__dict__.get("forward") for n, m in model.named_modules()}
    return {n: f.__func__ for n, f in forwards.items() if f is not None}
