"""Fixtures of linear_act's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.families.interpreted import INTERPRETED, ON_GPU


@pytest.fixture
def poisoned_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Results of Triton's kernels start as NaN, so an element that is never written is seen; no
    plans are kept."""
    if not (INTERPRETED or ON_GPU):
        yield
        return
    from fastlinear.families.linear.triton import backend, backward

    empty = backend._empty
    monkeypatch.setattr(backend, "_empty", lambda *a: empty(*a).fill_(float("nan")))
    for module in (backend, backward):
        module._plans.clear()
    yield
    for module in (backend, backward):
        module._plans.clear()
