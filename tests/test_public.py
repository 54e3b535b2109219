"""The public surface: its exact names, and what importing it must not do."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import torch

import fastlinear
from fastlinear.families.declared import load_all
from fastlinear.op import library

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
    "batch_invariant",
    "diagonal_linear",
    "experts",
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
    "tune_at_first_use",
    "unequal_linear",
]
MOST_MODULES = 119  # of its own that `import fastlinear` loads
ROOT = Path(__file__).parents[1]
HEAVY = ("triton", "transformers", "matplotlib", "rich", "typer", "jinja2", "sklearn")


def test_exports() -> None:
    assert sorted(fastlinear.__all__) == NAMES
    for name in NAMES:
        assert getattr(fastlinear, name) is not None
    assert callable(fastlinear.profile)
    layers = ["MLP", "DiagonalLinear", "Experts", "GatedMLP", "GroupedLinear", "Linear"]
    assert fastlinear.nn.__all__ == layers


def test_version_matches_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert fastlinear.__version__ == project["version"]
    change_log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", change_log, re.M)[0] == project["version"]


def test_import_is_light() -> None:
    code = (
        "import sys, fastlinear, torch;"
        f"print([m for m in {HEAVY!r} if m in sys.modules], torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False"


def printed(code: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_few_modules() -> None:
    own = "sum(m.split('.')[0] == 'fastlinear' for m in sys.modules)"
    assert int(printed(f"import sys, fastlinear; print({own})")) <= MOST_MODULES


def test_names_are_there_before_they_are_loaded_and_kept_after() -> None:
    code = """
        import sys, fastlinear as fl
        assert set(fl.__all__) <= set(dir(fl))
        assert "fastlinear.families.mlp" not in sys.modules and "mlp" not in vars(fl)
        from fastlinear import mlp
        assert vars(fl)["mlp"] is mlp
        assert fl.nn.Linear and vars(fl)["nn"] is fl.nn
        try:
            fl.no_such_name
        except AttributeError as error:
            print(error)
    """
    assert printed(code) == "module 'fastlinear' has no attribute 'no_such_name'"


@pytest.mark.parametrize(
    "first", ["import fastlinear.profile.records", "import fastlinear.cli", "fl.optimize_"]
)
def test_profile_is_the_function_whatever_is_loaded_first(first: str) -> None:
    code = f"import fastlinear as fl; {first}; print(fl.profile.__module__, vars(fl)['profile'])"
    assert printed(code).startswith("fastlinear.rewrite.survey <function profile")


def test_a_compiled_function_may_be_the_first_to_name_an_op() -> None:
    code = """
        import torch, fastlinear as fl
        x, w = torch.ones(2, 3), torch.ones(4, 3)
        def f(x, w): return fl.linear_act(x, w, activation="relu")
        print(torch.compile(f, backend="eager", fullgraph=True)(x, w).sum().item())
    """
    assert printed(code) == "24.0"


def test_an_exported_program_runs_where_nothing_but_the_package_is_imported(
    tmp_path: Path,
) -> None:
    x = torch.randn(2, 6)
    model = torch.nn.Sequential(
        fastlinear.nn.Linear(6, 6, activation="gelu"),
        fastlinear.nn.MLP([6, 5, 6], activation="relu"),
        fastlinear.nn.GatedMLP(6, 8),
        fastlinear.nn.GroupedLinear(2, 3, 3),
        fastlinear.nn.DiagonalLinear(6),
    ).eval()
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(model, (x,)), path)
    code = f"""
        import sys, torch, fastlinear
        program = torch.export.load({str(path)!r})
        assert "fastlinear.families.mlp" not in sys.modules
        print(program.module()(torch.tensor({x.tolist()})).tolist())
    """
    torch.testing.assert_close(torch.tensor(eval(printed(code))), model(x))


CALLS = {
    "linear_act": "fl.linear_act(x, w, b)",
    "mlp": "fl.mlp(x, [w, w], [b, b])",
    "gated_linear": "fl.gated_linear(x, w, w)",
    "gated_mlp": "fl.gated_mlp(x, w, w, w)",
    "diagonal_linear": "fl.diagonal_linear(x, b)",
    "grouped_linear": "fl.grouped_linear(x, w[None], layout='... (g k)')",
    "ragged_linear": "fl.ragged_linear(x, w[None], torch.tensor([2]))",
    "unequal_linear": "fl.unequal_linear([x], [w])",
    "experts": "fl.experts(x, torch.tensor([[0], [1]]), b[:2, None], w[None, :2], w[None, :, :1])",
}


def test_every_op_may_be_the_first() -> None:
    code = f"""
        import os, torch, fastlinear as fl
        x, w, b = torch.ones(2, 3), torch.ones(3, 3), torch.ones(3)
        for name, call in {CALLS}.items():
            child = os.fork()
            if not child:
                eval(call)
                os._exit(0)
            print(name if os.waitpid(child, 0)[1] == 0 else "failed")
    """
    assert printed(code).split() == list(CALLS)


def test_an_op_may_be_loaded_by_a_trace() -> None:
    code = """
        import torch, fastlinear
        from torch._subclasses import FakeTensorMode
        with FakeTensorMode():
            x, w = torch.empty(2, 6), torch.empty(2, 5, 3)
            op = torch.ops.fastlinear.grouped_linear
            y = op(x, w, None, "none", "... (g k)", False, "")[0]
        print(type(y).__name__, tuple(y.shape))
    """
    assert printed(code) == "FakeTensor (2, 10)"


def test_every_declared_op_gets_its_functions() -> None:
    load_all()
    assert all(op.functions for op in library._OPS.values())


def test_import_warns_about_nothing() -> None:
    command = [sys.executable, "-W", "error::UserWarning:fastlinear", "-c", "import fastlinear"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
