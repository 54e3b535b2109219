"""fl.mlp as people call it: numbers, shapes, states torch can be in, weights that change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.activations.reference import ACTIVATIONS, NAMES
from fastlinear.core.compare import judge
from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.families.mlp import op, reference
from fastlinear.families.mlp.spec import FRONT
from fastlinear.fastpath import lookup
from fastlinear.op.front import no_table

Net = tuple[Tensor, list[Tensor], list[Tensor | None]]


def net(
    m: int | tuple[int, ...],
    widths: tuple[int, ...],
    *,
    bias: str = "yes",
    dtype: torch.dtype = torch.float32,
) -> Net:
    weights = [torch.randn(n, k) * (2 / k) ** 0.5 for k, n in pairwise(widths)]
    given = {"yes": lambda i: True, "no": lambda i: False, "some": lambda i: i % 2 == 0}[bias]
    biases = [torch.randn(n).to(dtype) if given(i) else None for i, n in enumerate(widths[1:])]
    lead = m if isinstance(m, tuple) else (m,)
    return torch.randn(*lead, widths[0]).to(dtype), [w.to(dtype) for w in weights], biases


def wide(tensors: Any) -> Any:
    if isinstance(tensors, (list, tuple)):
        return [wide(t) for t in tensors]
    return None if tensors is None else tensors.double()


def chain(x: Tensor, ws: Any, bs: Any, activation: str, final: str) -> Tensor:
    """The layers one by one, written out apart from the package's own reference."""
    for i, (w, b) in enumerate(zip(ws, bs, strict=True)):
        name = final if i == len(ws) - 1 else activation
        x = ACTIVATIONS[name].value(torch.nn.functional.linear(x, w, b))
    return x


def check(x: Tensor, ws: Any, bs: Any, activation: str = "relu", final: str = "none") -> Tensor:
    """Twice torch's error at most."""
    names = activation, final
    y = fl.mlp(x, ws, bs, activation=activation, final_activation=final)
    given = bs if bs is not None else [None] * len(ws)
    theirs = chain(x, ws, given, *names)
    verdict = judge("y", y, theirs, chain(wide(x), wide(ws), wide(given), *names))
    assert verdict.passed, str(verdict)
    return y


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("final", ["none", "gelu", "sigmoid"])
def test_all_activations(activation: str, final: str) -> None:
    x, ws, bs = net(37, (20, 33, 40, 25))
    ws = [w * 0.5 for w in ws] if activation == "relu2" else ws
    check(x, ws, bs, activation, final)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("m", [1, 4, 5, 64, 300])
@pytest.mark.parametrize("bias", ["yes", "no", "some"])
def test_dtypes_batches_and_biases(dtype: torch.dtype, m: int, bias: str) -> None:
    x, ws, bs = net(m, (33, 64, 17, 65), bias=bias, dtype=dtype)
    check(x, ws, None if bias == "no" else bs)


@pytest.mark.parametrize("widths", [(64, 64), (1, 1), (7, 1, 9), (128,) * 9, (300, 20, 700)])
def test_widths_that_vary(widths: tuple[int, ...]) -> None:
    check(*net(70, widths))


def test_leading_shapes_and_strides() -> None:
    x, ws, bs = net((2, 3, 5), (8, 16, 4))
    assert check(x, ws, bs).shape == (2, 3, 5, 4)
    flat = torch.randn(8, 30).t()
    check(flat, ws, bs)
    check(torch.randn(30, 17)[:, ::2][:, :8], ws, bs)
    check(torch.randn(8).expand(6, 8), ws, bs)
    assert check(torch.randn(8), ws, bs).shape == (4,)
    check(x, [w.t().contiguous().t() for w in ws], bs)
    check(x, ws, [torch.randn(b.shape[0] * 2)[::2] for b in bs if b is not None])


def test_empty_batch_and_empty_widths() -> None:
    x, ws, bs = net(0, (8, 16, 4))
    assert fl.mlp(x, ws, bs).shape == (0, 4)
    x, ws, bs = net(3, (8, 16, 4))
    y = fl.mlp(x[:, :0], [ws[0][:, :0], ws[1]], bs)
    assert torch.equal(y, reference.mlp(x[:, :0], [ws[0][:, :0], ws[1]], bs, "relu", "none"))


