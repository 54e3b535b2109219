"""Models, inputs and losses named on the command line as ``package.module:attribute``.

Importing a name runs its code; nothing is unpickled.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fastlinear.core.errors import InputError, ModelLoadError, UnsupportedError
from fastlinear.core.inputs import FORMS, normalize_inputs
from fastlinear.core.precision import FLOAT_DTYPES


def load_object(name: str, what: str) -> Any:
    """The attribute a ``package.module:attribute`` names. Raises ModelLoadError."""
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise ModelLoadError(
            what,
            "package.module:attribute",
            repr(name),
            "For example mypackage.models:make_model.",
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        absent = missing is not None and f"{module_name}.".startswith(f"{missing}.")
        raise ModelLoadError(
            what,
            f"module {module_name!r} to be importable from {here}",
            _said(error),
            "Run from the folder that holds the package, or install it."
            if absent
            else f"Install {missing}, which it imports."
            if missing
            else f"It was found but does not load: `python -c 'import {module_name}'` shows where.",
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise ModelLoadError(
                what,
                f"{module_name!r} to have the attribute {path!r}",
                f"no {part!r}{_near(found)}",
                "Check the spelling.",
            )
        found = getattr(found, part)
    return found


def load_model(name: str, *, device: str, dtype: str | None, train: bool, seed: int) -> nn.Module:
    """Build the named model on a device, in eval mode or (``train``) in training mode."""
    where = usable_device(device)
    factory = load_object(name, "model")
    torch.manual_seed(seed)
    model = factory
    if not isinstance(factory, nn.Module):
        if not callable(factory):
            raise ModelLoadError(
                "model",
                f"{name} to be an nn.Module or a callable returning one",
                f"an object of type {type(factory).__name__}",
                "Name a function without arguments that returns the model.",
            )
        model = _call(factory, "model", name)
    if not isinstance(model, nn.Module):
        raise ModelLoadError(
            "model",
            f"{name}() to return an nn.Module",
            f"an object of type {type(model).__name__}",
            "Return the model itself, without its inputs.",
        )
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise ModelLoadError(
            "model",
            f"{name}() to return a model with values",
            "parameters or buffers on the meta device",
            "Give it storage first, for example model.to_empty(device='cpu').",
        )
    model = model.to(where) if dtype is None else model.to(where, FLOAT_DTYPES[dtype])
    return model.train(train)


def load_inputs(
    name: str | None, *, model: str, device: str, dtype: str | None, seed: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The named inputs, or the model factory's ``example_inputs``, on the device: positional and
    keyword arguments. Raises ModelLoadError, or InputError for what is no inputs."""
    if name is None:
        factory = load_object(model, "model")
        value = getattr(factory, "example_inputs", None)
        if value is None:
            raise ModelLoadError(
                "inputs",
                f"--inputs, or {model} to carry an `example_inputs` attribute",
                "neither",
                f"Pass --inputs package.module:factory, a callable returning {FORMS}.",
            )
        label = f"{model}.example_inputs"
    else:
        value = load_object(name, "inputs")
        label = name
    torch.manual_seed(seed + 1)
    if not isinstance(value, torch.Tensor) and callable(value):
        value = _call(value, "inputs", label)
    call = normalize_inputs(value, label)
    if any(isinstance(t, torch.Tensor) and t.is_meta for t in tree_leaves(call)):
        raise ModelLoadError(
            "inputs",
            f"{label} to give tensors with values",
            "a tensor on the meta device",
            "Make it on the CPU; it is moved to --device.",
        )
    moved: tuple[tuple[Any, ...], dict[str, Any]] = _move(
        call, usable_device(device), None if dtype is None else FLOAT_DTYPES[dtype]
    )
    return moved


def check_loss(name: str | None, train: bool) -> None:
    """Raise InputError for a loss where none is computed."""
    if name is not None and not train:
        raise InputError(
            "--loss",
            "train mode, the only one in which a loss is computed",
            f"{name} in inference mode",
            "Add --mode train, or leave --loss out.",
        )


def load_loss(name: str | None) -> Callable[[Any], torch.Tensor] | None:
    """The named loss function, or None."""
    if name is None:
        return None
    loss = load_object(name, "loss")
    if not callable(loss):
        raise ModelLoadError(
            "loss",
            f"{name} to be a function from the model's output to a scalar tensor",
            f"an object of type {type(loss).__name__}",
            "Name the function itself; leave --loss out for the mean square of the outputs.",
        )
    function: Callable[[Any], torch.Tensor] = loss
    return function


def default_device() -> str:
    """The GPU that torch sees, or the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def usable_device(device: str) -> torch.device:
    """The torch device of that name, if this machine has it."""
    try:
        where = torch.device(device)
    except RuntimeError:
        raise ModelLoadError(
            "--device",
            "cpu, cuda or cuda:INDEX",
            repr(device),
            "`fastlinear doctor` says what this machine offers.",
        ) from None
    if where.type not in ("cpu", "cuda"):
        raise UnsupportedError(
            "--device",
            "cpu or cuda",
            repr(device),
            "Other devices are not served: choose cpu or cuda.",
        )
    if where.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (where.index or 0) >= count:
            raise UnsupportedError(
                "--device",
                f"a CUDA device torch can see ({count} here)",
                repr(device),
                "`fastlinear doctor` says what this machine offers.",
            )
    return where


def _call(factory: Callable[[], Any], what: str, name: str) -> Any:
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise ModelLoadError(
            what,
            f"{name}() to run without arguments and without an error",
            _said(error),
            "--debug shows where it was raised.",
        ) from error


def _move(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype if value.is_floating_point() else None)
    if isinstance(value, dict):
        return {key: _move(item, device, dtype) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_move(item, device, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_move(item, device, dtype) for item in value)
    return value


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _near(module: Any) -> str:
    names = sorted(n for n in vars(module) if not n.startswith("_")) if vars(module) else []
    return f"; it has {', '.join(names[:12])}" if names else ""
