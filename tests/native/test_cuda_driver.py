"""The CUDA driver's wrappers against a driver of our own making: contexts and errors."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fastlinear.core.errors import FastlinearError
from fastlinear.native import cuda_driver
from fastlinear.native.cuda_driver import DriverError, TensorMap

INVALID_CONTEXT = 201


class Function:
    """A driver function that keeps its calls; ctypes lets callers set ``argtypes``."""

    def __init__(self, body: Callable[..., int]) -> None:
        self.body = body
        self.calls = 0

    def __call__(self, *arguments: Any) -> int:
        self.calls += 1
        return self.body(*arguments)


class Driver:
    """As the real one where it matters: a context is a thread's own, most calls need one."""

    def __init__(self) -> None:
        self.threads = threading.local()
        self.primary = 0xC0
        self.cuCtxGetCurrent = Function(self._get)
        self.cuCtxSetCurrent = Function(self._set)
        self.cuDevicePrimaryCtxRetain = Function(self._retain)
        self.cuGetErrorString = Function(self._text)
        self.cuTensorMapEncodeTiled = Function(self._needs_context)
        self.cuTensorMapReplaceAddress = Function(self._needs_context)
        self.cuLaunchKernelEx = Function(self._needs_context)

    def _get(self, out: Any) -> int:
        out._obj.value = getattr(self.threads, "context", None)
        return 0

    def _set(self, context: ctypes.c_void_p) -> int:
        self.threads.context = context.value
        return 0

    def _retain(self, out: Any, device: int) -> int:
        out._obj.value = self.primary + device
        return 0

    def _text(self, status: int, out: Any) -> int:
        out._obj.value = b"invalid device context" if status == INVALID_CONTEXT else b"other"
        return 0

    def _needs_context(self, *_: Any) -> int:
        return 0 if getattr(self.threads, "context", None) else INVALID_CONTEXT


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: made)
    cuda_driver._primary_context.cache_clear()
    yield made
    cuda_driver._primary_context.cache_clear()


def tensor_map(device: int = 0) -> TensorMap:
    return TensorMap("bfloat16", 64, 64, 64, 64, 64, 1 << 20, device)


def in_new_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_a_new_thread_may_make_the_first_descriptor(driver: Driver) -> None:
    tensor_map(device=3)
    assert driver.threads.context == driver.primary + 3


def test_a_new_thread_may_move_a_descriptor_made_elsewhere(driver: Driver) -> None:
    made = tensor_map(device=1)
    seen = in_new_thread(lambda: (made.point_at(2 << 20), driver.threads.context)[1])
    assert seen == driver.primary + 1
    assert made._address == 2 << 20


def test_a_thread_with_a_context_pays_nothing_and_keeps_it(driver: Driver) -> None:
    driver.threads.context = 0xBEEF
    made = tensor_map()
    asked = driver.cuCtxGetCurrent.calls
    made.point_at(2 << 20)
    assert driver.cuCtxGetCurrent.calls == asked
    assert driver.cuTensorMapReplaceAddress.calls == 1
    assert driver.threads.context == 0xBEEF
    made.point_at(2 << 20)
    assert driver.cuTensorMapReplaceAddress.calls == 1


def test_the_primary_context_is_retained_once(driver: Driver) -> None:
    for _ in range(3):
        in_new_thread(lambda: cuda_driver.make_current(0))
    assert driver.cuCtxSetCurrent.calls == 3
    assert driver.cuDevicePrimaryCtxRetain.calls == 1


def test_errors_are_fastlinears_and_say_what_failed(driver: Driver) -> None:
    driver.cuTensorMapReplaceAddress.body = lambda *_: 1
    made = tensor_map()
    with pytest.raises(DriverError, match="cuTensorMapReplaceAddress") as error:
        made.point_at(2 << 20)
    assert isinstance(error.value, FastlinearError)
    assert isinstance(error.value, RuntimeError)
    assert "error 1" in error.value.received
    assert made._address == 1 << 20, "a failed move is not remembered as done"


def test_a_context_that_cannot_be_had_is_told(driver: Driver) -> None:
    driver.cuDevicePrimaryCtxRetain.body = lambda *_: 101
    with pytest.raises(DriverError, match="cuDevicePrimaryCtxRetain"):
        tensor_map()
