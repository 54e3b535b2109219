"""Bad input: one clear line with expected, received and a remedy; the right exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import Result

import fastlinear.dispatch.tune
from fastlinear.core.errors import NumericsError, UnsupportedError

Run = Callable[..., Result]

BAD_INPUT, NUMERICS, UNSUPPORTED = 2, 3, 5
_REMEDY = "Do otherwise."


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("userpackage",), "expected package.module:attribute; received 'userpackage'"),
        (("nowhere.models:mlp",), "expected module 'nowhere.models' to be importable"),
        (("nowhere.models:mlp",), "Run from the folder that holds the package"),
        (("broken:mlp",), "No module named 'does_not_exist_anywhere'"),
        (("broken:mlp",), "Install does_not_exist_anywhere, which it imports."),
        (("script:mlp",), "It was found but does not load: `python -c 'import script'`"),
        (("userpackage:mpl",), "no 'mpl'; it has"),
        (("userpackage:raises",), "RuntimeError: weights are missing"),
        (("userpackage:exits",), "received SystemExit: 0"),
        (("userpackage:exits_when_called",), "received SystemExit(0) from it"),
        (("userpackage:mlp", "--inputs", "userpackage:exits"), "received SystemExit: 0"),
        (("script:mlp",), "received SystemExit"),
        (("userpackage:on_meta",), "parameters or buffers on the meta device"),
        (("userpackage:mlp", "--inputs", "userpackage:meta_inputs"), "on the meta device"),
        (("userpackage:not_a_module",), "to return an nn.Module; received an object of type dict"),
        (("userpackage:WEIGHT",), "received an object of type list"),
        (("userpackage:no_inputs",), "to carry an `example_inputs` attribute"),
        (("userpackage:mlp", "--inputs", "userpackage:inputs_raise"), "ValueError: no data"),
        (("userpackage:mlp", "--inputs", "userpackage:inputs_text"), "of type str"),
        (
            ("userpackage:mlp", "--inputs", "userpackage:inputs_list"),
            "userpackage:inputs_list: expected inputs to be a tensor, a tuple of positional",
        ),
        (("userpackage:mlp", "--inputs", "userpackage:wrong_shape"), "9"),
        (
            ("userpackage:mlp", "--loss", "userpackage:WEIGHT", "--mode", "train"),
            "a function from the model's output",
        ),
        (("userpackage:mlp", "--device", "gpu"), "expected cpu, cuda or cuda:INDEX"),
    ],
)
@pytest.mark.parametrize("command", ["profile", "optimize"])
def test_models_and_inputs(
    run: Run, command: str, arguments: tuple[str, ...], expected: str
) -> None:
    result = run(command, *arguments)
    assert result.exit_code == BAD_INPUT
    assert result.stdout == ""
    error = result.stderr[result.stderr.index("error: ") :]
    assert error.count("\n") == 1, "one line"
    assert expected in error
    assert "expected" in error
    assert "received" in error
    assert "Traceback" not in error


def test_debug_shows_the_traceback(run: Run) -> None:
    result = run("profile", "userpackage:raises", "--debug")
    assert "weights are missing" in str(result.exception.__cause__)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "a readable plan file"),
        ("{", "a plan in JSON"),
        ("\x80\x02}", "a plan in JSON"),
        ("[]", "a fastlinear plan"),
        ('{"kind": "plan", "format": 99}', "plan format 1"),
        ('{"kind": "plan", "format": 1}', "a complete plan"),
    ],
)
def test_corrupt_plans(run: Run, folder: Path, content: str | None, expected: str) -> None:
    if content is not None:
        (folder / "plan.json").write_text(content)
    result = run("apply", "userpackage:mlp", "plan.json")
    assert result.exit_code == BAD_INPUT
    assert f"expected {expected}" in result.stderr
    assert result.stdout == ""


def test_plan_of_another_model(run: Run, folder: Path) -> None:
    run("optimize", "userpackage:mlp", "--plan", "plan.json", "--budget", "1", "--no-tune")
    plan = json.loads((folder / "plan.json").read_text())
    plan["model"]["fingerprint"] = "0" * 16
    (folder / "plan.json").write_text(json.dumps(plan))
    result = run("apply", "userpackage:mlp", "plan.json")
    assert result.exit_code == BAD_INPUT
    assert "fingerprint" in result.stderr


@pytest.mark.parametrize("command", ["explain", "tune"])
def test_unknown_names(run: Run, command: str) -> None:
    for arguments in (
        ("--activation", "selu"),
        ("--weight-layout", "nn"),
        ("conv2d",),
        ("--m", "0"),
        ("--dtype", "int8"),
        ("--no-such-option",),
    ):
        result = run(command, *arguments)
        assert result.exit_code == BAD_INPUT, arguments
        assert result.stdout == ""


@pytest.mark.parametrize("command", ["explain", "tune"])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("mlp", "--widths", "64"), "two or more whole numbers"),
        (("mlp", "--widths", "64,,10"), "two or more whole numbers"),
        (("mlp", "--widths", "64,0"), "two or more whole numbers"),
        (("mlp", "--widths", "64,1.5"), "received '64,1.5'. For example 64,128,10"),
        (("mlp", "--widths=-64,64"), "two or more whole numbers"),
        (("mlp", "--widths", "64,²"), "two or more whole numbers"),
        (("mlp", "--widths", "8,8", "--layers", "2"), "either --widths or --layers and --width"),
        (("mlp", "--k", "64"), "received --k. Give --widths"),
        (("mlp", "--activation", "selu"), "mlp: expected activation in none, relu"),
        (("mlp", "--final-activation", "selu"), "final_activation"),
        (("mlp", "--weight-layout", "nn"), "nk or kn"),
        (("--widths", "64,64"), "received --widths. These belong to another op"),
        (("linear_act", "--final-activation", "relu", "--width", "3"), "--width, --final-act"),
        (("diagonal-linear", "--k", "8"), "received --k. It has one size besides the rows"),
        (("diagonal-linear", "--weight-layout", "kn"), "received --weight-layout. Its weight is"),
        (("gated_mlp", "--width", "8"), "received --width. Its sizes are --k, --hidden"),
        (("gated_mlp", "--stacked", "down"), "stacked in 'gate_up', 'up_gate', 'interleaved'"),
        (("linear_act", "--hidden", "8"), "received --hidden. These belong to another op"),
        (("diagonal-linear", "--stacked", "gate_up"), "received --stacked. It has one size"),
        (("grouped_linear", "--hidden", "8"), "received --hidden. Its sizes are --groups"),
        (("grouped_linear", "--x-layout", "g k"), "'b g k ...', '... k'; received 'g k'"),
        (("grouped_linear", "--length", "8"), "received 8 of 64 tokens as '... (g k)'"),
        (("grouped_linear", "--x-layout", "b g k ...", "--length", "7"), "a divisor of --m"),
        (("linear_act", "--groups", "3"), "received --groups. These belong to another op"),
        (("conv2d",), "grouped_linear, ragged_linear, unequal_linear, experts; received"),
    ],
)
def test_calls_that_do_not_fit(
    run: Run, command: str, arguments: tuple[str, ...], expected: str
) -> None:
    result = run(command, *arguments)
    assert result.exit_code == BAD_INPUT, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert expected in result.stderr


@pytest.mark.parametrize("command", ["explain", "tune"])
@pytest.mark.parametrize(
    "sizes",
    [
        ("linear_act", "--k", str(2**63)),
        ("mlp", "--widths", f"{10**20},3"),
        ("--m", "1000000", "--k", "1000000", "--n", "1000000"),
        ("mlp", "--layers", "2", "--width", "1000000000"),
        ("diagonal_linear", "--m", "1000000000", "--width", "1000000000000"),
    ],
)
def test_sizes_that_no_memory_holds(run: Run, command: str, sizes: tuple[str, ...]) -> None:
    result = run(command, *sizes)
    assert result.exit_code == BAD_INPUT
    assert "expected a call that fits the" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_memory_that_runs_out_while_tuning(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(fastlinear.dispatch.tune, "tune", failing)
    result = run("tune", "--m", "8", "--k", "8", "--n", "8", "--quiet")
    assert result.exit_code == BAD_INPUT
    assert "expected memory for linear_act" in result.stderr


def test_usage_errors_of_mlp(run: Run) -> None:
    for arguments in (("--layers", "0"), ("--width", "0"), ("--m", "0"), ("--layers", "many")):
        assert run("explain", "mlp", *arguments).exit_code == BAD_INPUT, arguments
    result = run("tune", "mlp", "--model", "userpackage:mlp")
    assert result.exit_code == BAD_INPUT
    assert "--model: expected linear_act" in result.stderr


def test_forced_backend_that_cannot_serve(run: Run) -> None:
    result = run("explain", "--backend", "onednn", "--dtype", "float64")
    assert result.exit_code == UNSUPPORTED
    assert "oneDNN has no float64 path" in result.stderr
    result = run("explain", "--backend", "nothing")
    assert result.exit_code == BAD_INPUT
    assert "--backend: expected a backend of linear_act in" in result.stderr
    assert run("optimize", "userpackage:mlp", "--backend", "linear_act").exit_code == BAD_INPUT
    for family, backend in (("linear_act", "triton"), ("mlp", "whole_cuda")):
        forced = f"{family}={backend}"
        result = run("optimize", "userpackage:mlp", "--quiet", "--no-tune", "--backend", forced)
        assert result.exit_code == UNSUPPORTED
        assert result.stdout == ""
        assert f"backend '{backend}' of {family} can serve somewhere" in result.stderr
        assert "CUDA devices only" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("tune", "--model", "userpackage:mlp", "--m", "5"), "received --m"),
        (("tune", "--model", "userpackage:mlp", "--no-bias", "--k", "8"), "received --k, --bias"),
        (("tune", "--model", "userpackage:mlp", "--dtype", "float16"), "received --dtype"),
        (("tune", "--inputs", "userpackage:positional"), "--inputs: expected a model"),
        (("tune", "--rows", "4"), "--rows: expected a model"),
        (("optimize", "userpackage:mlp", "--rows", "4,x"), "--rows: expected whole numbers from 1"),
        (("optimize", "userpackage:mlp", "--rows", "0"), "--rows: expected whole numbers from 1"),
        (("optimize", "userpackage:mlp", "--loss", "userpackage:loss"), "--loss: expected train"),
        (("profile", "userpackage:mlp", "--loss", "userpackage:loss"), "--loss: expected train"),
    ],
)
def test_options_without_a_use(run: Run, arguments: tuple[str, ...], expected: str) -> None:
    result = run(*arguments)
    assert result.exit_code == BAD_INPUT
    assert expected in result.stderr
    assert result.stdout == ""


def test_device_that_is_not_there(run: Run) -> None:
    for command in (("explain",), ("optimize", "userpackage:mlp"), ("cache", "path"), ("bench",)):
        result = run(*command, "--device", "cuda:63")
        assert result.exit_code == UNSUPPORTED, command
        assert "fastlinear doctor" in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NumericsError("optimize_", "small errors", "large ones", _REMEDY), NUMERICS),
        (UnsupportedError("optimize_", "a plain model", "another", _REMEDY), UNSUPPORTED),
        (KeyError("surprise"), 1),
    ],
)
def test_errors_of_the_library_become_exit_codes(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    import fastlinear.rewrite

    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(fastlinear.rewrite, "optimize_", failing)
    result = run("optimize", "userpackage:mlp", "--json")
    assert result.exit_code == code
    assert result.stdout == ""
    assert str(error) in result.stderr


def test_rewrites_that_are_less_accurate_are_exit_code_3(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that scales the bias is rejected, and nothing else is kept."""
    from fastlinear.dispatch import backend
    from fastlinear.families.linear.cpu import onednn

    right = onednn.forward
    monkeypatch.setattr(onednn, "forward", lambda x, w, b, *rest: right(x, w, b * 1.01, *rest))
    backend._load.cache_clear()
    one_layer = ("userpackage:module", "--inputs", "userpackage:four_wide")
    forced = ("--backend", "linear_act=onednn", "--no-tune", "--quiet")
    result = run("optimize", *one_layer, *forced)
    backend._load.cache_clear()
    assert result.exit_code == NUMERICS, result.stderr
    assert result.stderr.startswith("error: fastlinear: expected a rewrite as accurate as")
    assert "received the model: less accurate: output" in result.stderr
    assert result.stderr.count("\n") == 1


def test_results_that_are_not_finite_are_exit_code_3(run: Run) -> None:
    one_layer = ("userpackage:module", "--inputs", "userpackage:of_nan")
    result = run("optimize", *one_layer, "--no-tune", "--quiet")
    assert result.exit_code == NUMERICS, result.stderr
    assert "expected a model whose results are finite numbers" in result.stderr
    assert "the model's outputs are not finite: 8 of 8 numbers" in result.stderr


def test_unwritable_report(run: Run, folder: Path) -> None:
    (folder / "file").write_text("")
    result = run(
        "profile", "userpackage:mlp", "--steps", "1", "--quiet", "--html", "file/report.html"
    )
    assert result.exit_code == BAD_INPUT
    assert "a file that can be written" in result.stderr
