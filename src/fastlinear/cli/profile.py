"""``fastlinear profile``."""

from __future__ import annotations

from typing import Annotated

import typer

from fastlinear.cli import options as opt
from fastlinear.cli.console import check_writable, print_json, progress_bar, say, width, write_page


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("profile", rich_help_panel="Models")(profile)


def profile(
    model: opt.Model,
    inputs: opt.Inputs = None,
    device: opt.Device = "cpu",
    mode: opt.ModeOption = opt.Mode.inference,
    dtype: opt.DtypeOption = None,
    loss: opt.Loss = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure.")] = 3,
    seed: opt.Seed = 0,
    json: opt.Json = False,
    html: opt.Html = None,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Say where the time goes, by module name, and what of it is waste. Changes nothing.

    Example: fastlinear profile examples.models:bert --mode train
    """
    from fastlinear.cli import load
    from fastlinear.rewrite import profile as run_profile

    check_writable("--html", html)
    kind = None if dtype is None else dtype.value
    train = mode is opt.Mode.train
    load.check_loss(loss, train)
    net = load.load_model(model, device=device, dtype=kind, train=train, seed=seed)
    values = load.load_inputs(inputs, model=model, device=device, dtype=kind, seed=seed)
    with progress_bar(quiet=quiet) as progress:
        report = run_profile(
            net,
            values,
            mode.value,
            loss_fn=load.load_loss(loss),
            steps=steps,
            progress=progress,
        )
    if html is not None:
        write_page(html, report.to_json(), quiet=quiet)
    if json:
        print_json(report.to_json())
    elif not quiet:
        say(report.table(width=width()))
