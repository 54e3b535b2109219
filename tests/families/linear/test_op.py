"""The public function: shapes, strides, dtypes, autocast, odd callers, bad input."""

from __future__ import annotations

import gc
import threading
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fastlinear as fl
from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.core.compare import judge
from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.families.linear import reference
from fastlinear.families.linear.cpu import onednn
from fastlinear.families.linear.problem import PIECES, problem
from fastlinear.families.linear.spec import FRONT
from fastlinear.native import cpp_build

ONEDNN = onednn.reason_not(problem("forward", 1, 1, 1, dtype="float32", device="cpu")) is None
FORCED = [
    None,
    "eager",
    pytest.param("onednn", marks=pytest.mark.skipif(not ONEDNN, reason="oneDNN")),
]


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("backend", FORCED)
@pytest.mark.parametrize("shape", [(6,), (1, 6), (4, 6), (2, 3, 6), (1, 2, 1, 2, 6)])
def test_any_rank(shape: tuple[int, ...], backend: str | None) -> None:
    x, w, b = torch.randn(shape), torch.randn(5, 6), torch.randn(5)
    y = fl.linear_act(x, w, b, activation="silu", backend=backend)
    assert y.is_contiguous()
    close(y, F.silu(F.linear(x, w, b)))
    close(fl.linear_act(x, w, activation="silu", backend=backend), F.silu(F.linear(x, w)))


def views(*shape: int) -> dict[str, Tensor]:
    """The same shape laid out in memory in every way callers do."""
    rows, columns = shape
    return {
        "contiguous": torch.randn(shape),
        "transposed": torch.randn(columns, rows).t(),
        "rows sliced": torch.randn(2 * rows, columns)[::2],
        "columns sliced": torch.randn(rows, 2 * columns)[:, ::2],
        "left half": torch.randn(rows, 2 * columns)[:, :columns],
        "offset": torch.randn(rows, columns + 1)[:, 1:],
        "row expanded": torch.randn(1, columns).expand(shape),
        "column expanded": torch.randn(rows, 1).expand(shape),
        "scalar expanded": torch.randn(()).expand(shape),
        "transposed slice": torch.randn(2 * columns, rows + 3).t()[:rows, ::2],
        "overlapping": torch.randn(rows + columns).as_strided(shape, (1, 1)),
    }


VIEWS = list(views(2, 2))


@pytest.mark.parametrize("backend", FORCED)
@pytest.mark.parametrize("layout", VIEWS)
@pytest.mark.parametrize("which", ["x", "weight"])
def test_any_strides(which: str, layout: str, backend: str | None) -> None:
    x, w, b = torch.randn(7, 9), torch.randn(11, 9), torch.randn(11)
    if which == "x":
        x = views(7, 9)[layout]
    else:
        w = views(11, 9)[layout]
    for _ in range(2):  # the second call takes the plan of the first
        close(fl.linear_act(x, w, b, activation="gelu", backend=backend), F.gelu(F.linear(x, w, b)))


@pytest.mark.parametrize("backend", FORCED)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_bias_strides(requires_grad: bool, backend: str | None) -> None:
    x, w = torch.randn(7, 9), torch.randn(11, 9)
    fl.linear_act(x, w, torch.randn(11), activation="relu", backend=backend)
    for b in (torch.randn(22)[::2], torch.randn(1).expand(11), torch.randn(12)[1:]):
        b.requires_grad_(requires_grad)
        y = fl.linear_act(x, w, b, activation="relu", backend=backend)
        close(y, F.relu(F.linear(x, w, b)))
        if requires_grad:
            close(
                torch.autograd.grad(y.sum(), b),
                torch.autograd.grad(F.relu(F.linear(x, w, b)).sum(), b),
            )


@pytest.mark.parametrize("backend", FORCED)
def test_high_rank_strides(backend: str | None) -> None:
    w, b = torch.randn(5, 6), torch.randn(5)
    for x in (
        torch.randn(3, 2, 6).transpose(0, 1),
        torch.randn(6, 2, 3).permute(2, 1, 0),
        torch.randn(2, 1, 6).expand(2, 4, 6),
        torch.randn(2, 3, 12)[..., ::2],
    ):
        y = fl.linear_act(x, w, b, activation="tanh", backend=backend)
        close(y, torch.tanh(F.linear(x, w, b)))


