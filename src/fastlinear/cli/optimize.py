"""``fastlinear optimize`` and ``fastlinear apply``."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fastlinear.cli import options as opt
from fastlinear.cli.console import (
    check_writable,
    note,
    print_json,
    progress_bar,
    say,
    width,
    write_page,
)
from fastlinear.core.errors import InputError, NumericsError

NOTHING_PROFITABLE = 4


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("optimize", rich_help_panel="Models")(optimize)
    app.command("apply", rich_help_panel="Models")(apply)


def optimize(
    model: opt.Model,
    inputs: opt.Inputs = None,
    device: opt.Device = "cpu",
    mode: opt.ModeOption = opt.Mode.inference,
    dtype: opt.DtypeOption = None,
    loss: opt.Loss = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Consider only modules whose fully qualified name matches (`*.mlp.*`); repeatable."
        ),
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option(help="Leave matching modules alone; repeatable.")
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Restrict a family to one backend, as linear_act=onednn; repeatable."),
    ] = None,
    min_speedup: Annotated[
        float, typer.Option(help="Keep a rewrite only if its 95% interval lies above this.")
    ] = 1.0,
    draws: Annotated[int, typer.Option(help="Input draws the numbers are verified on.")] = 3,
    budget: Annotated[float, typer.Option(help="Seconds for tuning and comparing.")] = 60,
    tune: Annotated[
        bool, typer.Option(help="Time the backends on each site's own shapes first.")
    ] = True,
    rows: opt.Rows = None,
    graphs: Annotated[
        bool,
        typer.Option(
            "--graphs",
            help="Replay the whole model, or else its launch-bound parts, as CUDA graphs where "
            "that is faster; they take memory.",
        ),
    ] = False,
    compile: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Try the model through torch.compile as well, with the rewrites and without "
            "them, and keep it where that is faster; compiling takes a while.",
        ),
    ] = False,
    trial_memory: Annotated[
        float,
        typer.Option(
            help="The share of the device's free memory that one trial of CUDA graphs or compiled "
            "code may take."
        ),
    ] = 0.5,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", "--save", metavar="FILE", help="Write what was kept as JSON."),
    ] = None,
    seed: opt.Seed = 0,
    json: opt.Json = False,
    html: opt.Html = None,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Find what wastes time, rewrite it, verify it, keep what is measured faster.

    The model is profiled, every candidate is checked against a float64 oracle (outputs and, in
    train mode, gradients and optimizer steps), then timed against the original, interleaved. What
    is not faster beyond noise is undone. Exit code 4 says that nothing was worth keeping, 3 that
    nothing was and that a rewrite was less accurate than allowed.

    Example: fastlinear optimize examples.models:gpt2 --html report.html --plan plan.json
    """
    from fastlinear.cli import load
    from fastlinear.core.settings import Config
    from fastlinear.rewrite import optimize_

    config = Config(
        mode=mode.value,
        backends=_backends(backend or []),
        min_speedup=min_speedup,
        draws=draws,
        tune=tune,
        rows=opt.numbers("--rows", rows),
        graphs=graphs,
        compile=compile,
        time_budget_s=budget,
        trial_memory=trial_memory,
        seed=seed,
    )
    check_writable("--plan", plan, through_another=True)
    check_writable("--html", html)
    kind = None if dtype is None else dtype.value
    train = mode is opt.Mode.train
    load.check_loss(loss, train)
    net = load.load_model(model, device=device, dtype=kind, train=train, seed=seed)
    _check_only(only or [], net)
    values = load.load_inputs(inputs, model=model, device=device, dtype=kind, seed=seed)
    with progress_bar(quiet=quiet) as progress:
        result = optimize_(
            net,
            values,
            config=config,
            filter_fn=_filter(only or [], skip or []),
            loss_fn=load.load_loss(loss),
            progress=progress,
        )
    if plan is not None:
        result.save(plan)
        note(f"plan written to {plan}", quiet=quiet)
    _finish(result, as_json=json, html=html, quiet=quiet)


