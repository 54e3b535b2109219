"""experts under torch.compile and export, as registered ops, and as tapes of the fast path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import fastlinear as fl
from fastlinear.fastpath import autograd_node, lookup
from tests.families.experts.expert_calls import GPT_OSS, Call, drawn

CALLS: dict[str, Call] = {
    "plain": drawn(11, 2, 3, 16, 8, bias="none"),
    "biases": drawn(11, 2, 3, 16, 8, activation="gelu", stacked="up_gate"),
    "gpt-oss": drawn(11, 4, 6, 16, 8, stacked="interleaved", transposed=True, **GPT_OSS),
    "router": drawn(11, 2, 3, 16, 8, router=torch.float32, dtype=torch.bfloat16),
    "local": drawn(11, 2, 3, 16, 8, first_expert=5),
}
OPTIONS = ("silu", "gate_up", "inf 1.0 0.0", "0")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def close(found: Any, expected: Any) -> None:
    tolerance = 6e-2 if found[0].dtype is torch.bfloat16 else 2e-5
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b.to(a.dtype), rtol=tolerance, atol=tolerance)


def trained(function: Any, call: Call) -> list[Tensor]:
    given = [t.detach().requires_grad_() for t in call.tensors if t is not None]
    y = function(*given)
    return [y, *torch.autograd.grad(y, given, call.dy)]


def run_of(call: Call, backend: str | None) -> Any:
    some = [t is not None for t in call.tensors]

    def run(*given: Tensor) -> Tensor:
        left = iter(given)
        x, weight, *rest = [next(left) if there else None for there in some]
        return fl.experts(x, call.index, weight, *rest, backend=backend, **call.options)  # type: ignore[arg-type]

    return run


@pytest.mark.parametrize("backend", [None, "cpp"])
@pytest.mark.parametrize("recompute", [0, 1])
@pytest.mark.parametrize("name", CALLS)
def test_forward_and_backward_in_one_graph(name: str, recompute: int, backend: str | None) -> None:
    call = CALLS[name]
    call.options["recompute"] = recompute
    try:
        run = run_of(call, backend)
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        expected = [t for t in call.expected() if t is not None]
        close(trained(compiled, call), expected)
        with torch.no_grad():
            given = [t for t in call.tensors if t is not None]
            close([compiled(*given)], expected[:1])
    finally:
        call.options.pop("recompute")


def test_dynamic_shapes_compile_once() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    _, _, gate_up, down, *_ = CALLS["plain"].tensors
    compiles = set()

    def run(x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return fl.experts(x, index, weight, gate_up, down)  # type: ignore[arg-type]

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (5, 9, 33):
        call = drawn(tokens, 2, 3, 16, 8, bias="none")
        x, weight, *_ = call.tensors
        assert x is not None
        x.requires_grad_()
        y = compiled(x, call.index, weight)
        (dx,) = torch.autograd.grad(y, x, call.dy)
        expected = run(x, call.index, weight)  # type: ignore[arg-type]
        close([y, dx], [expected, *torch.autograd.grad(expected, x, call.dy)])
        compiles.add(counter.frame_count)
    assert len(compiles) == 1  # the first call's


@pytest.mark.slow
def test_inductor() -> None:
    call = CALLS["biases"]
    compiled = torch.compile(run_of(call, "cpp"), fullgraph=True)
    close(trained(compiled, call), [t for t in call.expected() if t is not None])


def test_an_exported_program_gives_the_same() -> None:
    call = CALLS["plain"]
    x, weight, gate_up, down, *_ = call.tensors

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
            return fl.experts(x, index, weight, gate_up, down)  # type: ignore[arg-type]

    program = torch.export.export(Layer(), (x, call.index, weight))
    assert "fastlinear.experts" in str(program.graph)
    found = program.module()(x, call.index, weight)
    close([found], [fl.experts(x, call.index, weight, gate_up, down)])  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["", "cpp", "eager"])
@pytest.mark.parametrize("recompute", [False, True])
def test_opcheck(recompute: bool, backend: str) -> None:
    if recompute and backend == "eager":
        pytest.skip("keeps what PyTorch's autograd keeps")
    call = drawn(6, 2, 3, 8, 4)
    x, weight, *rest = [t if t is None else t.requires_grad_() for t in call.tensors]
    gate_up, down, *biases = rest
    tensors = x, gate_up, down, call.index, weight, *biases
    for grad in (False, True):
        given = (*tensors, *OPTIONS, recompute, grad, backend)
        torch.library.opcheck(torch.ops.fastlinear.experts, given)


@pytest.mark.parametrize("needs", [(True,) * 3 + (False, True, True, True), (False,) * 6 + (True,)])
def test_opcheck_backward(needs: tuple[bool, ...]) -> None:
    call = drawn(6, 2, 3, 8, 4, dtype=torch.bfloat16, router=torch.float32)
    x, weight, gate_up, down, *biases = call.tensors
    tensors = x, gate_up, down, call.index, weight, *biases
    for backend in ("eager", "cpp"):
        saved = torch.ops.fastlinear.experts(*tensors, *OPTIONS, False, True, backend)[1]
        given = (call.dy, [saved], *tensors, *OPTIONS, False, list(needs), backend)
        torch.library.opcheck(torch.ops.fastlinear.experts_backward, given)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CALLS)
def test_on_a_gpu(name: str, nodes_built: None) -> None:
    """Later calls are tapes of the same bits; compiled ones may be captured; nothing waits."""
    call = CALLS[name].to(CALLS[name].dy.dtype, "cuda")
    first = [t for t in call.run("triton") if t is not None]
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            again = [t for t in call.run("triton") if t is not None]
            assert len(again) == len(first)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    oracle = [t.to("cuda") for t in call.to(call.dy.dtype).expected() if t is not None]
    close(first, oracle)
    compiled = torch.compile(run_of(call, "triton"), fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        close([t.clone() for t in trained(compiled, call)], oracle)


@pytest.mark.skipif(lookup.reason_not() is not None, reason="no compiled fast path here")
@pytest.mark.parametrize("name", CALLS)
def test_calls_that_come_again_give_the_same_bits(name: str, nodes_built: None) -> None:
    """Where the products can be recorded, later calls are one node in C++."""
    assert lookup.wait(), lookup.reason_not()
    assert autograd_node.wait(), autograd_node.reason_not()
    call = CALLS[name]
    with torch.no_grad():
        given = [t for t in call.tensors if t is not None]
        run = run_of(call, "cpp")
        ys = [run(*given) for _ in range(5)]
    assert all(torch.equal(y, ys[0]) for y in ys)
    first, *others = (call.run("cpp") for _ in range(5))
    for again in others:
        for a, b in zip(first, again, strict=True):
            assert (a is None) == (b is None)
            assert a is None or b is None or torch.equal(a, b)
    assert first[0] is not None
    assert "ExpertsBackward" in type(first[0].grad_fn).__name__ + str(first[0].grad_fn)
