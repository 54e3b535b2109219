"""A folder with a small user package, and a runner of the command line inside this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fastlinear.cli import app

Run = Callable[..., Result]

PACKAGE = """
import torch

WEIGHT = [1, 2]
module = torch.nn.Linear(4, 4)


def mlp():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


mlp.example_inputs = lambda: torch.randn(6, 8)


def no_inputs():
    return mlp()


def raises():
    raise RuntimeError("weights are missing")


def exits():
    raise SystemExit(0)


def exits_when_called():
    net = torch.nn.Sequential(torch.nn.Linear(8, 16))
    net.register_forward_hook(lambda *_: exits())
    return net


exits_when_called.example_inputs = mlp.example_inputs


def on_meta():
    return mlp().to("meta")


def meta_inputs():
    return {"x": torch.randn(6, 8, device="meta")}


def not_a_module():
    return {"model": mlp()}


def wrong_shape():
    return torch.randn(6, 9)


def of_nan():
    return torch.full((2, 4), float("nan"))


def four_wide():
    return torch.randn(6, 4)


def inputs_raise():
    raise ValueError("no data")


def inputs_text():
    return "text"


def inputs_list():
    return [torch.randn(6, 8)]


def pair():
    return (), {"input": torch.randn(6, 8)}


def positional():
    return (torch.randn(6, 8),)


def loss(output):
    return output.square().mean()


class Namespace:
    @staticmethod
    def build():
        return mlp()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, holding the package ``userpackage``; forgotten afterwards."""
    (tmp_path / "userpackage.py").write_text(PACKAGE)
    (tmp_path / "broken.py").write_text("import does_not_exist_anywhere\n")
    (tmp_path / "script.py").write_text("import sys\nsys.exit()\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before
    for name in ("userpackage", "broken", "script"):
        sys.modules.pop(name, None)


@pytest.fixture
def run(folder: Path) -> Run:
    """Run ``fastlinear ARGUMENTS``; stdout and stderr apart."""

    def call(*arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments), terminal_width=200)

    return call
