"""Every command does its work, says it on the right stream, and returns the right code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from fastlinear.cli.load import default_device
from fastlinear.core import environment
from fastlinear.dispatch import backend as registry
from fastlinear.dispatch import tune as tuning
from fastlinear.dispatch.backend import families
from fastlinear.families.grouped.layout import LAYOUTS

Run = Callable[..., Result]

COMMANDS = ("optimize", "apply", "profile", "bench", "tune", "explain", "doctor", "cache")
QUICK = ("--budget", "2", "--no-tune", "--quiet")


def data_of(result: Result) -> object:
    """The JSON on stdout, which must be all there is."""
    return json.loads(result.stdout)


def assert_remembered(explained: str) -> None:
    """That choices are by what was tuned, or say why they are not: a busy machine tells little."""
    assert "tuned" in explained or "in doubt" in explained


def test_help_names_every_command_and_warns(run: Run) -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in COMMANDS:
        assert command in result.stdout
    assert "imports and runs that code" in " ".join(result.stdout.split())
    assert "4 nothing profitable" in " ".join(result.stdout.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout
    if command in ("optimize", "profile", "apply"):
        assert "runs that code" in " ".join(result.stdout.replace("│", " ").split())


def test_help_names_every_experiment(run: Run) -> None:
    from benchmarks.experiments import EXPERIMENTS

    shown = " ".join(run("bench", "--help").stdout.replace("│", " ").split())
    assert all(name in shown for name in EXPERIMENTS)


def test_version(run: Run) -> None:
    assert run("--version").stdout.startswith("fastlinear 0.")


def test_no_arguments_shows_help_and_is_a_usage_error(run: Run) -> None:
    assert run().exit_code == 2


def test_module_entry_point(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fastlinear", "explain", "--activation", "nope"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: linear_act: expected activation in none, relu")


def test_profile_json_and_html(run: Run, folder: Path) -> None:
    result = run("profile", "userpackage:mlp", "--steps", "1", "--json", "--html", "out/p.html")
    assert result.exit_code == 0, result.stderr
    data = data_of(result)
    assert data["kind"] == "profile"
    assert [site["fqn"] for site in data["sites"]] == ["0", "2"]
    assert "<!doctype html>" in (folder / "out" / "p.html").read_text()
    assert "report written to" in result.stderr


def test_profile_table_and_training(run: Run) -> None:
    result = run("profile", "userpackage:mlp", "--steps", "1", "--mode", "train", "--quiet")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    for inputs in ("userpackage:positional", "userpackage:pair"):
        result = run("profile", "userpackage:Namespace.build", "--inputs", inputs)
        assert result.exit_code == 0
        assert "Sequential" in result.stdout


def test_optimize_then_apply(run: Run, folder: Path) -> None:
    result = run(
        *("optimize", "userpackage:mlp", "--json", "--plan", "plans/plan.json"),
        *("--html", "report.html", *QUICK),
    )
    assert result.exit_code in (0, 4), result.stderr
    data = data_of(result)
    assert data["kind"] == "optimize"
    assert {site["fqn"] for site in data["sites"]} == {"0", "2"}
    assert (result.exit_code == 4) == (data["summary"]["kept"] == 0)
    assert "Sequential" in (folder / "report.html").read_text()
    plan = json.loads((folder / "plans" / "plan.json").read_text())
    assert plan["kind"] == "plan"
    assert len(plan["rewrites"]) == data["summary"]["kept"]
    again = run("apply", "userpackage:mlp", "plans/plan.json", "--json")
    assert again.exit_code in (0, 4), again.stderr
    assert data_of(again)["kind"] == "optimize"


def test_optimize_in_training_mode_with_a_loss(run: Run) -> None:
    result = run(
        *("optimize", "userpackage:mlp", "--mode", "train", "--loss", "userpackage:loss"),
        *("--json", *QUICK),
    )
    assert result.exit_code in (0, 4), result.stderr
    assert data_of(result)["mode"] == "train"


def test_optimize_says_what_becomes_of_the_model_compiled(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", fails)  # whether it is asked is what matters here
    asked = data_of(run("optimize", "userpackage:mlp", "--compile", "--json", *QUICK))
    (site,) = [s for s in asked["sites"] if s["rule"] == "compiled"]
    assert (site["fqn"], site["status"], site["code"]) == ("", "refused", "no_compile")
    plain = data_of(run("optimize", "userpackage:mlp", "--json", *QUICK))
    assert all(s["rule"] != "compiled" for s in plain["sites"])


def test_a_pattern_that_no_module_matches_is_refused(run: Run) -> None:
    result = run("optimize", "userpackage:mlp", "--only", "*.attn.*", *QUICK)
    assert result.exit_code == 2
    assert "'*.attn.*'" in result.stderr
    assert "Names look like: 0" in result.stderr


def test_optimize_only_and_skip(run: Run) -> None:
    result = run("optimize", "userpackage:mlp", "--only", "2", "--json", *QUICK)
    sites = {site["fqn"]: site for site in data_of(result)["sites"]}
    assert sites["0"]["status"] == "refused"
    result = run("optimize", "userpackage:mlp", "--skip", "*", "--json", *QUICK)
    assert result.exit_code == 4
    assert all(site["status"] == "refused" for site in data_of(result)["sites"])


def test_table_goes_to_stdout_and_quiet_says_nothing(run: Run) -> None:
    loud = run("optimize", "userpackage:mlp", "--budget", "2", "--no-tune")
    assert "2 linear sites" in loud.stdout
    assert loud.stderr != ""
    quiet = run("optimize", "userpackage:mlp", *QUICK)
    assert (quiet.stdout, quiet.stderr) == ("", "")


def test_explain(run: Run) -> None:
    shape = ("--m", "64", "--k", "32", "--n", "48")
    result = run("explain", "linear_act", *shape, "--activation", "gelu", "--train", "--json")
    data = data_of(result)
    assert data[0]["problem"]["dims"] == {"M": 64, "K": 32, "N": 48}
    assert data[0]["problem"]["options"]["activation"] == "gelu"
    pieces = ["grad_pre", "grad_input", "grad_weight", "step"]
    assert [d["problem"]["piece"] for d in data[1:]] == pieces
    text = run("explain", *shape, "--backend", "eager", "--weight-layout", "kn").stdout
    assert "-> eager (forced)" in text
    assert "w=kn" in text


def test_explain_mlp(run: Run) -> None:
    result = run("explain", "mlp", "--m", "32", "--widths", "16, 32,10", "--train", "--json")
    data = data_of(result)
    problem = data[0]["problem"]
    assert problem["dims"] == {"M": 32, "L": 2, "K": 16, "H": 32, "N": 10}
    assert problem["options"]["activation"] == "relu"
    assert [d["problem"]["piece"] for d in data[:2]] == ["forward", "backward"]
    named = ("--activation", "gelu", "--final-activation", "tanh", "--no-bias")
    text = run("explain", "mlp", "--layers", "3", "--width", "16", *named).stdout
    assert "L=3 K=16 H=16 N=16" in text
    assert "activation=gelu final=tanh bias=no" in text
    text = run("explain", "mlp", "--backend", "layerwise", "--weight-layout", "kn").stdout
    assert "-> layerwise (forced)" in text
    assert "L=8 K=64 H=64 N=64" in text
    assert "w=mixed" in text


def test_explain_and_tune_a_gated_mlp(run: Run) -> None:
    sizes = ("--m", "32", "--k", "16", "--hidden", "24", "--n", "8", "--stacked", "up_gate")
    told = data_of(run("explain", "gated-mlp", *sizes, "--device", "cpu", "--train", "--json"))
    forward = told[0]["problem"]
    assert forward["dims"] == {"M": 32, "K": 16, "H": 24, "N": 8}
    assert {"activation": "silu", "bias": "yes", "order": "up_gate"}.items() <= forward[
        "options"
    ].items()
    call = ("gated_mlp", *sizes, "--no-bias", "--activation", "gelu", "--device", "cpu")
    speed = ("--rounds", "5", "--budget", "0.05")
    tuned = data_of(run("tune", *call, "--train", *speed, "--json"))
    assert [t["problem"]["piece"] for t in tuned] == list(families()["gated_mlp"].pieces)
    assert "eager" in tuned[0]["times_us"]
    assert_remembered(run("explain", *call, "--train").stdout)
    wide = run("explain", "gated_mlp", "--k", "64", "--weight-layout", "kn", "--device", "cpu")
    assert "K=64 H=256 N=64" in wide.stdout
    assert "w=strided" in wide.stdout


@pytest.mark.parametrize("layout", LAYOUTS)
def test_explain_and_tune_groups(run: Run, layout: str) -> None:
    channels = LAYOUTS[layout].order == "channels"
    sizes = ("--m", "32", "--groups", "3", "--k", "16", "--n", "8", "--x-layout", layout)
    call = ("grouped_linear", *sizes, *(("--length", "8") if channels else ()), "--device", "cpu")
    forward = data_of(run("explain", *call, "--train", "--json"))[0]["problem"]
    dims = {"M": 32, "G": 3, "K": 16, "N": 8, **({"L": 8} if channels else {})}
    assert forward["dims"] == dims
    assert {"order": LAYOUTS[layout].order, "x": "dense"}.items() <= forward["options"].items()
    speed = ("--rounds", "5", "--budget", "0.05")
    tuned = data_of(run("tune", *call, "--train", *speed, "--json"))
    assert [t["problem"]["piece"] for t in tuned] == list(families()["grouped_linear"].pieces)
    assert "eager" in tuned[0]["times_us"]
    assert_remembered(run("explain", *call, "--train").stdout)


def test_groups_of_one_input_are_one_linear_layer(run: Run) -> None:
    shared = ("grouped_linear", "--groups", "3", "--k", "16", "--n", "8", "--x-layout", "... k")
    told = data_of(run("explain", *shared, "--device", "cpu", "--json"))[0]["problem"]
    assert (told["family"], told["dims"]) == ("linear_act", {"M": 64, "K": 16, "N": 24})
    refused = run("tune", *shared)
    assert refused.exit_code == 2, refused.stdout
    assert "linear_act --k 16 --n 24" in refused.stderr
    turned = run("explain", *shared[:-1], "g ... k", "--weight-layout", "kn", "--device", "cpu")
    assert "w=strided" in turned.stdout


def test_tune_mlp(run: Run) -> None:
    call = ("mlp", "--m", "4", "--widths", "8,16,4", "--final-activation", "relu")
    result = run("tune", *call, "--train", "--rounds", "5", "--budget", "0.05", "--json")
    assert result.exit_code == 0, result.stderr
    everything = data_of(result)
    assert all(t["stored"] and "eager" in t["times_us"] for t in everything)
    tuned = [t for t in everything if t["problem"]["family"] == "mlp"]
    assert [t["problem"]["piece"] for t in tuned] == list(families()["mlp"].pieces)
    assert all(t["problem"]["options"]["final"] == "relu" for t in tuned)
    layers = everything[: -len(tuned)]  # they come first: layerwise stands on their choices
    assert {t["problem"]["family"] for t in layers} == {"linear_act"}
    sizes = {(t["problem"]["dims"]["K"], t["problem"]["dims"]["N"]) for t in layers}
    assert sizes == {(8, 16), (16, 4)}
    shown = run("cache", "show").stdout
    assert "M=4 8-16-4" in shown
    assert "mlp.backward" in shown
    assert_remembered(run("explain", *call, "--train").stdout)


def test_tune_remembers_and_cache_shows_and_forgets(run: Run) -> None:
    call = ("--m", "8", "--k", "16", "--n", "16", "--activation", "relu")
    speed = ("--rounds", "5", "--budget", "0.05")
    result = run("tune", "linear_act", *call, *speed, "--json")
    assert result.exit_code == 0, result.stderr
    (tuned,) = data_of(result)
    assert tuned["stored"] is True
    assert tuned["best"] in tuned["times_us"]
    assert tuned["rejected"]["cublaslt"] == "cuBLASLt runs on CUDA devices only"
    shown = data_of(run("cache", "show", "--json"))
    assert [entry["best"] for entry in shown["entries"].values()] == [tuned["best"]]
    assert shown["path"] == run("cache", "path").stdout.strip()
    assert Path(shown["path"]).exists()
    assert "relu" in run("cache", "show").stdout
    assert_remembered(run("explain", *call).stdout)
    assert "1 entry removed" in run("cache", "clear").stderr
    assert "nothing tuned yet" in run("cache", "show").stdout


def test_tune_and_cache_show_what_is_in_doubt(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    call = ("tune", "--m", "8", "--k", "16", "--n", "16", "--rounds", "5", "--budget", "0.05")
    monkeypatch.setattr(tuning, "doubt_of", lambda *_: "")
    assert "in doubt" not in run(*call, "--no-save").stdout
    monkeypatch.setattr(tuning, "doubt_of", lambda *_: "the machine was busy")
    again = "Tune again when the machine is quiet."
    assert f"in doubt: the machine was busy. {again}" in run(*call).stdout
    assert "the machine was busy" in run("cache", "show").stdout
    assert data_of(run(*call, "--json"))[0]["doubt"] == "the machine was busy"
    assert "in doubt: the machine" in run("explain", "--m", "8", "--k", "16", "--n", "16").stdout
    monkeypatch.setattr(tuning, "doubt_of", lambda *_: "")
    assert run(*call).exit_code == 0
    monkeypatch.setattr(tuning, "doubt_of", lambda *_: "the machine was busy")
    assert f"busy; the earlier decision, not so, stays. {again}" in run(*call).stdout
    assert "busy" not in run("cache", "show").stdout


def test_tune_the_sites_of_a_model(run: Run) -> None:
    speed = ("--rounds", "5", "--budget", "0.05")
    result = run("tune", "--model", "userpackage:mlp", *speed, "--no-save", "--json")
    assert result.exit_code == 0, result.stderr
    dims = [tuned["problem"]["dims"] for tuned in data_of(result)]
    assert dims == [{"M": 6, "K": 8, "N": 16}, {"M": 6, "K": 16, "N": 4}]
    assert not any(tuned["stored"] for tuned in data_of(result))
    more = run(
        "tune", "--model", "userpackage:mlp", "--rows", "7, 30", *speed, "--no-save", "--json"
    )
    assert [t["problem"]["dims"]["M"] for t in data_of(more)] == [6, 6, 32, 32]  # 6, 7: 8 rows
    assert "best" in run("tune", "--m", "4", "--k", "8", "--n", "8", *speed, "--no-save").stdout


def test_doctor_has_no_side_effects(run: Run, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    result = run("doctor", "--json")
    assert result.exit_code == 0, result.stderr
    data = data_of(result)
    assert data["devices"][0]["device"] == "cpu"
    assert data["versions"]["torch"] != "not installed"
    eager = [b for b in data["backends"] if b["backend"] == "eager" and b["device"] == "cpu"]
    assert [b["why_not"] for b in eager] == [None] * len(families())
    assert {b["only_for"] for b in eager} == {""}
    told = {(b["family"], b["backend"]) for b in data["backends"]}
    assert {("ragged_linear", "cpp"), ("unequal_linear", "together")} <= told
    assert any(b["why_not"] for b in data["backends"])
    for family in families().values():
        told = {b["backend"]: b for b in data["backends"] if b["family"] == family.name}
        assert set(told) == {b.name for b in family.backends}
    mlp = {
        b["backend"]: b for b in data["backends"] if (b["family"], b["device"]) == ("mlp", "cpu")
    }
    assert mlp["layerwise"]["why_not"] is None
    assert mlp["whole_cuda"]["why_not"] == "its kernels run on CUDA devices only"
    assert sorted(tmp_path.rglob("*")) == before
    assert "Backends" in run("doctor").stdout


def test_doctor_names_an_untested_version(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "TESTED", {"torch": ("1.0", "1.1")})
    (told,) = data_of(run("doctor", "--json"))["untested"]
    assert told.startswith("torch ")
    assert told.endswith("(tested: 1.0 to 1.1)")
    (line,) = (one for one in run("doctor").stdout.splitlines() if one.startswith("Untested"))
    assert told in line


def test_doctor_names_what_a_backend_is_only_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def odd_only(p: Any) -> str | None:
        return "rows are whole multiples" if p.dim("K") % 16 == 0 else None

    layers = registry.family("linear_act")
    special = replace(layers.candidates("forward")[0], name="special", reason_not=odd_only)
    never = replace(special, name="never", reason_not=lambda p: f"not with K={p.dim('K')}")
    monkeypatch.setitem(
        registry._FAMILIES, "linear_act", replace(layers, backends=(special, never))
    )
    backends = data_of(run("doctor", "--json"))["backends"]
    told = {
        b["backend"]: b for b in backends if (b["family"], b["device"]) == ("linear_act", "cpu")
    }
    assert (told["special"]["why_not"], told["special"]["only_for"]) == (
        None,
        "rows of odd lengths",
    )
    assert (told["never"]["why_not"], told["never"]["only_for"]) == ("not with K=1024", "")
    assert "yes, for rows of odd lengths" in run("doctor").stdout


def test_doctor_imports_no_kernel_compiler(folder: Path) -> None:
    code = (
        "import sys; from fastlinear.cli.doctor import _diagnose; _diagnose(); import torch;"
        "print(any(m == 'triton' or m.startswith('triton.') for m in sys.modules)"
        " or torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if "False" not in done.stdout:
        import torch

        assert torch.cuda.is_available()  # reading a GPU's name initialises CUDA, nothing more


def test_bench(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import benchmarks.harness.run

    seen = {}
    place: dict[str, Any] = {}

    def fake(experiment: str, **options: object) -> list[dict[str, object]]:
        seen.update(options, experiment=experiment)
        row = {
            "experiment": "linear",
            "problem": "relu M1 K2 N3 L1 float32",
            "direction": "forward",
            "metric": "wall",
            "contender": "fastlinear",
            "ours": True,
            "terms": [],
            "case": {},
            "median_us": 12.0,
            "ci95_us": [11.0, 13.0],
            "ratio_to_best": 1.5,
            "ratio_ci95": [1.4, 1.6],
            "best_peer": "eager",
            "roofline": dict(place) or None,
            "skipped": None,
            "valid": True,
            "peak_bytes": None,
            "error": 0.0,
            "samples_us": [12.0],
            "env": {},
        }
        peer = {"contender": "eager", "ours": False, "median_us": 8.0, "samples_us": [8.0]}
        missing = {"contender": "compile", "ours": False, "valid": False, "median_us": None}
        why = {"skipped": "needs a compiler", "roofline": None}
        return [row, {**row, **peer}, {**row, **missing, **why}]

    monkeypatch.setattr(benchmarks.harness.run, "run", fake)
    result = run(
        *("bench", "linear", "--quick", "--dtype", "float32", "--out", "rows.jsonl"),
        *("--html", "bench.html", "--json", "--only", "relu"),
    )
    assert result.exit_code == 0, result.stderr
    assert (seen["experiment"], seen["quick"], seen["dtypes"]) == ("linear", True, ["float32"])
    assert (str(seen["out"]), seen["only"]) == ("rows.jsonl", "relu")
    assert len(data_of(result)["rows"]) == 3
    assert "0.67×" in (folder / "bench.html").read_text()
    shown = run("bench", "linear").stdout
    assert "more than 2% behind the best peer on its terms, beyond noise, in 1" in shown
    assert "within noise" not in shown
    assert "default more than 2% behind a backend of ours, beyond noise, in 0" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert lines[0] == ["relu", "M1", "K2", "N3", "L1", "float32:", "forward,", "wall"]
    assert "of eager  of best peer  best peer" in shown.splitlines()[1]
    assert ["fastlinear", "12.0", "us", "1.500", "1.500", "eager", "-"] in lines
    assert "time over theirs, below 1 is faster" in shown
    left = [["compile", "needs", "a", "compiler", "1"]]
    assert [line for line in lines if line[:1] == ["compile"]] == left
    assert max(map(len, shown.splitlines())) <= 100
    assert "above 100%" not in shown
    place.update(bound="compute", fraction=1.3)
    shown = run("bench", "linear").stdout
    assert "above 100% of the measured roofline: 2 of 2 measurements, up to 130%" in shown
    assert "another product is faster" in shown
    place.update(fraction=2.71)
    shown = run("bench", "linear").stdout
    assert "another product is faster" not in shown
    assert "2 (up to 271%): not credible: no product is that much faster" in shown


def test_explain_diagonal(run: Run) -> None:
    result = run("explain", "diagonal-linear", "--width", "160", "--batch", "512")
    assert result.exit_code == 0, result.stderr
    assert "diagonal_linear.forward M=512 K=160" in result.stdout
    told = data_of(run("explain", "diagonal_linear", "--width", "8192", "--train", "--json"))
    assert [c["problem"]["piece"] for c in told][:2] == ["forward", "backward"]


def test_explain_takes_the_gpu_that_is_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert default_device() == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert default_device() == "cpu"
    monkeypatch.setattr("fastlinear.cli.explain.default_device", lambda: "cuda:77")
    assert "'cuda:77'" in run("explain", "diagonal-linear").stderr
    assert run("explain", "linear_act", "--device", "cpu").exit_code == 0
