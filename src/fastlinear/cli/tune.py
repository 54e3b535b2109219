"""``fastlinear tune``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastlinear.cli import options as opt
from fastlinear.cli.call import Activation, Bias, Call, Family, Layout, M, Train, within_memory
from fastlinear.cli.console import print_json, progress_bar, say, table
from fastlinear.cli.families import DEFAULT, FamilyCommand, given_of
from fastlinear.core.errors import InputError

if TYPE_CHECKING:
    from fastlinear.core.problem import Problem
    from fastlinear.dispatch.tune import Tuned


_OF_A_CALL = ("m", "dtype", "activation", "bias", "layout")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("tune", cls=FamilyCommand, rich_help_panel="Ops")(tune)


def tune(
    ctx: typer.Context,
    family: Family = DEFAULT,
    m: M = 64,
    dtype: Annotated[opt.Dtype, typer.Option(help="dtype of x and of the weights.")] = (
        opt.Dtype.float32
    ),
    activation: Activation = None,
    bias: Bias = True,
    layout: Layout = "nk",
    train: Train = False,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PKG:FACTORY",
            help="Tune every linear site of this model instead of one call (runs that code).",
            show_default=False,
        ),
    ] = None,
    inputs: opt.Inputs = None,
    rows: opt.Rows = None,
    device: opt.Place = "cpu",
    captured: Annotated[
        bool, typer.Option("--captured", help="Tune for use inside a CUDA graph (device time).")
    ] = False,
    rounds: Annotated[int, typer.Option(min=5, help="Interleaved rounds for each call.")] = 15,
    budget: Annotated[float, typer.Option(min=0, help="Seconds for each call.")] = 2.0,
    save: Annotated[bool, typer.Option(help="Remember the winners in the cache.")] = True,
    seed: opt.Seed = 0,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Verify every backend on this machine, time them interleaved, remember the fastest.

    A backend replaces PyTorch's own path only when it is faster beyond noise. What is in doubt (a
    close rival, scattered times, a busy machine) is marked so, and never replaces what is not, nor
    the choice without tuning where that is the close rival.

    Examples:

    fastlinear tune linear_act --m 64 --k 1024 --n 1024 --activation relu --train

    fastlinear tune mlp --m 64 --layers 8 --width 64 --train

    fastlinear tune gated_mlp --m 64 --k 512 --hidden 2048 --no-bias --train

    fastlinear tune grouped_linear --m 512 --groups 16 --k 64 --train
    """
    from fastlinear.dispatch.tune import tune as tune_problem

    if model is not None:
        _refuse_options_of_a_call(ctx)
    elif inputs is not None or rows is not None:
        option = "--inputs" if inputs is not None else "--rows"
        raise InputError(
            option,
            "a model to put them into",
            f"{inputs or rows} without --model",
            f"Add --model, or leave {option} out"
            + ("." if inputs is not None else "; --m is the number of rows of one call."),
        )
    call = Call(family, m, dtype.value, device, activation, bias, layout, given_of(ctx))
    if model is None:
        problems = call.problems(train, captured)
    elif family != DEFAULT:
        raise InputError(
            "--model",
            "linear_act, whose sites in the model are tuned",
            family,
            "Describe the chain, for example --m 32 --widths 784,256,10.",
        )
    else:
        problems = _problems_of_model(
            model, inputs, opt.numbers("--rows", rows), device, train, captured, seed
        )
    results: list[Tuned] = []
    try:
        with progress_bar(quiet=quiet) as progress:
            for i, problem in enumerate(problems):
                progress("tuning", i, len(problems))
                options: dict[str, Any] = {
                    "rounds": rounds,
                    "budget_s": budget,
                    "seed": seed,
                    "save": save,
                }
                with within_memory(problem.describe()):
                    results.append(tune_problem(problem, device=device, **options))
            progress("tuning", len(problems), len(problems))
    finally:  # an interrupt loses only the call that was being tuned
        if json:
            print_json([_as_json(t) for t in results])
        elif not quiet:
            _show(results, save)


def _refuse_options_of_a_call(ctx: typer.Context) -> None:
    """Raise InputError for options that describe one call: a model's sites say that themselves."""
    given = []
    own = given_of(ctx)
    for option in ctx.command.get_params(ctx):
        source = ctx.get_parameter_source(option.name) if option.name in _OF_A_CALL else None
        if option.opts[0] in own or (source is not None and source.name == "COMMANDLINE"):
            given.append(option.opts[0])
    if given:
        raise InputError(
            "--model",
            "no options of a single call: the sites of the model are what is tuned",
            ", ".join(given),
            "Leave them out, or leave --model out.",
        )


def _problems_of_model(
    model: str,
    inputs: str | None,
    rows: tuple[int, ...],
    device: str,
    train: bool,
    captured: bool,
    seed: int,
) -> list[Problem]:
    """The distinct linear_act Problems of a model's linear sites, the heaviest first; then the same
    for other numbers of rows."""
    from fastlinear.cli import load
    from fastlinear.core.problem import bucket_size
    from fastlinear.core.settings import Config
    from fastlinear.dispatch.steps import tuning_order
    from fastlinear.rewrite.optimize import problems

    net = load.load_model(model, device=device, dtype=None, train=train, seed=seed)
    values = load.load_inputs(inputs, model=model, device=device, dtype=None, seed=seed)
    config = Config(mode="train" if train else "inference", seed=seed)
    found: dict[str, Problem] = {}
    own = problems(net, values, config=config)
    for forward in (*own, *(p.with_rows(bucket_size(m)) for m in rows for p in own)):
        for problem in tuning_order(replace(forward, captured=captured)):
            found.setdefault(problem.key(), problem)
    return list(found.values())


def _as_json(tuned: Tuned) -> dict[str, Any]:
    return {
        "problem": tuned.problem.to_json(),
        "best": tuned.best,
        "times_us": {name: s.median_us for name, s in tuned.samples.items()},
        "samples_us": {name: list(s.us) for name, s in tuned.samples.items()},
        "speedup_over_eager": {
            name: {"median": r.median, "low": r.low, "high": r.high}
            for name, r in tuned.speedups.items()
        },
        "rejected": tuned.rejected,
        "stored": tuned.stored,
        "doubt": tuned.doubt,
        "rivals": list(tuned.rivals),
    }


def _show(results: list[Tuned], save: bool) -> None:
    from fastlinear.dispatch.cache import entries

    for t in results:
        rows = []
        for name, s in sorted(t.samples.items(), key=lambda item: item[1].median_us):
            speedup = str(t.speedups[name]) if name in t.speedups else "1"
            rows.append((name, f"{s.median_us:.1f}", speedup, "best" if name == t.best else ""))
        rows += [(name, "-", "-", why) for name, why in t.rejected.items()]
        table(t.problem.describe(), ("backend", ">us", ">speed-up over eager [95%]", ""), rows)
        if t.doubt:
            held = entries(t.problem.device).get(t.problem.key(), {})
            stays = "" if held.get("doubt") or not save else "; the earlier decision, not so, stays"
            say(f"in doubt: {t.doubt}{stays}. Tune again when the machine is quiet.")
