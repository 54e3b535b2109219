"""A family of one spec, one reference and one backend: what the front end gives it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from fastlinear.cli import app
from fastlinear.cli.doctor import doctor
from fastlinear.core.cost import Cost
from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.dispatch import backend as registry
from fastlinear.dispatch.backend import Backend, Family, register_family
from fastlinear.dispatch.select import select
from fastlinear.dispatch.space import Space
from fastlinear.dispatch.tune import tune
from fastlinear.fastpath import lookup
from fastlinear.op import library
from fastlinear.op.command import Command, Option, Request
from fastlinear.op.front import Front, public
from fastlinear.op.registered import Traced, register
from fastlinear.op.spec import Arguments, OpSpec, Resolved
from tests.families.contract import Contract

RAN: list[str] = []


def reference(x: Tensor, weight: Tensor, _: None, mode: str, backend: str | None = None) -> Tensor:
    return x * weight if mode == "times" else x + weight


def forward(x: Tensor, weight: Tensor, mode: str) -> Tensor:
    RAN.append(mode)
    return reference(x, weight, None, mode)


def eager(x: Tensor, weight: Tensor, mode: str) -> Tensor:
    return reference(x, weight, None, mode)


def make_inputs(p: Problem, device: torch.device, seed: int) -> tuple[Any, ...]:
    numbers, dtype = torch.Generator().manual_seed(seed), FLOAT_DTYPES[p.dtype]
    x = torch.randn(p.dim("M"), p.dim("K"), generator=numbers).to(dtype)
    return x, torch.randn(p.dim("K"), generator=numbers).to(dtype), p.option("mode")


def posed(piece: str, m: int, k: int, *, mode: str, **facts: Any) -> Problem:
    given = {"needs_grad": False, "precision": "n/a", "device": "cpu", **facts}
    return Problem("toy", piece, (("M", m), ("K", k)), options=(("mode", mode),), **given)


def examples(facts: Mapping[str, Any]) -> Mapping[str, Problem]:
    return {"": posed("forward", 4, 3, mode="plus", dtype="float32")}


def validate(x: Any, weight: Any, _: None, mode: Any, backend: Any) -> None:
    for name, t in (("x", x), ("weight", weight)):
        if not isinstance(t, Tensor):
            raise InputError("toy", f"{name} to be a tensor", type(t).__name__, "Convert it.")
    if mode not in ("times", "plus"):
        raise InputError("toy", "mode in times, plus", repr(mode), "Name one of them.")


def problem(arguments: Arguments, grad: bool) -> Problem:
    x, mode = arguments[0], arguments[3]
    return posed("forward", *x.shape, mode=mode, dtype="float32", needs_grad=grad)


def resolve(arguments: Arguments, grad: bool, autocast: bool) -> Resolved:
    mode = arguments[3]
    front.choices(arguments, False)  # a forced backend that cannot serve raises
    if grad:
        return Resolved(lambda x, weight, none: reference(x, weight, none, mode))

    def plan(x: Tensor, weight: Tensor, _: None) -> Tensor:
        return forward(x, weight, mode)

    return Resolved(plan, plan)


front = Front(
    OpSpec(
        name="toy",
        operands=("x", "weight", "none"),
        options=("mode", "backend"),
        validate=validate,
        reference=reference,
        resolve=resolve,
        problem=problem,
        train=lambda arguments, _: resolve(arguments, True, False),
        choices=lambda p, backend, _: (select(p, backend),),
    )
)
SPACE = Space(posed, sizes=((3, 5), (1, 1)), options={"mode": ("times", "plus")})


def described(call: Request) -> Arguments:
    return call.empty(call.m, call["width"]), call.empty(call["width"]), None, call["mode"]


COMMAND = Command(
    front,
    options=(
        Option("--width", "Features.", default=3),
        Option("--mode", "times or plus.", default="plus", kind=str),
    ),
    about="a product or a sum",
    remedy="It has --width and --mode.",
    arguments=described,
    without={"--activation": "It has no activation: leave the option out."},
)
library.declare_family(
    "toy", "Tensor x, Tensor weight, Tensor? none", "str mode", lambda: None, saves=0
)


def gradients(
    dy: Tensor, _: list[Tensor], call: Arguments, *rest: Any
) -> tuple[Tensor | None, ...]:
    x, weight, _none, mode, _backend = call
    times = mode == "times"
    return dy * weight if times else dy.clone(), (dy * x if times else dy).sum(0), None


register(
    front.spec,
    Traced(
        shape=lambda call: call[0].shape,
        forward=lambda call, chosen, keeps: (reference(*call), []),
        backward=gradients,
    ),
)


@public
def toy(x: Tensor, weight: Tensor, none: None = None, *, mode: str, backend: Any = None) -> Tensor:
    y: Tensor = front.call(x, weight, None, mode, backend)
    return y


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry.families()))
    here = f"{__name__}:forward"
    never = "serves nothing"
    backends = (
        Backend("toy", "forward", "own", here, lambda _: None),
        Backend("toy", "forward", "eager", f"{__name__}:eager", lambda _: None),
        Backend("toy", "forward", "other", here, lambda _: never),
    )
    register_family(
        Family(
            "toy",
            ("forward",),
            backends,
            make_inputs=make_inputs,
            reference=lambda _, inputs: eager(*inputs),
            cost=lambda _: Cost(0, 0),
            examples=examples,
            space=SPACE,
            command=f"{__name__}:COMMAND",
        )
    )
    front.forget()
    RAN.clear()
    yield
    front.forget()


X, W = torch.randn(4, 3), torch.randn(3)


def test_calls_and_gradients() -> None:
    assert torch.equal(toy(X, W, mode="plus"), X + W)
    weight = W.clone().requires_grad_()
    (found,) = torch.autograd.grad(toy(X, weight, mode="times").sum(), weight)
    torch.testing.assert_close(found, X.sum(0))


def test_a_warm_call_is_the_tables() -> None:
    if not lookup.wait(120):
        pytest.skip(str(lookup.reason_not()))
    for _ in range(3):
        toy(X, W, mode="times")
    table = lookup.table("toy")
    assert table is not None
    assert torch.equal(table.call(X, W, None, "times", None), X * W)
    assert table.call(X, W, None, "plus", None) is None


@pytest.mark.parametrize("mode", ["minus", None, []])
def test_bad_input_is_said_by_name(mode: Any) -> None:
    with pytest.raises(InputError, match="toy: expected mode"):
        toy(X, W, mode=mode)
    with pytest.raises(InputError, match="toy: expected x to be a tensor"):
        toy(None, W, mode="plus")  # type: ignore[arg-type]


def test_a_forced_backend_that_cannot_serve_says_why() -> None:
    with pytest.raises(UnsupportedError, match="serves nothing"):
        toy(X, W, mode="plus", backend="other")


def test_autocast_and_lazy_signs() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(3):
            assert toy(X, W, mode="times").dtype is torch.bfloat16
    negative = torch._neg_view(X)
    assert torch.equal(toy(negative, W, mode="plus"), -X + W)


def test_subclasses_transforms_and_compilers_take_torchs_ops() -> None:
    class Tagged(Tensor):
        pass

    assert type(toy(X.as_subclass(Tagged), W, mode="plus")) is Tagged
    expected = (X + W,)
    assert torch.equal(torch.vmap(lambda x: toy(x, W, mode="plus"))(X), expected[0])
    assert not RAN


@pytest.mark.parametrize("mode", ["times", "plus"])
def test_compilers_see_one_registered_op(mode: str) -> None:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    run = torch.compile(lambda x, w: toy(x, w, mode=mode), backend="aot_eager", fullgraph=True)
    y, expected = run(x, w), reference(x, w, None, mode)
    assert torch.equal(y, expected)
    given = (y.detach(), (x, w))
    found = torch.autograd.grad(y, given[1], given[0])
    for a, e in zip(found, torch.autograd.grad(expected, given[1], given[0]), strict=True):
        torch.testing.assert_close(a, e)
    op, call = torch.ops.fastlinear.toy.default, (x, w, None, mode, True, "")
    torch.library.opcheck(op, call)
    assert not RAN


def test_explain_tune_and_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    (choice,) = front.explain((X, W, None, "plus", None), None).choices
    assert (choice.backend.name, choice.source) == ("own", "default")
    assert dict(choice.passed_over)["other"] == "serves nothing"
    found = tune(choice.problem, rounds=3, budget_s=0.05)
    assert set(found.samples) == {"own", "eager"}
    assert found.rejected == {"other": "serves nothing"}
    assert found.stored
    doctor(json=True)
    rows = [r for r in json.loads(capsys.readouterr().out)["backends"] if r["family"] == "toy"]
    why = {r["backend"]: r["why_not"] for r in rows if r["device"] == "cpu"}
    assert why == {"own": None, "eager": None, "other": "serves nothing"}


@pytest.mark.parametrize("broken", [False, True])
def test_contract(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    contract, own = Contract(), registry.family("toy").backends[0]
    if broken:
        monkeypatch.setitem(globals(), "forward", lambda x, w, mode: reference(x, w, None, "plus"))
        registry._load.cache_clear()
    wrong = []
    for dtype in FLOAT_DTYPES:
        posed = list(contract.problems("toy", "forward", dtype, "cpu"))
        assert {(p.dims, p.option("mode")) for p in posed} >= {
            ((("M", 3), ("K", 5)), mode) for mode in ("times", "plus")
        }
        wrong += [line for p in posed for line in contract.failures(own, p)]
    assert bool(wrong) == broken
    registry._load.cache_clear()


def ran(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def test_command_line() -> None:
    call = ("toy", "--m", "8", "--width", "5", "--mode", "times")
    (told,) = json.loads(ran("explain", *call, "--device", "cpu", "--json").stdout)
    assert told["backend"] == "own"
    assert told["problem"]["dims"] == {"M": 8, "K": 5}
    assert told["problem"]["options"] == {"mode": "times"}
    tuned = ran("tune", *call, "--rounds", "5", "--budget", "0.05", "--json")
    assert set(json.loads(tuned.stdout)[0]["times_us"]) == {"own", "eager"}
    assert "times or plus." in ran("explain", "toy", "--help").stdout
    assert "a product or a sum" in ran("tune", "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("toy", "--mode", "minus"), "toy: expected mode in times, plus"),
        (("toy", "--k", "3"), "options (--width, --mode); received --k. It has --width and --mode"),
        (("toy", "--activation", "relu"), "received --activation. It has no activation"),
        (("linear_act", "--mode", "plus"), "received --mode. These belong to another op"),
        (("conv2d",), "experts, toy; received 'conv2d'"),
    ],
)
def test_command_line_errors(arguments: tuple[str, ...], expected: str) -> None:
    for command in ("explain", "tune"):
        assert expected in ran(command, *arguments).stderr
