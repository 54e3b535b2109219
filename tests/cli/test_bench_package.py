"""``fastlinear bench`` and the package ``benchmarks``, which is in a checkout and in no wheel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastlinear.cli import bench

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the product alone, as a wheel leaves it; the current folder is another."""
    site = tmp_path / "lib" / "python" / "site-packages"
    site.mkdir(parents=True)
    (site / "fastlinear").symlink_to(ROOT / "src" / "fastlinear")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    return site


def _bench(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "fastlinear", "bench", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(installed)},
    )


def test_without_a_checkout_it_says_what_is_missing(installed: Path) -> None:
    foreign = Path.cwd() / "benchmarks"
    foreign.mkdir()
    (foreign / "__init__.py").write_text("raise SystemExit('another package of that name')\n")
    done = _bench(installed, "linear", "--quick")
    assert done.returncode == 5
    assert done.stdout == ""
    assert done.stderr.startswith("error: bench: expected the package benchmarks")
    assert "Clone the repository" in done.stderr


def test_a_clone_as_current_folder_serves_an_installed_product(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    done = _bench(installed, "--help")
    assert done.returncode == 0, done.stderr
    assert "Measure an experiment" in done.stdout


def test_a_checkout_is_found_from_anywhere(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(installed)])
    assert bench._root() == ROOT


def test_a_foreign_package_is_passed_over(tmp_path: Path) -> None:
    assert not bench._is_ours(tmp_path)
    (tmp_path / "__init__.py").write_text('"""Benchmarks of something else."""\n')
    assert not bench._is_ours(tmp_path)
    assert bench._is_ours(ROOT / "benchmarks")