def apply(
    model: opt.Model,
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan that optimize wrote.")],
    inputs: opt.Inputs = None,
    device: opt.Device = "cpu",
    dtype: opt.DtypeOption = None,
    loss: opt.Loss = None,
    seed: opt.Seed = 0,
    json: opt.Json = False,
    budget: Annotated[float, typer.Option(help="Seconds for comparing.")] = 60,
    html: opt.Html = None,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Apply a saved plan to a model and verify it again.

    Refuses a plan made for another model or environment. Without --inputs, inputs are drawn from
    the shapes and dtypes the plan records.

    Example: fastlinear apply examples.models:gpt2 plan.json
    """
    from fastlinear.cli import load
    from fastlinear.rewrite import apply_
    from fastlinear.rewrite.plan import load as load_plan

    mode = load_plan(plan).mode
    load.check_loss(loss, mode == "train")
    check_writable("--html", html)
    kind = None if dtype is None else dtype.value
    net = load.load_model(model, device=device, dtype=kind, train=mode == "train", seed=seed)
    values = None
    if inputs is not None:
        values = load.load_inputs(inputs, model=model, device=device, dtype=kind, seed=seed)
    with progress_bar(quiet=quiet) as progress:
        result = apply_(
            net,
            plan,
            values,
            loss_fn=load.load_loss(loss),
            progress=progress,
            time_budget_s=budget,
        )
    _finish(result, as_json=json, html=html, quiet=quiet)


def _finish(result: Any, *, as_json: bool, html: Path | None, quiet: bool) -> None:
    from fastlinear.rewrite.verify.finite import NOT_FINITE

    data = result.to_json()
    if html is not None:
        write_page(html, data, quiet=quiet)
    if as_json:
        print_json(data)
    elif not quiet:
        say(result.table(width=width()))
    if data["summary"]["kept"]:
        return
    failed = [site for site in data["sites"] if site["code"] == "less_accurate"]
    if failed:
        raise NumericsError(
            "fastlinear",
            "a rewrite as accurate as PyTorch's own path",
            f"{failed[0]['fqn'] or 'the model'}: {failed[0]['reason']}",
            "Nothing was kept, and the model is as it was.",
        )
    unproven = [site for site in data["sites"] if site["code"] == NOT_FINITE]
    if unproven:
        raise NumericsError(
            "fastlinear",
            "a model whose results are finite numbers, to compare with",
            f"{unproven[0]['fqn'] or 'the model'}: {unproven[0]['reason']}",
            "Nothing was kept, and the model is as it was.",
        )
    raise typer.Exit(NOTHING_PROFITABLE)


def _backends(pairs: list[str]) -> dict[str, str]:
    chosen = {}
    for pair in pairs:
        family, equals, name = pair.partition("=")
        if not equals or not family or not name:
            raise InputError(
                "--backend",
                "FAMILY=BACKEND, as linear_act=onednn",
                repr(pair),
                "`fastlinear doctor` lists families and backends.",
            )
        chosen[family] = name
    return chosen


def _check_only(only: list[str], model: Any) -> None:
    """Raise InputError for a pattern that no module's name matches."""
    names = [name for name, _ in model.named_modules() if name]
    for pattern in only:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in ("", *names)):
            raise InputError(
                "--only",
                "a pattern that the name of a module matches",
                repr(pattern),
                f"Names look like: {', '.join(names[:5])}.",
            )


def _filter(only: list[str], skip: list[str]) -> Callable[[Any, str], bool] | None:
    """``filter_fn(module, fqn)`` for glob patterns; None when there are none."""
    if not only and not skip:
        return None

    def wanted(_: Any, fqn: str) -> bool:
        if any(fnmatch.fnmatchcase(fqn, pattern) for pattern in skip):
            return False
        return not only or any(fnmatch.fnmatchcase(fqn, pattern) for pattern in only)

    return wanted
