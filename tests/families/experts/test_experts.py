"""experts: outputs and all gradients against a loop over slots in float64, by every backend.

The Triton passes run on a GPU, or under Triton's CPU interpreter in a process of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.dispatch.select import Choice
from fastlinear.families.experts import backends, reference, spec
from fastlinear.families.experts.spec import FRONT
from fastlinear.op.front import no_table
from tests.families.experts.expert_calls import GPT_OSS, NAMES, Call, check, drawn
from tests.families.interpreted import (
    DEVICE,
    INTERPRETED,
    ON_GPU,
    compares,
    run_interpreted,
    starts_it,
)

CALLS: dict[str, Call] = {
    "one": drawn(1, 1, 1, 1, 1),
    "odd": drawn(23, 3, 5, 33, 17),
    "aligned": drawn(40, 2, 4, 32, 48, bias="none"),
    "top 1": drawn(17, 1, 3, 24, 8, bias="down"),
    "many experts": drawn(9, 4, 50, 16, 24, bias="gate_up"),
    "interleaved": drawn(21, 2, 3, 20, 40, stacked="interleaved"),
    "up first": drawn(21, 2, 3, 20, 13, stacked="up_gate", bias="none"),
    "transposed": drawn(21, 2, 3, 24, 16, transposed=True),
    "gpt-oss": drawn(30, 4, 6, 40, 24, stacked="interleaved", transposed=True, **GPT_OSS),
    "wide": drawn(4, 2, 2, 540, 520, activation="gelu_tanh"),
    "later experts": drawn(19, 3, 4, 16, 24, first_expert=7, activation="gelu"),
    "recompute": drawn(19, 3, 4, 16, 24, recompute=1),
    "float32 router": drawn(25, 2, 4, 32, 16, router=torch.float32),
}
HALF = [torch.bfloat16, torch.float16]
TRITON = pytest.param("triton", marks=compares)
ON_CPU = pytest.mark.skipif(INTERPRETED, reason="runs compiled")
BACKENDS = [
    pytest.param("eager", marks=ON_CPU),
    pytest.param("cpp", marks=ON_CPU),
    pytest.param("batch_invariant", marks=ON_CPU),
    TRITON,
]


@starts_it
def test_under_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls take the Triton backend on any device; its results start as NaN."""
    from fastlinear.families.experts.triton import passes
    from fastlinear.families.grouped.ragged.triton import backend as ragged
    from fastlinear.families.grouped.triton import tensors

    made = tensors.vector
    monkeypatch.setattr(tensors, "vector", lambda *a: made(*a).fill_(float("nan")))
    (backend,) = [b for b in backends.FAMILY.candidates("forward") if b.name == "triton"]
    p = backends.problem("forward", 1, 1, 1, 1, 1, dtype="float32", device=DEVICE)
    monkeypatch.setattr(spec, "choices", lambda *_: (Choice(p, backend, "forced", "", ()),))
    monkeypatch.setattr(FRONT, "table", no_table)
    monkeypatch.setattr(FRONT, "plans", {})
    monkeypatch.setattr(FRONT, "_admit", lambda *_: None)
    passes._plans.clear()
    ragged._plans.clear()


def compared(call: Call, backend: str, frozen: tuple[str, ...] = ()) -> None:
    """As exact as PyTorch's own ops on outputs and gradients, and the same twice."""
    x = call.tensors[0]
    assert x is not None
    moved = call.to(x.dtype, DEVICE if backend == "triton" else "cpu")
    forced = None if backend == "triton" else backend  # the fixture forces Triton on any device
    own, again = moved.run(forced, frozen), moved.run(forced, frozen)
    for name, a, b in zip(("y", *NAMES), own, again, strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or torch.equal(a, b), name
        assert name not in frozen or a is None
    # the interpreter truncates to bfloat16
    factor = 8.0 if INTERPRETED and x.dtype is torch.bfloat16 else 2.0
    oracle = [t if t is None else t.to(moved.dy.device) for t in call.expected()]
    check(own, moved.by_torch(), oracle, factor)


@pytest.fixture
def _kernels(request: pytest.FixtureRequest) -> None:
    if request.getfixturevalue("backend") == "triton":
        request.getfixturevalue("kernels")


uses_kernels = pytest.mark.usefixtures("_kernels")
EVERY = pytest.mark.parametrize("backend", BACKENDS)


def served(call: Call, backend: str) -> Call:
    """The call, without what PyTorch's own autograd does not do."""
    keeps = backend == "eager" and "recompute" in call.options
    return replace(call, options={**call.options, "recompute": 0}) if keeps else call


@uses_kernels
@EVERY
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients(name: str, backend: str) -> None:
    compared(served(CALLS[name], backend), backend)


@uses_kernels
@EVERY
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["odd", "aligned", "interleaved", "up first", "float32 router"])
def test_16_bits(name: str, dtype: torch.dtype, backend: str) -> None:
    compared(CALLS[name].to(dtype), backend)


