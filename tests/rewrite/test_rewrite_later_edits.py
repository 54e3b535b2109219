"""What is done to a model after it was rewritten holds as if it had not been, on every route."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_modules
from torch.nn.utils import parametrize, prune

from fastlinear.core.compare import relative_error
from tests.rewrite.compiled_regions import torch_compile
from tests.rewrite.rewrite_models import Clock, LoraLinear
from tests.rewrite.route_models import CLOCK, ROUTES, Conv1D, X, discovered, exercised, rewritten

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.usefixtures("tape"),
]
Edit = Callable[[nn.Module, str], Any]
"""Changes a model at the module of this name; may return another model, or NotImplemented."""
FORGOTTEN = 1e-3
ROUNDING = 1e-4  # gradients that are nothing but rounding tell nothing
"""An edit that is passed over is off by far more, another order of summation by far less."""


def _set(model: nn.Module, name: str, module: nn.Module) -> None:
    home, _, last = name.rpartition(".")
    model.get_submodule(home)._modules[last] = module


def _is_linear(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, Conv1D)


def _is_activation(module: nn.Module) -> bool:
    return type(module).__module__ == "torch.nn.modules.activation"


def replaced(model: nn.Module, name: str) -> Any:
    """Another layer of its kind; Tanh for an activation."""
    old = model.get_submodule(name)
    if _is_activation(old):
        return _set(model, name, nn.Sigmoid())
    if not name or not list(old.parameters()):
        return NotImplemented
    torch.manual_seed(5)
    new = copy.deepcopy(old)
    for m in new.modules():
        m.__dict__.pop("forward", None)
    with torch.no_grad():
        for p in new.parameters():
            p.copy_(torch.randn(p.shape))
    return _set(model, name, new)


def wrapped(model: nn.Module, name: str) -> Any:
    old = model.get_submodule(name)
    if type(old) is not nn.Linear:
        return NotImplemented
    torch.manual_seed(5)
    return _set(model, name, LoraLinear(old))


def forward_hook(model: nn.Module, name: str) -> None:
    model.get_submodule(name).register_forward_hook(lambda m, i, o: o * 3)


def forward_pre_hook(model: nn.Module, name: str) -> Any:
    if type(model.get_submodule(name)) in (nn.ModuleList, nn.ModuleDict):
        return NotImplemented
    model.get_submodule(name).register_forward_pre_hook(lambda m, i: (i[0] + 1,))
    return None


def backward_hook(model: nn.Module, name: str) -> None:
    model.get_submodule(name).register_full_backward_hook(
        lambda m, i, o: tuple(None if g is None else g * 3 for g in i)
    )


def sliced(model: nn.Module, name: str) -> Any:
    module = model.get_submodule(name)
    return module[:1] if isinstance(module, nn.Sequential) else NotImplemented


def shortened(model: nn.Module, name: str) -> Any:
    module = model.get_submodule(name)
    if not isinstance(module, nn.Sequential):
        return NotImplemented
    del module[1]
    return None


def appended(model: nn.Module, name: str) -> Any:
    module = model.get_submodule(name)
    if not isinstance(module, nn.Sequential):
        return NotImplemented
    module.append(nn.Sigmoid())
    return None


def called_alone(model: nn.Module, name: str) -> Any:
    module = model.get_submodule(name)
    return module if _is_linear(module) or _is_activation(module) else NotImplemented


def another_class(model: nn.Module, name: str) -> Any:
    module = model.get_submodule(name)
    if isinstance(module, nn.ModuleList):
        return NotImplemented
    kind = type(module)
    body = {"forward": lambda self, *a: kind.forward(self, *a) * 2}
    module.__class__ = type(f"Doubled{kind.__name__}", (kind,), body)
    return None


def its_own_forward(model: nn.Module, name: str) -> Any:
    module = model.get_submodule(name)
    if isinstance(module, nn.ModuleList):
        return NotImplemented
    module.forward = lambda *a: type(module).forward(module, *a) * 2  # type: ignore[method-assign]
    return None


class _Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * 2


def parametrized(model: nn.Module, name: str) -> Any:
    if "weight" not in model.get_submodule(name)._parameters:
        return NotImplemented
    parametrize.register_parametrization(model.get_submodule(name), "weight", _Doubled())
    return None


def pruned(model: nn.Module, name: str) -> Any:
    if not _is_linear(model.get_submodule(name)):
        return NotImplemented
    prune.l1_unstructured(model.get_submodule(name), "weight", amount=0.5)
    return None


def normed(model: nn.Module, name: str) -> Any:
    if not _is_linear(model.get_submodule(name)):
        return NotImplemented
    torch.nn.utils.weight_norm(model.get_submodule(name))
    with torch.no_grad():
        model.get_submodule(name).weight_g.mul_(2)
    return None


def another_setting(model: nn.Module, name: str) -> Any:
    module = model.get_submodule(name)
    if isinstance(module, nn.LeakyReLU):
        module.negative_slope = 0.4
    elif isinstance(module, nn.GELU):
        module.approximate = "tanh"
    elif isinstance(module, nn.Conv1d):
        module.stride = (2,)
    else:
        return NotImplemented
    return None


def no_bias(model: nn.Module, name: str) -> Any:
    if type(model.get_submodule(name)) not in (nn.Linear, nn.Conv1d):
        return NotImplemented
    model.get_submodule(name).bias = None
    return None


def another_weight(model: nn.Module, name: str) -> Any:
    module = model.get_submodule(name)
    if not _is_linear(module):
        return NotImplemented
    torch.manual_seed(6)
    module.weight = nn.Parameter(torch.randn_like(module.weight))
    return None


def frozen(model: nn.Module, name: str) -> Any:
    own = list(model.get_submodule(name).parameters(recurse=False))
    if not own:
        return NotImplemented
    own[0].requires_grad_(False)
    return None


AT_MODULES: list[Edit] = [
    *(replaced, wrapped, forward_hook, forward_pre_hook, backward_hook, sliced, shortened),
    *(appended, called_alone, another_class, its_own_forward, parametrized, pruned, normed),
    *(another_setting, no_bias, another_weight, frozen),
]


def quantized(model: nn.Module, _: str) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


def copied(model: nn.Module, _: str) -> Any:
    new = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    return new


def reloaded(model: nn.Module, _: str) -> None:
    torch.manual_seed(7)
    state = {name: torch.randn(t.shape) for name, t in model.state_dict().items()}
    model.load_state_dict(state)


def assigned(model: nn.Module, _: str) -> None:
    torch.manual_seed(7)
    state = {name: torch.randn(t.shape) for name, t in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def in_float64(model: nn.Module, _: str) -> None:
    model.double()


def training(model: nn.Module, _: str) -> None:
    model.train()


def trained_and_back(model: nn.Module, _: str) -> None:
    model.train()
    model.eval()


WHOLE: list[Edit] = [
    *(quantized, copied, reloaded, assigned, in_float64, training, trained_and_back)
]


class _Global:
    """Hooks of every module's call, which change what activations and linears give."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __enter__(self) -> None:
        touched = (nn.Linear, nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Dropout)
        if self.kind == "pre":
            self.handle = of_modules.register_module_forward_pre_hook(
                lambda m, i: (i[0] * 3,) if isinstance(m, touched) else None
            )
        else:
            self.handle = of_modules.register_module_forward_hook(
                lambda m, i, o: o * 3 if isinstance(m, touched) else None,
                always_call=self.kind == "always",
            )

    def __exit__(self, *_: object) -> None:
        self.handle.remove()


