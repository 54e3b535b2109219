"""Chains that run in parts: layers that take the input again, activations that differ."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.activations.reference import ACTIVATIONS
from fastlinear.core.compare import judge
from fastlinear.core.errors import InputError
from fastlinear.families.mlp.cuda import operands
from fastlinear.families.mlp.op import explain
from fastlinear.families.mlp.parts import joined, parts

SKIPS = ({2: "first"}, {2: "last"}, {1: "last", 3: "first"}, {})
NAMES = ("relu", "gelu", "gelu")


def drawn(
    shape: tuple[int, ...], skips: dict[int, str], dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    widths, first = (shape[-1], 24, 16, 33, 3), shape[-1]
    torch.manual_seed(len(skips))
    weights: list[Tensor] = []
    for i in range(4):
        k = widths[i] + (first if i in skips else 0)
        weights.append(torch.randn(widths[i + 1], k, dtype=dtype, device=device) / k**0.5)
    biases: list[Tensor | None] = [torch.randn(n, dtype=dtype, device=device) for n in widths[1:]]
    biases[1] = None
    return torch.randn(shape, dtype=dtype, device=device), weights, biases


def written_out(x: Tensor, weights: Any, biases: Any, names: Any, skips: dict[int, str]) -> Tensor:
    h = x
    for i, (weight, bias, name) in enumerate(zip(weights, biases, names, strict=True)):
        if i in skips:
            h = torch.cat((x, h) if skips[i] == "first" else (h, x), -1)
        h = ACTIVATIONS[name].value(nn.functional.linear(h, weight, bias))
    return h


def results(run: Any, x: Tensor, weights: Any, biases: Any, wide: bool = False) -> list[Tensor]:
    """y and all gradients."""
    leaves = [t.detach().clone() for t in (x, *weights, *(b for b in biases if b is not None))]
    leaves = [(t.double() if wide else t).requires_grad_() for t in leaves]
    rest = iter(leaves[1 + len(weights) :])
    held = [None if b is None else next(rest) for b in biases]
    y = run(leaves[0], leaves[1 : 1 + len(weights)], held)
    return [y, *torch.autograd.grad(y.square().sum(), leaves)]


def in_a_graph(run: Any, *given: Any) -> list[Tensor]:
    """``results`` of a CUDA graph's replay."""
    for _ in range(2):
        results(run, *given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(run, *given)
    graph.replay()
    return found


def compiled(run: Any, *given: Any) -> list[Tensor]:
    """``results`` of a compiled function."""
    torch.compiler.reset()
    return results(torch.compile(run, fullgraph=True), *given)


def check(
    device: str, skips: dict[int, str], hidden: Any, dtype: torch.dtype, results_of: Any = results
) -> None:
    given = drawn((5, 7, 13), skips, dtype, device)
    names = ((hidden,) * 3 if isinstance(hidden, str) else hidden) + ("tanh",)

    def ours(x: Tensor, ws: Any, bs: Any) -> Tensor:
        return fl.mlp(x, ws, bs, hidden, "tanh", skips=skips)

    def theirs(x: Tensor, ws: Any, bs: Any) -> Tensor:
        return written_out(x, ws, bs, names, skips)

    oracle = results(theirs, *given, wide=True)
    triples = zip(results_of(ours, *given), results(theirs, *given), oracle, strict=True)
    for i, (mine, torchs, exact) in enumerate(triples):
        verdict = judge(str(i), mine, torchs, exact)
        assert verdict.passed, verdict


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden", ["silu", NAMES], ids=["one", "differing"])
@pytest.mark.parametrize("skips", SKIPS, ids=str)
def test_against_the_oracle(skips: dict[int, str], hidden: Any, dtype: torch.dtype) -> None:
    check("cpu", skips, hidden, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("skips", SKIPS, ids=str)
@pytest.mark.parametrize("results_of", [results, in_a_graph, compiled])
def test_against_the_oracle_on_a_gpu(
    skips: dict[int, str], dtype: torch.dtype, results_of: Any
) -> None:
    check("cuda", skips, NAMES, dtype, results_of)


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    x, weights, biases = drawn((64, 13), {2: "first"}, torch.bfloat16, "cuda")
    for _ in range(2):
        fl.mlp(x, weights, biases, skips=(2,))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fl.mlp(x, weights, biases, skips=(2,))
    x.normal_()
    graph.replay()
    assert torch.equal(y, fl.mlp(x, weights, biases, skips=(2,)))


@pytest.mark.gpu
@pytest.mark.parametrize("by", [lambda run: run, torch.compile], ids=["eager", "compiled"])
def test_joined_rows_are_read_where_they_lie(by: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    x, weights, biases = drawn((300, 13), {2: "first"}, torch.bfloat16, "cuda")
    h = torch.randn(300, 16, dtype=torch.bfloat16, device="cuda")
    assert joined(x, h, "first").is_contiguous()  # few rows, for which the host decides
    monkeypatch.setattr("fastlinear.families.mlp.parts._LEAST_BYTES", 0)
    assert operands.on_16_bytes(joined(x, h, "first"))
    assert joined(x[None], h[None], "last").stride() == (300 * 32, 32, 1)
    copied, copy = [], operands.aligned_copy

    def watched(t: Tensor) -> Tensor:
        copied.append(t.shape)
        return copy(t)

    monkeypatch.setattr(operands, "aligned_copy", watched)
    leaves = [w.requires_grad_() for w in weights]

    def run(x: Tensor, *ws: Tensor) -> Tensor:
        return fl.mlp(x, ws, biases, skips=(2,), backend="rows_cuda")

    torch.compiler.reset()
    torch.autograd.grad(by(run)(x, *leaves).sum(), leaves)
    assert (300, 13) in copied
    assert (300, 29) not in copied


def test_as_few_parts_as_possible() -> None:
    assert parts(("relu", "relu", "relu", "none"), ()) == [(0, 4)]
    assert parts(("relu", "relu", "gelu", "none"), ()) == [(0, 3), (3, 4)]
    assert parts(("relu", "gelu", "gelu", "none"), ()) == [(0, 2), (2, 4)]
    assert parts(("relu", "relu", "relu", "none"), {2: "first"}) == [(0, 2), (2, 4)]
    assert parts(("none",), ()) == [(0, 1)]


def test_numbers_of_layers_alone_have_the_input_first() -> None:
    given = drawn((6, 13), {2: "first"}, torch.float32)
    assert torch.equal(fl.mlp(*given, skips=(2,)), fl.mlp(*given, skips={2: "first"}))


def test_empty_batches_vectors_and_autocast() -> None:
    skips = {1: "last"}
    for shape in ((0, 13), (13,), (2, 0, 13)):
        x, weights, biases = drawn(shape, skips, torch.float32)
        assert fl.mlp(x, weights, biases, skips=skips).shape == (*shape[:-1], 3)
    x, weights, biases = drawn((5, 13), skips, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert fl.mlp(x, weights, biases, skips=skips).dtype == torch.bfloat16


def test_compiled_as_one_graph() -> None:
    x, weights, biases = drawn((5, 13), {2: "first"}, torch.float32)

    def run(x: Tensor) -> Tensor:
        return fl.mlp(x, weights, biases, NAMES, skips=(2,))

    torch.compiler.reset()
    net = fl.nn.MLP([13, 8, 8, 2], ("relu", "gelu"), skips={1: "last"})
    for plain in (run, net):
        assert torch.allclose(torch.compile(plain, fullgraph=True)(x), plain(x), atol=1e-6)


def test_second_derivatives() -> None:
    x, weights, biases = drawn((5, 13), {2: "first"}, torch.float64)
    x.requires_grad_()
    given = [w.requires_grad_() for w in weights]

    def run(x: Tensor, *ws: Tensor) -> Tensor:
        return fl.mlp(x, ws, biases, "tanh", skips=(2,)).sum()

    assert torch.autograd.gradgradcheck(run, (x, *given))


def test_errors_name_the_layer_of_the_whole_chain() -> None:
    x, weights, biases = drawn((5, 13), {2: "first"}, torch.float32)
    wrong: list[tuple[Any, str]] = [
        ({0: "first"}, "received 0"),
        ({4: "first"}, "received 4"),
        ({True: "first"}, "received True"),
        ({2: "middle"}, r"skips\[2\]"),
        ("ab", "numbers of layers"),
        ([[1]], r"received \[1\]"),
        ({3: "first"}, r"weights\[2\] of shape \(N, 16\)"),
        ({2: "first", 3: "last"}, r"weights\[3\] of shape \(N, 46\).*with x beside it"),
    ]
    for skips, message in wrong:
        with pytest.raises(InputError, match=message):
            fl.mlp(x, weights, biases, skips=skips)
    for hidden, message in ((("relu",), "3 hidden layers"), (("relu", "no", "relu"), "'no'")):
        with pytest.raises(InputError, match=message):
            fl.mlp(x, weights, biases, hidden, skips=(2,))
    with pytest.raises(InputError, match=r"biases\[3\]"):
        fl.mlp(x, weights, [*biases[:3], torch.ones(5)], skips=(2,))


def test_explained_by_parts() -> None:
    x, weights, biases = drawn((5, 13), {2: "first"}, torch.float32)
    told = explain(x, weights, biases, skips=(2,))
    assert [c.problem.dim("L") for c in told.choices] == [2, 2]
    assert [c.problem.dim("K") for c in told.choices] == [13, 29]
    weights[0].requires_grad_()
    assert len(explain(x, weights, biases, skips=(2,)).choices) > 2


class TestModule:
    def net(self) -> fl.nn.MLP:
        return fl.nn.MLP([13, 24, 16, 33, 3], NAMES, "tanh", skips={2: "last"})

    def test_is_the_function(self) -> None:
        net, x = self.net(), torch.randn(5, 13)
        weights = [layer.weight for layer in net.layers()]
        biases = [layer.bias for layer in net.layers()]
        assert [tuple(w.shape) for w in weights] == [(24, 13), (16, 24), (33, 29), (3, 33)]
        assert net.sizes == (13, 24, 16, 33, 3)
        expected = fl.mlp(x, weights, biases, NAMES, "tanh", skips={2: "last"})
        assert torch.equal(net(x), expected)
        assert "skips={2: 'last'}" in repr(net)
        for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert torch.equal(twin(x), expected)

    def test_layers_with_hooks_are_called(self) -> None:
        net, x, seen = self.net(), torch.randn(5, 13), []
        expected = net(x)
        net.layers()[2].register_forward_hook(lambda _, given, __: seen.append(given[0].shape))
        assert torch.allclose(net(x), expected, atol=1e-6)
        assert seen == [(5, 29)]

    def test_pickled_before_there_were_skips(self) -> None:
        net = fl.nn.MLP([13, 8, 2])
        del net.skips
        assert net(torch.randn(5, 13)).shape == (5, 2)

    def test_no_sequential_of_skips(self) -> None:
        with pytest.raises(InputError, match="skips of"):
            self.net().to_sequential()

    def test_sequentials_of_differing_activations(self) -> None:
        layers = nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)
        sequential, x = nn.Sequential(*layers), torch.randn(5, 3)
        net = fl.nn.MLP.from_sequential(sequential)
        assert net.activation == ("relu", "tanh")
        assert torch.allclose(net(x), sequential(x), atol=1e-6)
        back = net.to_sequential()
        assert [type(m) for m in back] == [type(m) for m in sequential]
        assert list(back.state_dict()) == list(sequential.state_dict())
