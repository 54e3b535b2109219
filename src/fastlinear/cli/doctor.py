"""``fastlinear doctor``."""

from __future__ import annotations

from typing import Any

import typer

from fastlinear.cli import options as opt
from fastlinear.cli.console import print_json, table


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor", rich_help_panel="This machine")(doctor)


def doctor(json: opt.Json = False, debug: opt.Debug = False) -> None:
    """Say what this machine offers: devices, versions, backends and why not. Changes nothing.

    Compiles nothing, allocates nothing on a GPU, writes nothing.
    """
    data = _diagnose()
    if json:
        print_json(data)
        return
    rows = [(d["name"], d["device"], d["isa"], _size(d["memory_bytes"])) for d in data["devices"]]
    table("Devices", ("name", "torch device", "isa", ">memory"), rows)
    table("Versions", ("package", "version"), list(data["versions"].items()))
    table(
        "Backends",
        ("family", "device", "backend", "pieces", "available"),
        [
            (b["family"], b["device"], b["backend"], ", ".join(b["pieces"]), b["why_not"] or "yes")
            for b in data["backends"]
        ],
    )
    typer.echo("Tuned cache")
    for device, path in data["cache"].items():
        typer.echo(f"  {device}: {path}")


def _diagnose() -> dict[str, Any]:
    import torch

    from fastlinear.core.device import device_facts
    from fastlinear.dispatch.cache import cache_path

    names = ["cpu"]
    if torch.cuda.is_available():
        names += [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    return {
        "kind": "doctor",
        "devices": [{"device": name, **device_facts(name).to_json()} for name in names],
        "versions": _versions(),
        "backends": _backends(),
        "cache": {name: str(cache_path(name)) for name in names},
    }


def _versions() -> dict[str, str]:
    import platform
    from importlib import metadata

    import torch

    from fastlinear import __version__

    found = {"python": platform.python_version(), "fastlinear": __version__}
    for package in ("torch", "triton", "transformers", "scikit-learn", "matplotlib"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    found["CUDA of torch"] = torch.version.cuda or "none (CPU build)"
    found["torch threads"] = str(torch.get_num_threads())
    return found


def _backends() -> list[dict[str, Any]]:
    """Each backend of each family, on each kind of device, with why it is not available."""
    import fastlinear.ops.linear_act
    import fastlinear.ops.mlp  # noqa: F401 - a family is known once it is imported
    from fastlinear.dispatch.backend import families

    rows: dict[tuple[str, str, str, str | None], dict[str, Any]] = {}
    for family in families().values():
        for device in ("cpu", "cuda"):
            for backend in family.backends:
                problem = _example(family.name, backend.piece, device)
                if problem is None:
                    continue
                why = backend.reason_not(problem)
                key = (family.name, device, backend.name, why)
                rows.setdefault(
                    key,
                    {
                        "family": family.name,
                        "device": device,
                        "backend": backend.name,
                        "pieces": [],
                        "why_not": why,
                    },
                )["pieces"].append(backend.piece)
    if not _cuda():
        for row in rows.values():
            if row["device"] == "cuda" and row["why_not"] is None:
                row["why_not"] = "torch sees no CUDA device"
    return list(rows.values())


def _example(family: str, piece: str, device: str) -> Any:
    """A call that every backend of the family is meant for, or None for an unknown family."""
    facts: dict[str, Any] = {"dtype": "float32", "device": device, "precision": "highest"}
    if device == "cuda":
        facts |= {"dtype": "bfloat16", "precision": "n/a"}
    if family == "linear_act":
        from fastlinear.ops.linear_act import backends as linear_act

        return linear_act.problem(piece, 64, 1024, 1024, activation="gelu_tanh", **facts)
    if family == "mlp":
        from fastlinear.ops.mlp import backends as mlp

        return mlp.problem(piece, 16, (64,) * 9, fast=True, **facts)
    if family == "diagonal_linear":
        from fastlinear.ops.diagonal_linear import problem as diagonal

        return diagonal.problem(piece, 64, 1024, dtype=facts["dtype"], device=device)
    if family == "gated_mlp":
        from fastlinear.ops.gated_mlp import problem as gated

        return gated.problem(piece, 64, 512, 1024, 512, **facts)
    if family == "grouped_linear":
        from fastlinear.ops.grouped_linear import problem as grouped

        return grouped.problem(piece, 64, 8, 64, 64, **facts)
    return None


def _cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _size(count: int) -> str:
    return f"{count / 2**30:.0f} GiB" if count else "-"
