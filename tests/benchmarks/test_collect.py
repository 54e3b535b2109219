"""Which calls ``python -m benchmarks collect`` measures."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks import collect
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import Backend


def _of_many_rows(backend: Backend, p: Problem) -> str | None:
    return None if backend.name == "triton" and p.dim("M") > 1000 else "serves many rows"


def test_only_calls_that_a_named_backend_can_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backend, "why_not_ready", _of_many_rows)

    def rows(*backends: str) -> list[int]:
        found = collect._drawn(("diagonal_linear",), 1, backends)
        return [case.problem.dim("M") for case in islice(found, 20)]

    assert min(rows()) <= 1000
    assert min(rows("triton")) > 1000
    assert rows("triton") == [m for m in rows("addcmul", "triton") if m > 1000]
