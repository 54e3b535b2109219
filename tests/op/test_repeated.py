"""What registered ops run: Python the first calls of a kind, tapes the later ones.

But for one test the second call is recorded here, so that few are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.dispatch import cache
from fastlinear.families import declared
from fastlinear.fastpath import autograd_node, lookup
from fastlinear.op import library, registered, repeated

declared.load_all()
K = 16


def draw(*shape: int) -> Tensor:
    return torch.randn(shape)


def layers(given: Tensor) -> tuple[Any, ...]:
    return given, [draw(K, K), draw(5, K)], [draw(K), draw(5)], [True, True]


# family → x → operands and options, before whether gradients are wanted
CALLS: dict[str, Any] = {
    "linear_act relu": lambda x: (x, draw(7, K), draw(7), "relu"),
    "linear_act gelu": lambda x: (x, draw(7, K), None, "gelu"),
    "mlp": lambda x: (*layers(x), "gelu", "none"),
    "gated_mlp": lambda x: (
        *(x, draw(K, K), draw(K, K), draw(3, K), draw(K), None, draw(3)),
        *("silu", "apart", False),
    ),
    "diagonal_linear": lambda x: (x, draw(K), draw(K), x.clone(), "gelu"),
    "grouped_linear": lambda x: (x, draw(2, 7, 8), draw(2, 7), "relu", "... (g k)"),
    "ragged_linear": lambda x: (x, draw(3, 7, K), torch.tensor([3, 0, 3]), draw(3, 7), "relu"),
    "experts": lambda x: (
        *(x, draw(3, 8, K), draw(3, K, 4), torch.tensor([[0, 2]] * len(x)), draw(len(x), 2)),
        *(draw(3, 8), None, "silu", "interleaved", "inf 1.0 0.0", "0", False),
    ),
}
OPERANDS = {"experts": 7, "gated_mlp": 7, "diagonal_linear": 4, "ragged_linear": 4}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    assert lookup.wait(120), lookup.reason_not()
    assert autograd_node.wait(300), autograd_node.reason_not()
    monkeypatch.setattr(repeated, "SIGHTS", 2)
    cache.forget()
    yield
    cache.forget()


def tensors(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    return [t for one in given for t in tensors(one)] if isinstance(given, list | tuple) else []


def trained(name: str, call: tuple[Any, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """What the forward gives; what the backward is given, and gives."""
    op = name.split()[0]
    made = tensors(library.call(op, *call, True, ""))
    count = OPERANDS.get(op, 3)
    operands, options = call[:count], call[count:]
    y, *saved = [t for t in made if t.numel()]
    saved = [*saved, y] if "relu" in call else saved
    needs = [t is not None and t.is_floating_point() for t in _flat(operands)]
    needs[-1] = needs[-1] and op != "diagonal_linear"  # its gradient is that of the result
    back = y.new_ones(y.shape), saved, *operands, *options, needs, ""
    return made, library.call(f"{op}_backward", *back)


def _flat(operands: tuple[Any, ...]) -> list[Tensor | None]:
    return [t for one in operands for t in (one if isinstance(one, list) else [one])]


@pytest.mark.parametrize("name", CALLS)
def test_tapes_give_what_python_gives(
    name: str, recordings: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        trained(name, CALLS[name](draw(6, K)))
    assert len(recordings) == 2
    assert None not in recordings
    for _ in range(2):  # of new numbers
        call = CALLS[name](draw(6, K))
        made, grads = trained(name, call)
        assert len(recordings) == 2
        with monkeypatch.context() as python:
            python.setattr(repeated.Repeated, "__call__", lambda self, *given: self._run(*given))
            expected = trained(name, call)
        for found, wanted in zip((made, grads), expected, strict=True):
            for a, b in zip(found, wanted, strict=True):
                assert torch.equal(a, b)
                assert a.stride() == b.stride()
                assert not a.requires_grad
        memory = [t.untyped_storage().data_ptr() for t in (*made, *grads) if t.numel()]
        memory += [t.untyped_storage().data_ptr() for t in tensors(call)]
        assert len(set(memory)) == len(memory)


def test_kinds_are_told_apart(recordings: list[Any]) -> None:
    """By shapes, strides, options, what is saved, and lengths of lists."""
    x, w = draw(6, K), draw(K, K)
    for given in (x, x[:5], x.t().contiguous().t()):
        for activation in ("relu", "gelu"):
            for grad in (False, True):
                for _ in range(3):
                    y, saved = library.call("linear_act", given, w, None, activation, grad, "")
                    expected = getattr(torch.nn.functional, activation)(given @ w.t())
                    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
                    assert bool(saved.numel()) == (grad and activation == "gelu")
    assert len(recordings) == 12
    for count in (2, 3):
        weights, flags = [w] * count, [False] * count
        for _ in range(3):
            y, _ = library.call("mlp", x, weights, [], flags, "relu", "none", False, "")
            expected = x
            for i in range(count):
                expected = expected @ w.t()
                expected = expected.relu() if i < count - 1 else expected
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)
    assert len(recordings) == 14


def test_a_gradient_that_is_not_wanted_is_empty() -> None:
    x, w, dy = draw(6, K), draw(7, K), draw(6, 7)
    for needs in ([True, False, False], [False, True, False], [False, True, True]):
        for _ in range(4):
            call = dy, [], x, w, draw(7), "none", needs, ""
            grads = library.call("linear_act_backward", *call)
            assert [bool(g.numel()) for g in grads] == needs
            for g, expected in zip(grads, (dy @ w, dy.t() @ x, dy.sum(0)), strict=True):
                if g.numel():
                    torch.testing.assert_close(g, expected, rtol=1e-4, atol=1e-4)


def test_what_is_tuned_forgets_the_tapes(recordings: list[Any]) -> None:
    call = draw(6, K), draw(7, K), None, "relu", False, ""
    for _ in range(3):
        library.call("linear_act", *call)
    assert len(recordings) == 1
    cache.forget()
    for _ in range(3):
        library.call("linear_act", *call)
    assert len(recordings) == 2


def test_a_forced_backend_keeps_its_own(recordings: list[Any]) -> None:
    x, w = draw(6, K), draw(7, K)
    for backend in ("eager", "gemm_cpp"):
        for _ in range(3):
            y, _ = library.call("linear_act", x, w, None, "relu", False, backend)
            torch.testing.assert_close(y, (x @ w.t()).relu(), rtol=1e-4, atol=1e-5)
    assert len(recordings) == 2


@pytest.mark.parametrize("backend", ["cpp", "eager", "batch_invariant"])
def test_sizes_that_python_reads_are_in_no_tape(backend: str) -> None:
    x, w = draw(6, K), draw(3, 7, K)
    for sizes in ([6, 0, 0], [0, 6, 0], [1, 2, 3], [2, 0, 2]):
        groups = torch.tensor(sizes)
        y, _ = library.call("ragged_linear", x, w, groups, None, "none", True, backend)
        parts = [
            part @ m.t() for part, m in zip(x.split([*sizes, 6 - sum(sizes)]), w, strict=False)
        ]
        expected = torch.cat([*parts, x.new_zeros(6 - sum(sizes), 7)])
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
        back = torch.ones(6, 7), [], x, w, groups, None, "none", [True, True, False, False], backend
        dx, dw, _ = library.call("ragged_linear_backward", *back)[:3]
        rows = torch.repeat_interleave(torch.arange(3), groups)
        torch.testing.assert_close(dx[: len(rows)], w.sum(1)[rows], rtol=1e-4, atol=1e-5)
        sums = torch.zeros(3, K).index_add(0, rows, x[: len(rows)])
        torch.testing.assert_close(dw[:, 0], sums, rtol=1e-4, atol=1e-5)


def test_a_kind_is_recorded_when_that_will_have_paid(
    recordings: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated, "SIGHTS", 10)
    call = draw(6, K), draw(7, K), None, "relu", False, ""
    for sights in range(1, 13):
        library.call("linear_act", *call)
        assert len(recordings) == (sights >= 10)


@pytest.mark.parametrize("name", CALLS)
def test_results_may_be_changed_in_place(name: str) -> None:
    """Autograd refuses that of views, which a result in another shape would be."""
    for _ in range(4):
        y = tensors(library.call(name.split()[0], *CALLS[name](draw(6, K)), True, ""))[0]
        assert not y._is_view()


def test_compiled_results_may_be_changed_in_place() -> None:
    run = torch.compile(
        lambda x, w: fl.linear_act(x, w, activation="gelu"), backend="aot_eager", fullgraph=True
    )
    w = draw(7, K).requires_grad_()
    for _ in range(4):
        run(draw(2, 3, K), w).mul_(2)


def test_results_begin_as_compiled_code_takes_them() -> None:
    memory = torch.arange(40.0)
    for begin, stride in ((0, 1), (4, 1), (1, 1), (4, 2)):
        given = memory[begin:][: 8 * stride : stride]
        found = registered._as_compiled(given)
        assert torch.equal(found, given)
        assert found.is_contiguous()
        assert found.data_ptr() % 16 == 0
