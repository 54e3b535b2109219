"""What every test gets: its own cache, a fixed seed, one thread; GPU tests only with a GPU."""

from __future__ import annotations

import os
import tempfile

# Before torch is imported anywhere: one thread, and never the user's own cache.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["FASTLINEAR_CACHE_DIR"] = tempfile.mkdtemp(prefix="fastlinear-tests-")

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fastlinear.dispatch import cache, doubt


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fresh tuned cache, a quiet machine, seed 0; global float32 and grad settings put back."""
    folder = tmp_path / "fastlinear-cache"
    monkeypatch.setenv("FASTLINEAR_CACHE_DIR", str(folder))
    cache.forget()
    monkeypatch.setattr(doubt, "load_average", lambda: 0.0)  # others' work decides no test
    torch.manual_seed(0)
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.set_grad_enabled(True)
    cache.forget()
