"""``fastlinear doctor``."""

from __future__ import annotations

from functools import partial
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
        examples = _examples(device)
        for family in families().values():
            for backend in family.backends if family.name in examples else ():
                only, why = _judged(backend, examples[family.name])
                add(family.name, device, backend.name, backend.piece, only, why)
        for name, (backends, why_not) in _without_records().items():
            for backend_name in backends:
                why = why_not(backend_name, device)
                for piece in ("forward", "backward"):
                    add(name, device, backend_name, piece, "", why)
    return sorted(rows.values(), key=lambda row: row["family"])


def _judged(backend: Any, examples: dict[str, Any]) -> tuple[str, str | None]:
    """(what a backend is only for, why it is not available) by calls of each kind its family has
    backends for; "" where it serves the first, ordinary one."""
    found = {
        only: backend.reason_not(problem.with_piece(backend.piece))
        for only, problem in examples.items()
    }
    served = [only for only, why in found.items() if why is None]
    return (served[0], None) if served else ("", found[""])


def _examples(device: str) -> dict[str, dict[str, Any]]:
    """Family → calls that its backends are meant for, an ordinary one first, by what is special."""
    from fastlinear.ops.diagonal_linear import problem as diagonal
    from fastlinear.ops.gated_mlp import problem as gated
    from fastlinear.ops.grouped_linear import problem as grouped
    from fastlinear.ops.linear_act import problem as linear_act
    from fastlinear.ops.mlp import backends as mlp

    place: dict[str, Any] = {
        "dtype": "float32" if device == "cpu" else "bfloat16",
        "device": device,
    }
    facts = place | {"precision": "highest" if device == "cpu" else "n/a"}
    layer, group = partial(linear_act.problem, "forward"), partial(grouped.problem, "forward")
    gelu = facts | {"activation": "gelu_tanh"}
    return {
        "linear_act": {
            "": layer(64, 1024, 1024, **gelu),
            "few rows": layer(8, 1024, 1024, **gelu),
            "rows of odd lengths": layer(512, 1023, 1023, **gelu),
        },
        "mlp": {
            "": mlp.problem("forward", 16, (64,) * 9, **facts),
            "wide layers": mlp.problem("forward", 4096, (4096,) * 3, **facts),
        },
        "diagonal_linear": {"": diagonal.problem("forward", 64, 1024, **place)},
        "gated_mlp": {"": gated.problem("forward", 64, 512, 1024, 512, **facts)},
        "grouped_linear": {
            "": group(64, 8, 64, 64, **facts),
            "groups of 128 features and more": group(64, 8, 128, 128, **facts),
            "channels first": group(64, 8, 64, 64, order="channels", length=16, **facts),
        },
    }


def _without_records() -> dict[str, Any]:
    """Op → (its backends, why one is not available on a device), of ops that choose themselves."""
    from fastlinear.ops.ragged_linear import op as ragged
    from fastlinear.ops.ragged_linear.validation import BACKENDS
    from fastlinear.ops.unequal_linear import op as unequal

    return {
        ragged.NAME: (BACKENDS, ragged.why_not),
        unequal.NAME: (unequal.BACKENDS, unequal.why_not),
    }


def _cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _available(backend: dict[str, Any]) -> str:
    only = f"yes, for {backend['only_for']}" if backend["only_for"] else "yes"
    return backend["why_not"] or only


def _size(count: int) -> str:
    return f"{count / 2**30:.0f} GiB" if count else "-"
