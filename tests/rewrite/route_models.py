"""Small models that between them are rewritten by every route, and which routes there are."""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.pytorch_utils import Conv1D

import fastlinear as fl
from fastlinear import rewrite
from fastlinear.dispatch import backend as backends_of
from fastlinear.rewrite import finish, registry, rules
from fastlinear.rewrite.fusion import Fusion, InForward
from fastlinear.rewrite.match import edits
from fastlinear.rewrite.rules.linear_dropout import dropout
from fastlinear.rewrite.swap.modules import is_rewritten

CLOCK = {"cpp": 50.0, "onednn": 50.0, "whole_cpp": 50.0, "pieces": 50.0, "after": 50.0}
"""Times of the contenders of a clock on which a rewrite is faster."""
_REWRITE = Path(rewrite.__file__).parent
_FOUND = pkgutil.walk_packages(rules.__path__, f"{rules.__name__}.")
EDITS = [edits, *(importlib.import_module(m.name) for m in _FOUND if m.name.endswith(".edit"))]
"""The files whose functions say what takes the place of steps in a traced forward."""


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


class Dropped(_Holder):
    """In training: a dropout behind an activation, and one written as a function."""

    def __init__(self) -> None:
        super().__init__(fc=nn.Linear(16, 512), act=nn.ReLU(), drop=nn.Dropout(0.25))
        self.out, self.rate = nn.Linear(512, 512), 0.5

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.out(self.drop(self.act(self.fc(x)))), self.rate, self.training)


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


_SCALES = {"keys": 0.5}


class Unfollowed(Row):
    """The same in a forward that cannot be traced: it reads a global that may change."""

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) * torch.cat([self.k(x) * _SCALES["keys"], self.v(x)], -1).sigmoid()


class Parts(_Holder):
    """A loop over chunks amid other work."""

    def __init__(self) -> None:
        super().__init__(projs=nn.ModuleList(nn.Linear(4, 5) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        parts = x.chunk(len(self.projs), -1)
        found = [proj(part) for proj, part in zip(self.projs, parts, strict=False)]
        return torch.cat(found, -1).cos()


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


def alone() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.LeakyReLU())


def symbolic() -> nn.Module:
    layers = nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)
    return torch.fx.symbolic_trace(nn.Sequential(*layers))


