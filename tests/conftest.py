"""What every test gets: its own cache, a fixed seed, one thread; GPU tests only with a GPU.

A run compiles each C++ library once: its name covers the source, the compiler's call and torch.
"""

from __future__ import annotations

import os
import tempfile

# Before torch is imported anywhere: one thread, and never the user's own cache.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["FASTLINEAR_CACHE_DIR"] = tempfile.mkdtemp(prefix="fastlinear-tests-")
# The processes that a run starts, workers and others, inherit where its libraries lie.
os.environ.setdefault("FASTLINEAR_TESTS_BUILDS", os.environ["FASTLINEAR_CACHE_DIR"])

import atexit
import gc
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fastlinear.core.settings import cache_dir
from fastlinear.dispatch import cache, confidence
from fastlinear.fastpath import autograd_node, lookup
from fastlinear.native import cpp_build, library_store

# Workers compile side by side: no call is to take another backend meanwhile.
cpp_build.PATIENCE_S = cpp_build.LOCK_PATIENCE_S = 600.0

_OWN = Path(os.environ["FASTLINEAR_CACHE_DIR"])
_BUILDS = Path(os.environ["FASTLINEAR_TESTS_BUILDS"]) / "cpp"
_BUILDS.mkdir(mode=0o700, exist_ok=True)
if _BUILDS.parent != _OWN:
    (_OWN / "cpp").symlink_to(_BUILDS)


@atexit.register
def _remove(made_by: int = os.getpid()) -> None:
    if os.getpid() == made_by:  # no forked process
        shutil.rmtree(_OWN, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Tests and modules stay to the end: collecting garbage, as profiles do, passes them by."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def isolated(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A fresh tuned cache, a quiet machine, seed 0; global float32 and grad settings put back.

    No library is left among the temporary files, where another test would find it.
    """
    folder, temporary = tmp_path / "fastlinear-cache", tmp_path / "tmp"
    if "own_builds" in request.keywords:
        temporary.mkdir(mode=0o700)
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        for library in (lookup, autograd_node):  # one that fails here is to fail no later test
            monkeypatch.setattr(library, "_build", library._Build())
    else:
        folder.mkdir()
        (folder / "cpp").symlink_to(_BUILDS)
        monkeypatch.setattr(library_store, "folders", lambda: (cache_dir() / "cpp", _BUILDS))
    monkeypatch.setenv("FASTLINEAR_CACHE_DIR", str(folder))
    cache.forget()
    monkeypatch.setattr(confidence, "load_average", lambda: 0.0)  # others' work decides no test
    torch.manual_seed(0)
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.set_grad_enabled(True)
    cache.forget()
