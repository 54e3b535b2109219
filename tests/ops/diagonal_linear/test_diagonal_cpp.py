"""What only the C++ passes of diagonal_linear have: other ways to write, and threads."""

from __future__ import annotations

import itertools

import pytest
import torch

from fastlinear.ops.common import cpp_build
from fastlinear.ops.diagonal_linear import cpp

pytestmark = pytest.mark.skipif(cpp_build.reason_not() is not None, reason="no C++ here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(1, 1), (3, 5), (70, 33), (40, 1030), (9, 5000)])
def test_a_dx_written_around_the_caches_is_the_same(
    size: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, from any address on, and nothing beside it is touched."""
    m, k = size
    dy, x = (torch.randn(m, k).to(dtype) for _ in range(2))
    w, b = (torch.randn(k).to(dtype) for _ in range(2))
    for start, name in itertools.product((0, 1, 7), ("none", "gelu")):
        memory: list[torch.Tensor] = []

        def empty(
            shape: tuple[int, ...],
            like: torch.Tensor,
            start: int = start,
            memory: list[torch.Tensor] = memory,
        ) -> torch.Tensor:
            count = torch.Size(shape).numel()
            memory.append(torch.full((start + count + 40,), 7.0, dtype=like.dtype))
            return memory[-1][start : start + count].view(shape)

        monkeypatch.setattr(cpp, "_empty", empty)
        found = []
        for least in (0, 1 << 60):
            monkeypatch.setattr(cpp, "_PAST_BYTES", least)
            found.append(cpp.backward(dy, x, w, b, name, (True, True, True)))
        for past, plain in zip(*found, strict=True):
            assert past is not None
            assert plain is not None
            assert torch.equal(past, plain)
        for held in memory:
            assert bool((held[:start] == 7.0).all())
            assert bool((held[-40:] == 7.0).all())


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    dy, x, w, b = torch.randn(700, 90), torch.randn(700, 90), torch.randn(90), torch.randn(90)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(cpp.backward(dy, x, w, b, "silu", (True, True, True)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert one is not None
            assert two is not None
            assert torch.equal(one, two)