def test_result_is_new_memory_and_inputs_are_untouched() -> None:
    for m in (1, 40):
        x, ws, bs = net(m, (16, 16, 16))
        kept = x.clone(), [w.clone() for w in ws]
        first = fl.mlp(x, ws, bs)
        copy = first.clone()
        second = fl.mlp(torch.randn(m, 16), ws, bs)
        assert torch.equal(first, copy)
        assert first.data_ptr() != second.data_ptr()
        assert torch.equal(x, kept[0])
        assert all(torch.equal(a, b) for a, b in zip(ws, kept[1], strict=True))


@pytest.mark.parametrize("m", [1, 3, 33, 600])
def test_weights_that_change_between_calls(m: int) -> None:
    """Never stale, however a weight is written to."""
    x, ws, bs = net(m, (48, 48, 48))
    check(x, ws, bs)
    with torch.no_grad():
        ws[0].mul_(2.0)
        check(x, ws, bs)
        ws[1][3, 5] = 7.0
        check(x, ws, bs)
        ws[0].data.add_(0.5)
        check(x, ws, bs)
        ws[0].data = torch.randn(48, 48)
        check(x, ws, bs)
        ws[1].data = ws[1].data.t()  # same memory, same shape, other strides
        check(x, ws, bs)
        ws[1] = torch.randn(48, 48)
        check(x, ws, bs)
        bs[0] = None
        check(x, ws, bs)
        numpy = ws[0].numpy()
        numpy[0, 0] += 3.0
        check(x, ws, bs)


def test_weights_of_a_freed_tensor_s_address() -> None:
    x, _, bs = net(2, (32, 32))
    for _ in range(20):
        check(x, [torch.randn(32, 32)], bs)


@pytest.mark.parametrize("enabled", [True, False])
def test_autocast(enabled: bool) -> None:
    x, ws, bs = net(9, (16, 24, 8))
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            y = fl.mlp(x, ws, bs)
            expected = reference.mlp(x, ws, bs, "relu", "none")
        assert y.dtype is expected.dtype
        assert torch.allclose(y, expected, rtol=0.02, atol=0.02)
        assert fl.mlp(x, ws, bs).dtype is torch.float32


def test_inference_mode_and_inference_tensors() -> None:
    x, ws, bs = net(3, (16, 16, 16))
    with torch.inference_mode():
        assert check(x, ws, bs).is_inference()
        made = net(3, (16, 16, 16))
        check(*made)
    check(x, ws, bs)
    assert not fl.mlp(x, ws, bs).is_inference()
    check(*made)


def test_transforms_subclasses_and_modes() -> None:
    x, ws, bs = net(6, (8, 12, 4))
    fl.mlp(x, ws, bs)
    expected = reference.mlp(x, ws, bs, "relu", "none")
    mapped = torch.func.vmap(lambda row: fl.mlp(row, ws, bs))(x)
    assert torch.allclose(mapped, expected, atol=1e-5)
    jac = torch.func.jacrev(lambda row: fl.mlp(row, ws, bs))(x[0])
    assert jac.shape == (4, 8)
    _, tangent = torch.func.jvp(lambda t: fl.mlp(t, ws, bs), (x,), (torch.ones_like(x),))
    assert tangent.shape == expected.shape

    class Odd(torch.Tensor):
        pass

    assert type(fl.mlp(x.as_subclass(Odd), ws, bs)) is Odd
    with pytest.raises(InputError, match="plain strided tensors"):
        fl.mlp(x.as_subclass(Odd), ws, bs, backend="whole_cpp")
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda t: fl.mlp(t, ws, bs))(x)
    assert torch.allclose(traced(x * 2), reference.mlp(x * 2, ws, bs, "relu", "none"), atol=1e-5)
    with torch.device("meta"):
        meta = fl.mlp(torch.empty(6, 8), [torch.empty(3, 8)], activation="relu")
    assert meta.shape == (6, 3)


def test_negative_bit() -> None:
    x, ws, bs = net(4, (8, 8))
    lazy = torch._neg_view(x)
    assert torch.equal(fl.mlp(lazy, ws, bs), fl.mlp(-x, ws, bs))


def test_containers() -> None:
    x, ws, bs = net(4, (8, 8, 8))
    expected = fl.mlp(x, ws, bs)
    assert torch.equal(fl.mlp(x, tuple(ws), tuple(bs)), expected)
    held = torch.nn.ParameterList([torch.nn.Parameter(w, requires_grad=False) for w in ws])
    assert torch.equal(fl.mlp(x, held, bs), expected)


