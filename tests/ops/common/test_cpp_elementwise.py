"""The compiled passes: torch's thread count in every thread, equal results with any."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fastlinear.core.errors import UnsupportedError
from fastlinear.ops.common import cpp_build, cpp_elementwise
from fastlinear.ops.linear_act import cpp
from fastlinear.ops.linear_act.backends import problem

pytestmark = pytest.mark.skipif(
    cpp_elementwise.why_not_loaded() is not None, reason="no C++ compiler"
)


class Recorder:
    """Stands for the library: keeps the thread count (the last argument) of each call."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.threads: list[int] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.threads.append(arguments[-1])
            return int(getattr(self._library, name)(*arguments))

        return call


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder = Recorder(cpp_elementwise._library())
    monkeypatch.setattr(cpp_elementwise, "_library", lambda: recorder)
    before = torch.get_num_threads()
    yield recorder
    torch.set_num_threads(before)


def all_passes() -> None:
    y, x = torch.rand(8, 16), torch.rand(8, 4)
    cpp_elementwise.activate("silu", y, torch.empty_like(y))
    cpp_elementwise.differentiate("silu", y, y, True)
    cpp_elementwise.proves_no_nan(y, x, None)


def test_threads_follow_torch(recorded: Recorder) -> None:
    for count in (2, 1, 2):
        torch.set_num_threads(count)
        all_passes()
    assert recorded.threads == [2] * 3 + [1] * 3 + [2] * 3


def test_threads_follow_torch_in_a_new_thread(recorded: Recorder) -> None:
    """OpenMP's own default there is all the processor has."""
    torch.set_num_threads(1)
    thread = threading.Thread(target=all_passes)
    thread.start()
    thread.join()
    assert recorded.threads == [1] * 3


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (600, 129), (3, 20000)])
def test_any_thread_count_gives_the_same_bits(shape: tuple[int, int]) -> None:
    dy, saved = torch.randn(shape), torch.randn(shape)
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            y = torch.full_like(saved, torch.nan)
            cpp_elementwise.activate("gelu_tanh", saved, y)
            results.append((y, *cpp_elementwise.differentiate("gelu_tanh", dy, saved, True)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))  # type: ignore[arg-type]


def test_a_failed_compile_is_told_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The automatic choice leaves the backend out from then on; a forced one says why, at once."""
    runs: list[list[str]] = []

    def broken(command: list[str]) -> str:
        runs.append(command)
        return "the compiler's words"

    monkeypatch.setattr(cpp_build, "_failure", broken)
    monkeypatch.setattr(cpp_build, "_outcomes", {})
    cpp_elementwise._library.cache_clear()
    p = problem("forward", 64, 64, 64, dtype="float32", device="cpu", activation="silu")
    assert cpp.reason_not_forward(p) is None
    x = torch.randn(4, 4)
    try:
        for _ in range(3):
            with pytest.raises(UnsupportedError, match="the compiler's words"):
                cpp.forward(x, x, None, "silu", False)
        assert len(runs) == 1
        assert "the compiler's words" in str(cpp.reason_not_forward(p))
    finally:
        cpp_elementwise._library.cache_clear()