@pytest.mark.parametrize("backend", FORCED)
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "sigmoid"])
@pytest.mark.parametrize(("m", "k", "n"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
def test_empty(m: int, k: int, n: int, activation: str, backend: str | None) -> None:
    x, w, b = (
        t.requires_grad_(True) for t in (torch.randn(m, k), torch.randn(n, k), torch.randn(n))
    )
    y = fl.linear_act(x, w, b, activation=activation, backend=backend)
    expected = reference.linear_act(x, w, b, activation)
    close(y, expected)
    if y.requires_grad:
        y.sum().backward()
        got = [t.grad for t in (x, w, b)]
        close(got, list(torch.autograd.grad(expected.sum(), (x, w, b))))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_dtypes(activation: str, dtype: torch.dtype) -> None:
    x, w, b = (t.to(dtype) for t in (torch.randn(4, 8), torch.randn(5, 8), torch.randn(5)))
    y = fl.linear_act(x, w, b, activation=activation)
    assert y.dtype is dtype
    own = reference.linear_act(x, w, b, activation)
    exact = reference.linear_act(x.double(), w.double(), b.double(), activation)
    assert judge("y", y, own, exact).passed


@pytest.mark.parametrize("backend", FORCED)
@pytest.mark.parametrize("grad", [False, True])
def test_autocast(grad: bool, backend: str | None) -> None:
    """dtype and value as nn.Linear's, gradients in the parameters' own dtype."""
    if backend is not None:
        why = onednn.reason_not(problem("forward", 4, 16, 8, dtype="bfloat16", device="cpu"))
        if why is not None:
            pytest.skip(why)
    layer = torch.nn.Linear(16, 8)
    x = torch.randn(4, 16)
    for p in layer.parameters():
        p.requires_grad_(grad)
    mine = fl.nn.Linear.from_linear(layer, "gelu", backend=backend)
    fl_before = mine(x)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = mine(x), F.gelu(layer(x))
        with torch.autocast("cpu", enabled=False):
            close(mine(x), fl_before)
    assert fl_before.dtype is torch.float32
    assert y.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    if grad:
        y.float().sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype is torch.float32
        torch.testing.assert_close(
            layer.weight.grad,
            torch.autograd.grad(expected.float().sum(), layer.weight)[0],
            rtol=5e-2,
            atol=5e-2,
        )


def test_autocast_leaves_float64_alone() -> None:
    x, w = torch.randn(4, 8).double(), torch.randn(5, 8).double()
    with torch.autocast("cpu", torch.bfloat16):
        y = fl.linear_act(x, w, activation="gelu")
        torch.testing.assert_close(y, F.gelu(F.linear(x, w)))


def test_autocast_accepts_mixed_dtypes() -> None:
    x, w, b = torch.randn(4, 8).bfloat16(), torch.randn(5, 8), torch.randn(5)
    with torch.autocast("cpu", torch.bfloat16):
        y = fl.linear_act(x, w, b, activation="relu")
        torch.testing.assert_close(y, F.relu(F.linear(x, w, b)))
    with pytest.raises(InputError, match="weight of x's dtype"):
        fl.linear_act(x, w, b, activation="relu")


def test_explain_reads_autocast() -> None:
    x, w, b = torch.randn(4, 8), torch.randn(5, 8), torch.randn(5)
    with torch.autocast("cpu", torch.bfloat16):
        (choice,) = fl.explain(x, w, b, activation="relu").choices
    assert choice.problem.dtype == "bfloat16"


def test_meta_and_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x, w, b = (t.to("meta") for t in (torch.randn(4, 8), torch.randn(5, 8), torch.randn(5)))
    assert fl.linear_act(x, w, b, activation="relu").shape == (4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert fl.linear_act(x, w, b, activation="relu").is_meta
    with FakeTensorMode():
        y = fl.linear_act(torch.empty(2, 3, 8), torch.empty(5, 8), activation="silu")
        assert y.shape == (2, 3, 5)
        layer = fl.nn.Linear(8, 5, activation="gelu")
        assert layer(torch.empty(7, 8)).shape == (7, 5)
    with torch.device("meta"):
        assert fl.nn.Linear(8, 5)(torch.empty(7, 8)).is_meta


class Tagged(torch.Tensor):
    """A tensor subclass that torch functions carry along."""


@pytest.mark.parametrize("which", [0, 1, 2])
def test_tensor_subclass_is_carried(which: int) -> None:
    plain = [torch.randn(4, 8), torch.randn(5, 8), torch.randn(5)]
    args = list(plain)
    args[which] = args[which].as_subclass(Tagged)
    y = fl.linear_act(*args, activation="relu")
    assert type(y) is Tagged
    close(y.as_subclass(torch.Tensor), F.relu(F.linear(*plain)))


def test_fx_records_one_call() -> None:
    net = torch.nn.Sequential(fl.nn.Linear(8, 6, activation="gelu"), torch.nn.Linear(6, 3))
    traced = torch.fx.symbolic_trace(net)
    assert [n.target for n in traced.graph.nodes if n.op == "call_function"] == [fl.linear_act]
    x = torch.randn(4, 8)
    close(traced(x), net(x))
    by_name = torch.fx.symbolic_trace(lambda x, w, b: fl.linear_act(x, w, b, activation="relu"))
    w, b = torch.randn(5, 8), torch.randn(5)
    close(by_name(x, w, b), F.relu(F.linear(x, w, b)))


@pytest.mark.skipif(cpp_build.reason_not() is not None, reason="no C++ compiler")
def test_what_records_torchs_ops_sees_them_all() -> None:
    """A trace of a call that our own kernel serves must not lose what the kernel does."""
    x, w, b = torch.randn(4, 8), torch.randn(5, 8), torch.randn(5)

    def call(x: Tensor) -> Tensor:
        return fl.linear_act(x, w, b, activation="silu", backend="cpp")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        traced = torch.jit.trace(call, (x,))
    other = torch.randn(4, 8)
    expected = F.silu(F.linear(other, w, b))
    close(call(other), expected)
    close(traced(other), expected)
    close(make_fx(call)(x)(other), expected)


def test_a_trace_may_be_the_first_call_of_its_kind() -> None:
    """Selection asks torch what the processor has, by an op that no trace can hold."""
    x, w = torch.randn(4, 9).bfloat16(), torch.randn(5, 9).bfloat16()

    def call(x: Tensor) -> Tensor:
        return fl.linear_act(x, w, activation="gelu")

    FRONT.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        traced = torch.jit.trace(call, (x,))
    close(traced(x + 1), F.gelu(F.linear(x + 1, w)))


def test_sparse_input_takes_torchs_path() -> None:
    x, w = torch.eye(6), torch.randn(5, 6)
    close(fl.linear_act(x.to_sparse(), w, activation="none"), F.linear(x, w))


def test_many_threads() -> None:
    x, w, b = torch.randn(8, 16), torch.randn(4, 16), torch.randn(4)
    expected = F.gelu(F.linear(x, w, b))
    wrong: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for j in range(60):
                rows = 1 + (i * 7 + j) % 8
                backend = ("onednn", None)[j % 2] if ONEDNN else None
                y = fl.linear_act(x[:rows], w, b, activation="gelu", backend=backend)
                close(y, expected[:rows])
                if j % 20 == 0:
                    FRONT.plans.clear()
        except BaseException as error:  # noqa: BLE001  (handed to the main thread)
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FRONT.spec.most_plans == 4096
    monkeypatch.setattr(FRONT, "spec", replace(FRONT.spec, most_plans=16))
    w = torch.randn(3, 2)
    for m in range(1, 60):
        fl.linear_act(torch.randn(m, 2), w, activation="relu")
        assert len(FRONT.plans) <= 16


def test_nothing_is_kept_alive() -> None:
    import weakref

    backends = [None, "onednn"] if ONEDNN else [None]
    for backend in backends:
        x, w, b = torch.randn(4, 8), torch.randn(5, 8), torch.randn(5)
        y = fl.linear_act(x, w, b, activation="relu", backend=backend)
        held = [weakref.ref(t) for t in (x, w, b, y)]
        del x, w, b, y
        gc.collect()
        assert [r() for r in held] == [None] * 4


def test_float32_precision_is_part_of_the_choice() -> None:
    x, w = torch.randn(4, 8), torch.randn(5, 8)
    for precision in ("highest", "high", "medium", "highest"):
        torch.set_float32_matmul_precision(precision)
        choice = fl.explain(x, w).choices[0]
        assert choice.problem.precision == precision
        close(fl.linear_act(x, w, activation="relu"), F.relu(F.linear(x, w)))


def test_explain_follows_the_tensors() -> None:
    x, w, b = torch.randn(4, 8), torch.randn(5, 8), torch.randn(5)
    assert [c.problem.piece for c in fl.explain(x, w, b).choices] == ["forward"]
    b.requires_grad_()
    explanation = fl.explain(x, w, b, activation="relu")
    assert [c.problem.piece for c in explanation.choices] == [*PIECES, "step"]
    assert all(c.problem.needs_grad for c in explanation.choices)
    assert len(fl.explain(x, w, b, needs_grad=False).choices) == 1
    assert "->" in str(explanation)


BAD = {
    "x a list": (lambda x, w, b: ([1.0], w, b, {}), "x to be a tensor", "list"),
    "weight None": (lambda x, w, b: (x, None, b, {}), "weight to be a tensor", "NoneType"),
    "bias a list": (lambda x, w, b: (x, w, [1.0], {}), "bias to be a tensor", "list"),
    "scalar x": (lambda x, w, b: (torch.tensor(1.0), w, b, {}), r"x of shape \(..., 8\)", r"\(\)"),
    "wrong K": (lambda x, w, b: (x[:, :7], w, b, {}), r"x of shape \(..., 8\)", r"\(4, 7\)"),
    "3-D weight": (lambda x, w, b: (x, w[None], b, {}), r"weight of shape \(N, K\)", "1, 5, 8"),
    "1-D weight": (lambda x, w, b: (x, w[0], b, {}), r"weight of shape \(N, K\)", r"\(8,\)"),
    "bias too long": (lambda x, w, b: (x, w, torch.ones(6), {}), r"bias of shape \(5,\)", "6"),
    "2-D bias": (lambda x, w, b: (x, w, b[None], {}), r"bias of shape \(5,\)", r"\(1, 5\)"),
    "int x": (lambda x, w, b: (x.int(), w.int(), None, {}), "a dtype in float64", "int32"),
    "complex": (lambda x, w, b: (x + 0j, w + 0j, None, {}), "a dtype in float64", "complex64"),
    "weight dtype": (lambda x, w, b: (x, w.double(), b, {}), "weight of x's dtype", "float64"),
    "bias dtype": (lambda x, w, b: (x, w, b.half(), {}), "bias of x's dtype", "float16"),
    "device": (lambda x, w, b: (x, w.to("meta"), b, {}), "weight on x's device cpu", "meta"),
    "activation": (lambda x, w, b: (x, w, b, {"activation": "swosh"}), "activation in", "swosh"),
    "no name": (lambda x, w, b: (x, w, b, {"activation": None}), "activation in", "None"),
    "unhashable": (lambda x, w, b: (x, w, b, {"activation": ["relu"]}), "activation in", "relu"),
    "backend": (lambda x, w, b: (x, w, b, {"backend": ["eager"]}), "backend to be a name", "eager"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    make, expected, received = BAD[case]
    x, w, b = torch.randn(4, 8), torch.randn(5, 8), torch.randn(5)
    # a plan of a good call must not let the bad one through
    fl.linear_act(x, w, b)
    *tensors, options = make(x, w, b)
    with pytest.raises(
        InputError, match=rf"linear_act: expected .*{expected}.*received.*{received}"
    ):
        fl.linear_act(*tensors, **options)


def test_every_input_error_offers_a_remedy() -> None:
    x, w, b = torch.randn(4, 8), torch.randn(5, 8), torch.randn(5)
    for case, (make, _, _) in BAD.items():
        *tensors, options = make(x, w, b)
        with pytest.raises(InputError) as caught:
            fl.linear_act(*tensors, **options)
        if "activation" not in caught.value.expected:  # there the names are the remedy
            assert caught.value.remedy, case


def test_transposed_weight_is_named() -> None:
    with pytest.raises(InputError, match=r"looks transposed: pass weight.t\(\)"):
        fl.linear_act(torch.randn(4, 8), torch.randn(8, 5))


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        ("cublaslt", "CUDA"),
        ("triton", "CUDA"),
        ("nonsense", "expected backend in"),
        ("", "backend"),
    ],
)
def test_forced_backend_that_cannot_serve(backend: str, why: str) -> None:
    kind = UnsupportedError if why == "CUDA" else InputError
    for x in (torch.randn(4, 8), torch.randn(0, 8)):
        with pytest.raises(kind, match=why) as caught:
            fl.linear_act(x, torch.randn(5, 8), torch.randn(5), activation="relu", backend=backend)
        assert caught.value.exit_code == (5 if why == "CUDA" else 2)
        assert caught.value.remedy


def test_every_fact_of_a_call_has_its_own_plan() -> None:
    """What selection reads must be in the key, or one call's plan serves another."""
    x, w, b = torch.randn(4, 8), torch.randn(8, 8), torch.randn(8)
    calls: list[Any] = [
        lambda: fl.linear_act(x, w, b),
        lambda: fl.linear_act(x[:2], w, b),
        lambda: fl.linear_act(x[None], w, b),
        lambda: fl.linear_act(torch.randn(8, 4).t(), w, b),
        lambda: fl.linear_act(x, w.t(), b),
        lambda: fl.linear_act(x, torch.randn(8, 16)[:, ::2], b),
        lambda: fl.linear_act(x, w),
        lambda: fl.linear_act(x.double(), w.double(), b.double()),
        lambda: fl.linear_act(x, w, b, activation="relu"),
        lambda: fl.linear_act(x, w, b, backend="eager"),
        lambda: fl.linear_act(x, w, b.clone().requires_grad_()),
        lambda: fl.linear_act(x.to("meta"), w.to("meta"), b.to("meta")),
    ]
    for count, call in enumerate(calls, 1):
        call()
        call()
        assert len(FRONT.plans) == count
    torch.set_float32_matmul_precision("high")
    fl.linear_act(x, w, b)
    assert len(FRONT.plans) == len(calls) + 1
    with torch.autocast("cpu", torch.bfloat16):
        fl.linear_act(x, w, b)
    assert len(FRONT.plans) == len(calls) + 2


def test_backends_are_given_what_they_may_rely_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """2-D x, a bias with unit stride, contiguous dy and saved, whatever the caller passes."""
    import sys
    import types
    from dataclasses import replace

    from fastlinear.dispatch import backend as registry

    seen: dict[str, Any] = {}
    spy = types.ModuleType("fastlinear_spy")

    def forward(x: Tensor, w: Tensor, b: Tensor, activation: str, save_pre: bool) -> Any:
        seen["forward"] = (x, b)
        return reference.forward(x, w, b, activation, save_pre)

    def grad_pre(dy: Tensor, saved: Tensor, activation: str, need_db: bool) -> Any:
        seen["grad_pre"] = (dy, saved)
        return reference.grad_pre(dy, saved, activation, need_db)

    def grad_weight(dpre: Tensor, x: Tensor) -> Tensor:
        seen["grad_weight"] = (dpre, x)
        return reference.grad_weight(dpre, x)

    spy.forward = forward  # type: ignore[attr-defined]
    spy.grad_pre, spy.grad_weight = grad_pre, grad_weight  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastlinear_spy", spy)
    fam = registry.family("linear_act")
    spies = tuple(
        registry.Backend("linear_act", piece, "spy", f"fastlinear_spy:{piece}", lambda _: None)
        for piece in ("forward", "grad_pre", "grad_weight")
    )
    others = sorted(fam.backends, key=lambda b: b.name != "pieces")
    spied = replace(fam, backends=(*spies, *others), cpu_work=None)
    monkeypatch.setitem(registry._FAMILIES, "linear_act", spied)

    w = torch.randn(5, 6, requires_grad=True)
    for x in (
        torch.randn(6),
        torch.randn(2, 3, 6),
        torch.randn(3, 2, 6).transpose(0, 1),
        torch._neg_view(torch.randn(4, 6)),  # its sign is in a flag, not in memory
    ):
        for b in (torch.randn(10)[::2], torch.randn(1).expand(5), torch._neg_view(torch.randn(5))):
            for activation in ("none", "relu", "gelu"):
                y = fl.linear_act(x, w, b, activation=activation)
                close(y, reference.linear_act(x, w, b, activation))
                y.sum().backward()  # an expanded gradient
                assert seen["forward"][0].dim() == 2
                assert not any(t.is_neg() for t in seen["forward"])
                assert seen["forward"][1].is_contiguous()
                dy, saved = seen["grad_pre"]
                _, x2 = seen["grad_weight"]
                assert dy.dim() == x2.dim() == 2
                assert dy.is_contiguous()
                assert saved is None or saved.is_contiguous()
