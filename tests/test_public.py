"""The public surface: its exact names, and what importing it must not do."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

import fastlinear

NAMES = [
    "CacheWarning",
    "Config",
    "FastlinearError",
    "InputError",
    "ModelLoadError",
    "NumericsError",
    "PlanError",
    "UnsupportedError",
    "__version__",
    "apply_",
    "diagonal_linear",
    "explain",
    "gated_linear",
    "gated_mlp",
    "graphed",
    "grouped_linear",
    "linear_act",
    "mlp",
    "nn",
    "optimize_",
    "profile",
    "ragged_linear",
    "release_memory",
    "unequal_linear",
]
HEAVY = ("triton", "transformers", "matplotlib", "rich", "typer", "jinja2", "sklearn")


def test_exports() -> None:
    assert sorted(fastlinear.__all__) == NAMES
    for name in NAMES:
        assert getattr(fastlinear, name) is not None
    assert callable(fastlinear.profile)
    assert fastlinear.nn.__all__ == ["MLP", "DiagonalLinear", "GatedMLP", "GroupedLinear", "Linear"]


def test_version_matches_the_package() -> None:
    try:
        installed = metadata.version("fastlinear")
    except metadata.PackageNotFoundError:
        pytest.skip("fastlinear runs from its source folder here")
    assert fastlinear.__version__ == installed


def test_import_is_light() -> None:
    code = (
        "import sys, fastlinear, torch;"
        f"print([m for m in {HEAVY!r} if m in sys.modules], torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False"


def test_import_warns_about_nothing() -> None:
    command = [sys.executable, "-W", "error::UserWarning:fastlinear", "-c", "import fastlinear"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