@uses_kernels
@EVERY
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str, backend: str) -> None:
    call = drawn(9, 2, 3, 8, 16, activation=activation)
    compared(call, backend)
    compared(replace(call, options={**call.options, **GPT_OSS}), backend)


@uses_kernels
@EVERY
@pytest.mark.parametrize("trained", [*NAMES, "x down", "topk_weight down_bias", "x topk_weight"])
def test_frozen_subsets(trained: str, backend: str) -> None:
    frozen = tuple(name for name in NAMES if name not in trained.split())
    compared(drawn(13, 2, 4, 16, 8), backend, frozen)
    if backend != "eager":
        compared(drawn(13, 2, 4, 16, 8, recompute=1), backend, frozen)


@uses_kernels
@EVERY
def test_float64_is_pytorchs(backend: str) -> None:
    if backend != "eager":
        pytest.skip("other backends have no float64")
    compared(CALLS["odd"].to(torch.float64), backend)


@uses_kernels
@EVERY
@pytest.mark.parametrize("index", ["none here", "one expert", "the same twice", "far outside"])
def test_uneven_routing(index: str, backend: str) -> None:
    """Experts without rows get exact zeros; nothing outside of the weights is read."""
    call = drawn(24, 2, 4, 16, 8)
    far = torch.tensor([-(1 << 62), (1 << 62) + 1, -1, 4, 1 << 32, 3])
    given = {
        "none here": torch.full((24, 2), -1),
        "one expert": torch.full((24, 2), 2),
        "the same twice": torch.arange(24)[:, None].expand(24, 2) % 4,
        "far outside": far[torch.arange(48).view(24, 2) % 6],
    }[index]
    call = replace(call, index=given)
    compared(call, backend)
    device = DEVICE if backend == "triton" else "cpu"
    found = call.to(torch.float32, device).run(None if backend == "triton" else backend)
    used = {e for e in given.flatten().tolist() if 0 <= e < 4}
    for e in range(4):
        if e not in used:
            assert not any(t[e].any() for t in found[3:] if t is not None)
    if not used:
        assert not any(t.any() for t in found if t is not None)