def test_threads_share_plans_but_not_scratch() -> None:
    nets = [net(m, (96, 64, 96)) for m in (1, 7, 64, 200)]
    expected = [fl.mlp(*n) for n in nets]
    wrong: list[int] = []

    def work(i: int) -> None:
        wrong.extend(i for _ in range(50) if not torch.equal(fl.mlp(*nets[i]), expected[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(nets))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


BAD: list[tuple[str, Callable[[Tensor, list[Tensor], list[Any]], Any], str]] = [
    ("one tensor", lambda x, w, b: fl.mlp(x, w[0]), "weights as a sequence"),
    ("none at all", lambda x, w, b: fl.mlp(x, []), "at least one weight"),
    ("biases too few", lambda x, w, b: fl.mlp(x, w, b[:1]), "one bias"),
    ("a bias tensor", lambda x, w, b: fl.mlp(x, w, b[0]), "biases as a sequence"),
    ("wrong x", lambda x, w, b: fl.mlp(x[:, :3], w, b), r"weights\[0\] of shape \(N, 3\)"),
    ("wrong middle", lambda x, w, b: fl.mlp(x, [w[0], w[1][:, :5]], b), r"weights\[1\]"),
    ("transposed", lambda x, w, b: fl.mlp(x, [w[0], w[1].t()], b), "looks transposed"),
    ("bias length", lambda x, w, b: fl.mlp(x, w, [b[0], b[1][:2]]), r"biases\[1\] of shape"),
    ("bias type", lambda x, w, b: fl.mlp(x, w, [b[0], 1.0]), r"biases\[1\] to be a tensor"),
    ("3-D weight", lambda x, w, b: fl.mlp(x, [w[0][None], w[1]], b), r"weights\[0\] of shape"),
    ("integers", lambda x, w, b: fl.mlp(x.int(), w, b), "x of a dtype"),
    ("dtype", lambda x, w, b: fl.mlp(x, [w[0], w[1].double()], b), r"weights\[1\] of x's dtype"),
    ("activation", lambda x, w, b: fl.mlp(x, w, b, activation="swish"), "activation in"),
    ("unhashable", lambda x, w, b: fl.mlp(x, w, b, activation=[["relu"]]), "activation in"),
    ("final", lambda x, w, b: fl.mlp(x, w, b, final_activation="x"), "final_activation"),
    ("backend", lambda x, w, b: fl.mlp(x, w, b, backend=3), "backend to be a name"),
    ("fast", lambda x, w, b: fl.mlp(x, w, b, allow_fast_matmul=1), "allow_fast_matmul"),
    (
        "device",
        lambda x, w, b: fl.mlp(x, [w[0], w[1].to("meta")], b),
        r"weights\[1\] on x's device",
    ),
    ("list of floats", lambda x, w, b: fl.mlp([1.0], w, b), "x to be a tensor"),
]


@pytest.mark.parametrize(("call", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input(call: Callable[..., Any], message: str) -> None:
    x, ws, bs = net(5, (8, 6, 4))
    with pytest.raises(InputError, match=message):
        call(x, ws, bs)
    check(x, ws, bs)


def test_forced_backends_and_explain() -> None:
    x, ws, bs = net(5, (8, 6, 4))
    expected = fl.mlp(x, ws, bs, backend="eager")
    for name in ("eager", "layerwise", "whole_cpp"):
        assert torch.allclose(fl.mlp(x, ws, bs, backend=name), expected, atol=1e-5)
        assert fl.explain(x, ws, bs, backend=name).choices[0].backend.name == name
    with pytest.raises(UnsupportedError, match="CUDA"):
        fl.mlp(x, ws, bs, backend="whole_cuda")
    for name in ("no", "strassen"):
        with pytest.raises(InputError, match="backend in"):
            fl.mlp(x, ws, bs, backend=name)
    story = fl.explain(x, ws, bs, needs_grad=True)
    assert [c.problem.piece for c in story.choices][:2] == ["forward", "backward"]
    assert "not whole_cuda" in str(story)
    assert [c.problem.family for c in fl.explain(x, ws[0], bs[0]).choices] == ["linear_act"]
    with pytest.raises(InputError, match=r"weights\[1\]"):
        fl.explain(x, [ws[0], ws[0]])


def test_float64_and_float16_take_what_serves_them() -> None:
    x, ws, bs = net(5, (8, 6, 4), dtype=torch.float64)
    assert fl.explain(x, ws, bs).choices[0].backend.name == "eager"


def test_without_the_compiled_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python lookup alone does the same."""
    monkeypatch.setattr(lookup, "table", lambda _: None)
    monkeypatch.setattr(FRONT, "table", no_table)
    for _ in range(2):
        x, ws, bs = net(6, (16, 20, 3), bias="some")
        check(x, ws, bs)
        ws[0].requires_grad_()
        fl.mlp(x, ws, bs).sum().backward()
        assert ws[0].grad is not None


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(dynamic: bool) -> None:
    x, ws, bs = net(6, (16, 20, 3), bias="some")
    compiled = torch.compile(
        lambda t: fl.mlp(t * 2, ws, bs, activation="gelu") + 1,
        fullgraph=True,
        backend="aot_eager",
        dynamic=dynamic,
    )
    for m in (6, 9):
        x = torch.randn(m, 16)
        expected = reference.mlp(x * 2, ws, bs, "gelu", "none") + 1
        assert torch.allclose(compiled(x), expected, atol=1e-5)


@pytest.mark.parametrize("final", ["none", "relu", "gelu"])
@pytest.mark.parametrize("grad", [True, False])
def test_opcheck(final: str, grad: bool) -> None:
    x, ws, bs = net(5, (6, 7, 3), bias="some")
    tensors = [x, *ws, *[b for b in bs if b is not None]]
    for t in tensors:
        t.requires_grad_(grad)
    args = (x, ws, [b for b in bs if b is not None], [b is not None for b in bs])
    torch.library.opcheck(torch.ops.fastlinear.mlp.default, (*args, "gelu", final, grad, ""))


MUTATIONS: dict[str, Callable[..., Tensor]] = {
    "bias left out": lambda x, w, b: fl.mlp(x, w, [None, *b[1:]]),
    "layers swapped": lambda x, w, b: fl.mlp(x, [w[1], w[0], w[2]], [b[1], b[0], b[2]]),
    "last activation": lambda x, w, b: fl.mlp(x, w, b, final_activation="relu"),
    "other activation": lambda x, w, b: fl.mlp(x, w, b, activation="leaky_relu"),
    "transposed weight": lambda x, w, b: fl.mlp(x, [w[0].t(), *w[1:]], b),
    "a layer less": lambda x, w, b: fl.mlp(x, w[1:], b[1:]),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_rule_catches_mutations(mutation: str) -> None:
    x, ws, bs = net(20, (16, 16, 16, 16))
    wrong = MUTATIONS[mutation](x, ws, bs)
    theirs = reference.mlp(x, ws, bs, "relu", "none")
    oracle = reference.mlp(wide(x), wide(ws), wide(bs), "relu", "none")
    assert not judge("y", wrong, theirs, oracle).passed
    assert judge("y", fl.mlp(x, ws, bs), theirs, oracle).passed


def on_cuda(x: Tensor, ws: Any, bs: Any) -> Net:
    return x.cuda(), [w.cuda() for w in ws], [None if b is None else b.cuda() for b in bs]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widths", [(64,) * 5, (100, 30, 7), (256, 256, 256), (600, 40, 600)])
@pytest.mark.parametrize("m", [1, 33, 300])
def test_on_cuda(m: int, widths: tuple[int, ...], dtype: torch.dtype) -> None:
    check(*on_cuda(*net(m, widths, bias="some", dtype=dtype)))


@pytest.mark.gpu
def test_inside_a_cuda_graph() -> None:
    x, ws, bs = on_cuda(*net(33, (64, 64, 64)))
    fl.mlp(x, ws, bs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fl.mlp(x, ws, bs)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        ws[0].mul_(1.1)
        graph.replay()
        assert torch.allclose(y, reference.mlp(x, ws, bs, "relu", "none"), rtol=1e-3, atol=1e-3)


def test_the_activations_may_be_positional() -> None:
    x, ws, bs = net(5, (8, 8, 3))
    y = fl.mlp(x, ws, bs, "gelu", "silu")
    assert torch.equal(y, fl.mlp(x, ws, bs, activation="gelu", final_activation="silu"))
    assert torch.equal(op.by_formula(x, ws, bs, "gelu", "silu"), y)
    assert op.explain(x, ws, bs, "gelu", "silu") is not None
    with pytest.raises(TypeError, match="positional"):
        fl.mlp(x, ws, bs, "gelu", "silu", "eager")  # type: ignore[misc]