def results(model: nn.Module) -> dict[str, Any]:
    """Output and gradients of one call, or what it raises."""
    dtype = next((p.dtype for p in model.parameters()), X.dtype)
    x = X.detach().clone().to(dtype).requires_grad_()
    torch.manual_seed(3)  # of dropout
    try:
        y = model(x)
    except Exception as error:  # noqa: BLE001  both must raise
        return {"raised": isinstance(error, RuntimeError | ValueError | TypeError)}
    if not y.requires_grad:
        return {"y": y}
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(y.square().sum(), [x, *named.values()], allow_unused=True)
    return {"y": y.detach(), **dict(zip(("x", *named), grads, strict=True))}


def same(ours: nn.Module, theirs: nn.Module, what: str) -> None:
    found, expected = results(ours), results(theirs)
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        if not isinstance(value, Tensor):
            assert (found[name] is None) == (value is None), f"{what}: {name}"
            continue
        if float(value.abs().max()) > ROUNDING:
            assert relative_error(found[name], value) < FORGOTTEN, f"{what}: {name}"


def edits(model: nn.Module) -> Iterator[tuple[str, Edit, str]]:
    for edit in WHOLE:
        yield edit.__name__, edit, ""
    for edit in AT_MODULES:
        for name, _ in model.named_modules():
            yield f"{edit.__name__} at {name!r}", edit, name


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, graphs_run_eagerly: None) -> list[str]:
    """Grows with each run of what Dynamo compiled."""
    seen: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*given: Any) -> Any:
            seen.append("run")
            return graph(*given)

        return run

    def instead(target: Any, *, dynamic: bool, **_: Any) -> Any:
        return torch_compile(target, dynamic=dynamic, backend=backend)

    monkeypatch.setattr(torch, "compile", instead)
    return seen


def check(model: nn.Module, plain: nn.Module, title: str, runs: list[str]) -> None:
    """Every edit, on a copy of the rewritten model and on one of the model as it was."""

    def called(model: nn.Module) -> None:
        """Once, before the edit: what is kept from call to call is there."""
        if "compiled_forward" not in ROUTES[title].exercises:
            results(model)
            return
        torch._dynamo.reset()  # past a few compilations of one function it runs uncompiled
        runs.clear()
        results(model)
        assert runs, title

    same(model, plain, title)
    for what, edit, name in edits(plain):
        pair = [copy.deepcopy(model), copy.deepcopy(plain)]
        called(pair[0])
        for i, twin in enumerate(pair):
            made = edit(twin, name)
            pair[i] = twin if made is None else made
        if NotImplemented not in pair:
            same(pair[0], pair[1], f"{title}: {what}")
    for kind in ("forward", "pre", "always"):
        called(model)
        with _Global(kind):
            same(model, plain, f"{title}: global {kind} hook")
    for kind in (nn.Linear, nn.ReLU, nn.LeakyReLU):
        called(model)
        own = kind.forward
        try:
            kind.forward = lambda self, x, own=own: own(self, x) + 1  # type: ignore[assignment]
            same(model, plain, f"{title}: another forward in {kind.__name__}")
        finally:
            kind.forward = own  # type: ignore[method-assign]
    same(model, plain, f"{title}: nothing more")


@pytest.mark.parametrize("name", ROUTES)
def test_later_edits_hold(name: str, clock: Clock, runs: list[str]) -> None:
    clock(CLOCK)
    route = rewritten(name)
    missing = ROUTES[name].exercises - exercised(route)
    assert not missing, [(s.fqn, s.code, s.route, s.reason) for s in route.result.sites]
    check(route.model, route.plain, name, runs)


def test_no_route_is_forgotten() -> None:
    """Between them the models above have every maker of forwards, chain and fused call there is."""
    tested = set().union(*(route.exercises for route in ROUTES.values()))
    assert discovered() <= tested, discovered() - tested
