"""Recording PyTorch's ops: what it leaves behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from fastlinear.fastpath.aten_steps import composed


def test_two_threads_that_record_leave_no_mode_on() -> None:
    before = is_in_torch_dispatch_mode()  # where another test interrupted PyTorch, it stays on
    first_is_in, second_is_in, first_is_out = Event(), Event(), Event()

    def first(t: Tensor) -> Tensor:
        first_is_in.set()
        second_is_in.wait(0.3)  # it waits outside where one thread records at a time
        return t + 1

    def second(t: Tensor) -> Tensor:
        second_is_in.set()
        first_is_out.wait(0.3)
        return t * 2

    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(composed, first, 1)
        one.add_done_callback(lambda _: first_is_out.set())
        first_is_in.wait()
        two = threads.submit(composed, second, 1)
    assert [call.name for call in (*one.result()[0], *two.result()[0])] == [
        "aten::add",
        "aten::mul",
    ]
    assert is_in_torch_dispatch_mode() == before
