"""Fixtures of linear_act's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from interpreted import INTERPRETED, ON_GPU


@pytest.fixture
def poisoned_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Results of Triton's kernels start as NaN, so an element that is never written is seen; no
    plans are kept."""
    if not (INTERPRETED or ON_GPU):
        yield
        return
    from fastlinear.ops.linear_act import triton, triton_backward

    empty = triton._empty
    monkeypatch.setattr(triton, "_empty", lambda *a: empty(*a).fill_(float("nan")))
    for module in (triton, triton_backward):
        module._plans.clear()
    yield
    for module in (triton, triton_backward):
        module._plans.clear()