class Routed(nn.Module):
    """A router, and transformers' experts for the rows that it sends them."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
        config = MixtralConfig(hidden_size=16, **sizes)  # type: ignore[arg-type]
        config._experts_implementation = "batched_mm"  # which can be traced
        self.router, self.experts = nn.Linear(16, 4), MixtralExperts(config)
        for p in self.experts.parameters():
            nn.init.normal_(p, std=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, index = self.router(x).softmax(-1).topk(2)
        y: torch.Tensor = self.experts(x, index, weight)
        return y


@dataclass(frozen=True)
class Route:
    """A model, the settings it is rewritten with, and what it exercises: files that make forwards,
    kinds of chains, and fused calls, by name."""

    make: Callable[[], nn.Module]
    exercises: set[str]
    settings: dict[str, Any] = field(default_factory=dict)


ROUTES: dict[str, Route] = {
    "plain": Route(lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)), {"forwards"}),
    "plain Conv1D": Route(lambda: nn.Sequential(Conv1D(8, 16), nn.LayerNorm(8)), {"forwards"}),
    "pairs in a Sequential": Route(pairs, {"sequential_forward", "call_linear_act"}),
    "chain in a Sequential": Route(chain, {"sequential_forward", "InSequential"}),
    "pair in a forward": Route(Parent, {"guard", "call_fused_linear"}),
    "chain in a forward": Route(WrittenChain, {"guard", "edit chain", "call_fused_chain"}),
    "chain made by torch.fx": Route(symbolic, {"guard", "mlp"}),
    "chain through a block": Route(Blocks, {"guard", "through blocks", "call_fused_linear"}),
    "written on parameters": Route(Held, {"guard", "call_functional_linear_of", "call_chain_of"}),
    "gate on parameters": Route(HeldGate, {"guard", "call_gate_on"}),
    "gated module": Route(Gate, {"guard", "gated_mlp", "WholeForward"}),
    "gate in a forward": Route(GateAmid, {"guard", "edit gate", "call_gate"}),
    "halves in a forward": Route(HalvesAmid, {"guard", "call_gate"}),
    "halves of one rank": Route(HalvesAt1, {"guard", "call_gate_of"}),
    "row": Route(Row, {"guard", "edit row", "call_row"}),
    "row in calls": Route(Unfollowed, {"shared_calls", "InCalls", "together"}),
    "parts": Route(Parts, {"guard", "call_parts"}),
    "loop": Route(Loop, {"guard", "grouped_linear"}),
    "towers": Route(Towers, {"guard", "edit parallel_mlps", "call_parallel_mlps"}),
    "stacked experts": Route(Routed, {"experts/find", "experts"}),
    "list": Route(Heads, {"guard", "unequal_linear", "call_list"}),
    "stacked weights": Route(stacked, {"guard", "grouped_linear"}),
    "grouped convolution": Route(Convolution, {"grouped/modules/forward", "grouped_linear"}),
    "graphs": Route(alone, {"graph_forward"}, {"families": (), "graphs": True}),
    "compiled": Route(alone, {"compiled_forward"}, {"families": (), "compile": True}),
}
# by this processor
UNSERVED = set() if dropout.reason_not() is None else {"linear_dropout", "edit steps_after"}
if not UNSERVED:
    trained = Route(Dropped, {"guard", "linear_dropout", "edit steps_after"}, {"mode": "train"})
    ROUTES["linear and dropout"] = trained
X = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Rewritten:
    """A model as it was and the same one rewritten, the result, and the kinds of its chains."""

    plain: nn.Module
    model: nn.Module
    result: Any
    kinds: frozenset[str]


@cache
def rewritten(name: str) -> Rewritten:
    """By this route; needs a clock set to ``CLOCK``."""
    torch.manual_seed(0)
    route = ROUTES[name]
    model = route.make().train(route.settings.get("mode") == "train")
    plain = copy.deepcopy(model)
    return Rewritten(plain, model, *optimized(model, name))


@contextmanager
def lists_together() -> Iterator[None]:
    """Inside it lists of layers are one call: of so few numbers PyTorch's own loop would be the
    choice."""
    known = backends_of.family("unequal_linear")
    backends = sorted(known.backends, key=lambda b: b.name != "together")
    ours = dataclasses.replace(known, backends=tuple(backends), cpu_work=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(backends_of._FAMILIES, known.name, ours)
        yield


def optimized(model: nn.Module, name: str) -> tuple[Any, frozenset[str]]:
    """What ``optimize_`` gives with the settings of a route, and the kinds of chains it keeps."""
    kinds: set[str] = set()
    real = finish.swaps_of

    def swaps_of(candidates: Any) -> Any:
        kept = [c.chain for c in candidates if c.chain is not None]
        kinds.update(c.rule for c in kept)
        kinds.update(way(c) for c in kept)
        kinds.update("through blocks" for c in kept if c.blocks)
        return real(candidates)

    settings = {"draws": 1, "optimizer_steps": 1, "time_budget_s": 600.0, **ROUTES[name].settings}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finish, "swaps_of", swaps_of)
        with lists_together():
            result = fl.optimize_(model, X, config=fl.Config(**settings))
    assert result.kept, [(s.fqn, s.code, s.route, s.reason) for s in result.sites]
    return result, frozenset(kinds)


def swapped(model: nn.Module) -> list[str]:
    """Names of the modules whose forward is swapped."""
    return [name for name, module in model.named_modules() if is_rewritten(module)]


def exercised(route: Rewritten) -> set[str]:
    """As ``Route.exercises``: what the rewritten model has, and one call of it runs."""
    forwards = [route.model.get_submodule(name).forward for name in swapped(route.model)]
    made = {_file(Path(f.__func__.__code__.co_filename)) for f in forwards}
    wrapped = {type(f).__module__.rpartition(".")[2] for f in forwards}
    found: set[str] = set()

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(_REWRITE)):
            found.add(frame.f_code.co_qualname.partition(".")[0])

    sys.setprofile(look)
    try:
        route.model(X)
    finally:
        sys.setprofile(None)
    return found | made | wrapped | route.kinds


def way(fusion: Fusion) -> str:
    """How a fusion is put in place: its edit, or what makes the forward."""
    how = fusion.forward
    if isinstance(how, InForward):
        return f"edit {how.edit.__qualname__.partition('.')[0]}"  # type: ignore[attr-defined]
    return type(how).__name__


def ways() -> Iterator[str]:
    """All that there are, but for the edit of pairs, which are no fusions."""
    for module in EDITS:
        for name, made in vars(module).items():
            own = getattr(made, "__module__", "") == module.__name__ and not name.startswith("_")
            if own and name != "linear":
                yield f"edit {name}"
    for kind in get_args(get_type_hints(Fusion)["forward"]):
        if kind not in (InForward, type(None)):
            yield kind.__name__


def discovered() -> set[str]:
    """All there is to exercise: the files that make forwards, the rules, and what forwards built of
    traces call."""
    return {
        *({name for rule in registry.RULES if rule.rewrites for name in rule.names} - UNSERVED),
        *makers(),
        "through blocks",
        *(set(ways()) - UNSERVED),
        *(name for module in EDITS for name in vars(module) if name.startswith("call_")),
    }


def _file(path: Path) -> str:
    """A file by its name, one of a rule with the rule's."""
    inside = path.relative_to(_REWRITE).with_suffix("").parts
    return "/".join(inside[1:]) if inside[0] == "rules" else path.stem


def makers() -> Iterator[str]:
    """The files in which a function makes a function ``forward``, and those of what is bound in
    its place."""
    for file in _REWRITE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        for outer in ast.walk(tree):
            inner = outer.body if isinstance(outer, ast.FunctionDef | ast.ClassDef) else ()
            names = {f.name for f in inner if isinstance(f, ast.FunctionDef)}
            bases = outer.bases if isinstance(outer, ast.ClassDef) else ()
            bound = any(isinstance(b, ast.Name) and b.id == "Bound" for b in bases)
            if bound or (isinstance(outer, ast.FunctionDef) and "forward" in names):
                yield _file(file)
