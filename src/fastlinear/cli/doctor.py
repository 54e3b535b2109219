"""``fastlinear doctor``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from fastlinear.cli import options as opt
from fastlinear.cli.console import print_json, say, table


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor", rich_help_panel="This machine")(doctor)


def doctor(json: opt.Json = False, debug: opt.Debug = False) -> None:
    """Say what this machine offers: devices, versions, backends and why not. Changes nothing.

    A backend is judged by calls of each kind that its family has backends for; where it serves no
    ordinary one, the kind it is for is named. Compiles nothing, allocates nothing on a GPU, writes
    nothing.
    """
    data = _diagnose()
    if json:
        print_json(data)
        return
    rows = [(d["name"], d["device"], d["isa"], _size(d["memory_bytes"])) for d in data["devices"]]
    table("Devices", ("name", "torch device", "isa", ">memory"), rows)
    table("Versions", ("package", "version"), list(data["versions"].items()))
    if data["untested"]:
        say(f"Untested versions: {', '.join(data['untested'])}")
    table(
        "Backends",
        ("family", "device", "backend", "pieces", "available"),
        [
            (b["family"], b["device"], b["backend"], ", ".join(b["pieces"]), _available(b))
            for b in data["backends"]
        ],
    )
    say("Tuned cache")
    for device, path in data["cache"].items():
        say(f"  {device}: {path}")


def _diagnose() -> dict[str, Any]:
    import torch

    from fastlinear.core.device import device_facts
    from fastlinear.core.environment import untested
    from fastlinear.dispatch.cache import cache_path

    versions = _versions()
    names = ["cpu"]
    if torch.cuda.is_available():
        names += [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    return {
        "kind": "doctor",
        "devices": [{"device": name, **device_facts(name).to_json()} for name in names],
        "versions": versions,
        "untested": untested(versions),
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
    """Each backend of each family, on each kind of device: for what it is available, or why not."""
    from fastlinear.dispatch.backend import families

    rows: dict[tuple[str | None, ...], dict[str, Any]] = {}

    def add(family: str, device: str, backend: str, piece: str, only: str, why: str | None) -> None:
        if device == "cuda" and why is None and not _cuda():
            why = "torch sees no CUDA device"
        told = {"only_for": only if why is None else "", "why_not": why}
        row: dict[str, Any] = {"family": family, "device": device, "backend": backend, "pieces": []}
        key = family, device, backend, *told.values()
        rows.setdefault(key, row | told)["pieces"].append(piece)

    for device in ("cpu", "cuda"):
        on_cpu = device == "cpu"
        facts = {"dtype": "float32" if on_cpu else "bfloat16", "device": device}
        facts["precision"] = "highest" if on_cpu else "n/a"
        for family in families().values():
            examples = {} if family.examples is None else family.examples(facts)
            for backend in family.backends if examples else ():
                only, why = _judged(backend, examples)
                add(family.name, device, backend.name, backend.piece, only, why)
    return sorted(rows.values(), key=lambda row: row["family"])


def _judged(backend: Any, examples: Mapping[str, Any]) -> tuple[str, str | None]:
    """(what a backend is only for, why it is not available) by calls of each kind its family has
    backends for; "" where it serves the first, ordinary one."""
    found = {
        only: backend.reason_not(problem.with_piece(backend.piece))
        for only, problem in examples.items()
    }
    served = [only for only, why in found.items() if why is None]
    return (served[0], None) if served else ("", found[""])


def _cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _available(backend: dict[str, Any]) -> str:
    only = f"yes, for {backend['only_for']}" if backend["only_for"] else "yes"
    return backend["why_not"] or only


def _size(count: int) -> str:
    return f"{count / 2**30:.0f} GiB" if count else "-"