@uses_kernels
@EVERY
def test_nan_where_no_token_goes_is_not_seen(backend: str) -> None:
    call = drawn(24, 2, 4, 16, 8)
    call = replace(call, index=call.index.clamp(0, 2))
    clean = replace(call, tensors=tuple(t if t is None else t.clone() for t in call.tensors))
    for t in call.tensors[2:]:
        assert t is not None
        t[3] = float("nan")
    weight = call.tensors[1]
    assert weight is not None
    call.index[5, 1] = clean.index[5, 1] = -1
    weight[5, 1] = float("nan")
    device, forced = ("cpu", backend) if backend != "triton" else (DEVICE, None)
    own, expected = (c.to(torch.float32, device).run(forced) for c in (call, clean))
    for a, b in zip(own, expected, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


@uses_kernels
@EVERY
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_strided_tensors(kind: torch.dtype, backend: str) -> None:
    """Every tensor may lie in any order, and indices are of either width."""
    call = drawn(19, 3, 4, 16, 8)
    apart = tuple(None if t is None else torch.stack([t, t], -1)[..., 0] for t in call.tensors)
    index = torch.stack([call.index, call.index], -1)[..., 0].to(kind)
    compared(replace(call, index=index, tensors=apart), backend)
    x = call.tensors[0]
    assert x is not None
    turned = (x.t().contiguous().t(), *call.tensors[1:])
    compared(replace(call, tensors=turned, dy=call.dy[:1].expand(19, 16)), backend)


@uses_kernels
@EVERY
def test_no_tokens(backend: str) -> None:
    call = drawn(0, 2, 4, 16, 8)
    forced = None if backend == "triton" else backend
    found = call.to(torch.float32).run(forced)
    assert found[0] is not None
    assert found[0].shape == (0, 16)
    assert not any(t.any() for t in found if t is not None)


@uses_kernels
@EVERY
def test_second_derivatives(backend: str) -> None:
    if backend == "eager":
        pytest.skip("PyTorch's own")
    call = drawn(7, 2, 3, 8, 4)
    device, forced = ("cpu", backend) if backend != "triton" else (DEVICE, None)

    def twice(c: Call, by: str | None) -> Tensor:
        x, weight, *rest = [t if t is None else t.detach().requires_grad_() for t in c.tensors]
        y = fl.experts(x, c.index, weight, *rest, backend=by)  # type: ignore[arg-type]
        (dx,) = torch.autograd.grad(y, x, c.dy, create_graph=True)  # type: ignore[arg-type]
        (found,) = torch.autograd.grad(dx.square().sum(), rest[0])  # type: ignore[arg-type]
        return found

    expected = twice(call.to(torch.float64), "eager")
    own = twice(call.to(torch.float32, device), forced)
    torch.testing.assert_close(own.double().cpu(), expected, rtol=1e-4, atol=1e-5)


@compares
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("slots", [1, 15, 64, 5000])
def test_sorting_is_stable(slots: int) -> None:
    from fastlinear.families.experts.triton import passes

    sorted_by(passes, slots, DEVICE)


@ON_CPU
@pytest.mark.parametrize("slots", [1, 15, 64, 5000])
def test_sorting_is_stable_on_a_cpu(slots: int) -> None:
    from fastlinear.families.experts.cpu import passes

    sorted_by(passes, slots, "cpu")


def sorted_by(passes: Any, slots: int, device: str) -> None:
    index = torch.randint(-2, 9, (slots, 1), generator=torch.Generator().manual_seed(slots))
    order, place, sizes = (t.cpu() for t in passes.sort(index.to(device), 2, 5))
    keys = torch.where((index >= 2) & (index < 7), index - 2, 5).flatten()
    expected = keys.sort(stable=True).indices
    assert torch.equal(order.long(), expected)
    assert torch.equal(sizes.long(), keys.bincount(minlength=6)[:5])
    places = torch.empty_like(expected).scatter(0, expected, torch.arange(slots))
    assert torch.equal(place.long(), torch.where(keys < 5, places, -1))


@ON_CPU
def test_the_grouped_product_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What eager takes where it waits for nothing, here in bfloat16 on a CPU."""
    for name in ("aligned", "transposed", "later experts"):
        call = CALLS[name].to(torch.bfloat16)
        by_loop = call.by_torch()
        with monkeypatch.context() as patch:
            patch.setattr(reference, "has_grouped_product", lambda *_: True)
            check(call.by_torch(), by_loop, call.expected(), 2.0)


@ON_CPU
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(3, 4, 4)}, "x of shape"),
        ({"gate_up": torch.ones(2, 5, 4)}, "gate_up of shape"),
        ({"gate_up": torch.ones(2, 4, 6)}, "transposed=True"),
        ({"down": torch.ones(2, 4, 3)}, "down of shape"),
        ({"down": torch.ones(2, 4, 2).double()}, "down of x's dtype"),
        ({"topk_index": torch.zeros(5, 2).long()}, "topk_index of shape"),
        ({"topk_index": torch.zeros(3, 2)}, "topk_index of int32 or int64"),
        ({"topk_weight": torch.zeros(3, 1)}, "topk_weight of topk_index's shape"),
        ({"topk_weight": torch.zeros(3, 2).half()}, "topk_weight of x's dtype"),
        ({"topk_index": [[0]]}, "topk_index to be a tensor"),
        ({"gate_up_bias": torch.ones(2, 3)}, "gate_up_bias of shape"),
        ({"down_bias": torch.ones(4)}, "down_bias of shape"),
        ({"activation": "swish"}, "activation in"),
        ({"stacked": "apart"}, "stacked in"),
        ({"limit": 0.0}, "limit to be"),
        ({"limit": 1e60}, "limit to be"),
        ({"alpha": -1.0}, "alpha to be"),
        ({"alpha": 1e39}, "alpha to be"),
        ({"up_offset": "1"}, "up_offset to be"),
        ({"first_expert": -1}, "first_expert to be"),
        ({"recompute": 2}, "recompute to be"),
        ({"backend": "sorted"}, "backend in"),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "x": torch.ones(3, 4),
        "topk_index": torch.zeros(3, 2).long(),
        "topk_weight": torch.ones(3, 2),
        "gate_up": torch.ones(2, 4, 4),
        "down": torch.ones(2, 4, 2),
    }
    fl.experts(**given)
    with pytest.raises(InputError, match=message):
        fl.experts(**{**given, **change})


@ON_CPU
def test_what_a_backend_cannot_serve_is_said() -> None:
    call = drawn(5, 2, 3, 8, 4)
    with pytest.raises(UnsupportedError, match="CUDA devices only"):
        call.run("triton")
    with pytest.raises(UnsupportedError, match="not float64"):
        call.to(torch.float64).run("cpp")
    with pytest.raises(UnsupportedError, match="not x alone"):
        replace(call, options={"recompute": 1}).run("eager")


@ON_CPU
@pytest.mark.parametrize("backend", ["eager", "cpp"])
def test_autocast_leaves_the_router_alone(backend: str) -> None:
    call = drawn(12, 2, 3, 16, 8)
    with torch.autocast("cpu", torch.bfloat16):
        own = call.run(backend)
    assert own[0] is not None
    assert own[0].dtype is torch.bfloat16
    assert all(t is None or t.dtype is torch.float32 for t in own[1:])
    index, (x, weight, *rest) = call.index, call.tensors
    half = [None if t is None else t.bfloat16() for t in (x, *rest)]
    expected = fl.experts(half[0], index, weight, *half[1:], backend=backend)  # type: ignore[arg-type]
    assert torch.equal(own[0], expected)


@ON_CPU
def test_data_that_changed_is_refused_in_the_backward() -> None:
    call = drawn(12, 2, 3, 16, 8)
    x, weight, gate_up, down, *biases = [
        t if t is None else t.clone().requires_grad_() for t in call.tensors
    ]
    y = fl.experts(x, call.index, weight, gate_up, down, *biases, backend="cpp")  # type: ignore[arg-type]
    assert gate_up is not None
    gate_up.data = torch.ones(1, 2, 3)
    with pytest.raises(InputError, match="shapes they had in the forward"):
        y.sum().backward()


def independent(dtype: torch.dtype, device: str) -> None:
    call = drawn(40, 2, 4, 64, 48, dtype=dtype).to(dtype, device)
    x, weight, *rest = call.tensors

    def of(rows: slice) -> Tensor:
        given = x[rows], call.index[rows], weight[rows], *rest  # type: ignore[index]
        return fl.experts(*given, backend="batch_invariant")  # type: ignore[arg-type]

    whole = of(slice(None))
    for rows in (slice(0, 1), slice(3, 20), slice(39, 40)):
        assert torch.equal(of(rows), whole[rows])


@ON_CPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_do_not_depend_on_each_other(dtype: torch.dtype) -> None:
    independent(dtype, "cpu")


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_do_not_depend_on_each_other_on_a_gpu(dtype: torch.dtype) -> None:
    independent(dtype, "cuda")


@ON_CPU
def test_explain_names_every_backend() -> None:
    x, weight, gate_up, down, *_ = drawn(5, 2, 3, 8, 4).tensors
    index = torch.zeros(5, 2).long()
    found = fl.explain(x, gate_up, topk_index=index, topk_weight=weight, down=down)  # type: ignore[arg-type]
    (choice,) = found.choices
    assert choice.problem.family == "experts"
    assert {choice.backend.name, *(name for name, _ in choice.passed_over)} == {
        *("eager", "triton", "cpp")
    }


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cuda_graph_replays_other_routes(dtype: torch.dtype) -> None:
    """Forward and backward are captured once; what the index says may change."""
    call = drawn(64, 2, 4, 32, 16).to(dtype, "cuda")
    index = call.index.clone()
    captured = replace(call, index=index)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            captured.run("triton")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = captured.run("triton")
    for shift in (0, 1, 3):
        index.copy_((call.index + shift) % 4)
        graph.replay()
        expected = replace(call, index=index.clone()).run("triton")
        for a, b in zip(found, expected, strict=True):
            assert a is not None
            assert b is not None
            assert torch.equal(a, b)
