"""The plan: what to rewrite, as pure data that can be stored, read back and checked.

Nothing here touches a model beyond reading its names and shapes.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from fastlinear.activations.reference import NAMES
from fastlinear.core import files
from fastlinear.core.errors import PlanError
from fastlinear.core.problem import Problem
from fastlinear.core.settings import MODES
from fastlinear.dispatch.backend import families
from fastlinear.rewrite import registry
from fastlinear.rewrite.swap.compiled_forward import COMPILE_MODES

T = TypeVar("T")
KIND = "plan"
FORMAT = 1
_MOST_BYTES = 64 << 20  # a site has about one KiB
ROUTES = ("plain", "parent", "chain", "own", "graph", "compile")
RULES = (
    *("linear_act", "graphed", "compiled"),
    *(name for rule in registry.RULES if rule.rewrites for name in rule.names),
)
_WHOLE = {"graphed": "graph", "compiled": "compile"}  # rule → its only route, and no other's


@dataclass(frozen=True)
class Rewrite:
    """One site's rewrite.

    Attributes:
        fqn: the linear's fully qualified name, or that of the weight of one written on parameters
            (routes ``"parent"`` and ``"chain"``); of route ``"own"`` and of rule ``"graphed"`` the
            module's, ``""`` for the model as a whole.
        rule: the family's name, that of a rule's folder, ``"graphed"`` or ``"compiled"``.
        activation: what is fused; ``"none"`` changes the backend only.
        route: ``"plain"`` (the linear alone), ``"parent"`` (the parent's forward makes one fused
            call of the linear and its activation) or ``"chain"`` (the forward of the module named
            by ``parent_fqn`` makes one call for a run of linears, for those of a gated MLP or of a
            group, for a layer of all its parallel MLPs, or for a linear and what follows it; or the
            first linear of a group makes it inside that module's calls);
            ``"own"`` is a grouped convolution, or a module with weights of its own, as one call;
            ``"graph"`` (rule ``"graphed"``) is a module replayed as CUDA graphs: the model as a
            whole or a part of it; ``"compile"`` (rule ``"compiled"``) the model or a block of it
            through ``torch.compile``.
        activation_fqn: the activation module, where there is one.
        parent_fqn: the module whose forward is swapped on the routes ``"parent"`` and
            ``"chain"``.
        backend: a forced forward backend, or None; of route ``"compile"`` torch.compile's mode.
        problem: the site's Problem as JSON.
        backends: piece → backend chosen when the plan was made.
    """

    fqn: str
    rule: str
    activation: str
    route: str
    activation_fqn: str | None = None
    parent_fqn: str | None = None
    backend: str | None = None
    problem: dict[str, Any] = field(default_factory=dict)
    backends: dict[str, str] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """The family whose backends compute it."""
        known = {name: r.family for r in registry.RULES for name in (r.name, *r.names)}
        return known.get(self.rule, self.rule)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return dict(vars(self))


def fingerprint(model: nn.Module) -> str:
    """Sixteen hex digits over the class name and the names, shapes and dtypes of all parameters
    and buffers; values do not count."""
    lines = [type(model).__qualname__]
    for kind, items in (("p", model.named_parameters()), ("b", model.named_buffers())):
        lines += [f"{kind} {name} {tuple(t.shape)} {t.dtype}" for name, t in items]
    return hashlib.sha256("\n".join(lines).encode(errors="surrogatepass")).hexdigest()[:16]


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Class, fingerprint and parameter count of a model, as JSON."""
    return {
        "class": type(model).__qualname__,
        "fingerprint": fingerprint(model),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


@dataclass(frozen=True)
class Plan:
    """Everything needed to rewrite the same model again on the same kind of machine.

    Attributes:
        model, mode, environment, inputs, fastlinear: what it was made of, where and by what.
        rewrites: what to rewrite.
        tuned: the choices of backends that were measured for it.
        advice: what the reader may do beyond that, which no rewrite does: ``code``, ``fqn``,
            ``advice`` and ``predicted_gain_us`` of findings. Applying a plan passes over it.
    """

    model: dict[str, Any]
    mode: str
    environment: dict[str, Any]
    inputs: dict[str, Any]
    rewrites: tuple[Rewrite, ...]
    fastlinear: str
    tuned: tuple[dict[str, Any], ...] = ()
    advice: tuple[dict[str, Any], ...] = ()

    @property
    def rows(self) -> tuple[int, ...]:
        """The buckets of rows, powers of two, for which anything was tuned, ascending."""
        return tuple(sorted({Problem.from_json(t["problem"]).rows for t in self.tuned}))

    @property
    def linears(self) -> tuple[Rewrite, ...]:
        """The rewrites of linears."""
        return tuple(r for r in self.rewrites if r.rule not in _WHOLE)

    @property
    def graphed(self) -> tuple[str, ...]:
        """The modules replayed as CUDA graphs; ``""`` is the model as a whole."""
        return tuple(r.fqn for r in self.rewrites if r.route == "graph")

    @property
    def compiled(self) -> tuple[str, ...]:
        """The modules compiled; ``""`` is the model as a whole."""
        return tuple(r.fqn for r in self.rewrites if r.route == "compile")

    @property
    def compile_mode(self) -> str | None:
        """The mode in which they are compiled."""
        return next((r.backend for r in self.rewrites if r.route == "compile"), None)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict of kind ``"plan"``."""
        return {
            "kind": KIND,
            "format": FORMAT,
            "fastlinear": self.fastlinear,
            "environment": self.environment,
            "model": self.model,
            "mode": self.mode,
            "inputs": self.inputs,
            "rewrites": [r.to_json() for r in self.rewrites],
            "tuned": list(self.tuned),
            "rows": list(self.rows),
            "advice": list(self.advice),
        }

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON, all or nothing; returns the path."""
        return write_json(path, self.to_json())


def write_json(path: str | Path, data: dict[str, Any]) -> Path:
    """Write JSON through a temporary file beside the target, so that a kill leaves no half; folders
    are made."""
    path = Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
            file.write("\n")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def load(source: str | Path | dict[str, Any]) -> Plan:
    """Read a plan from a path or from parsed JSON. Raises PlanError for anything unfit."""
    if not isinstance(source, str | PathLike | dict):
        raise PlanError(
            "apply_",
            "a plan: its path, or its parsed JSON",
            f"an object of type {type(source).__name__}",
            "Of a Result, give result.plan.to_json(); of a Plan, plan.to_json().",
        )
    data = source if isinstance(source, dict) else _read(Path(source))
    if not isinstance(data, dict) or data.get("kind") != KIND:
        kind = f"kind={data.get('kind')!r}" if isinstance(data, dict) else _json_kind(data)
        raise PlanError(
            "apply_",
            'a fastlinear plan (JSON with "kind": "plan")',
            kind,
            "Write one with result.save(path); the JSON of a Result or a profile is none.",
        )
    if data.get("format") != FORMAT:
        raise PlanError(
            "apply_",
            f"plan format {FORMAT}",
            f"format {data.get('format')!r}",
            "Make the plan again with optimize_ of this version.",
        )
    try:
        plan = _parse(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise PlanError(
            "apply_",
            "a complete plan",
            f"a plan with a bad or missing field ({why})",
            "Make the plan again with optimize_; do not edit it by hand.",
        ) from error
    return plan


def _json_kind(data: Any) -> str:
    """What JSON calls a value that is no object."""
    return {list: "an array", str: "a text", bool: "a boolean"}.get(
        type(data), "null" if data is None else "a number"
    )


def _read(path: Path) -> Any:
    try:
        content = files.read(path.expanduser(), _MOST_BYTES)
    except OSError as error:
        raise PlanError(
            "apply_",
            "a readable plan file",
            f"{path}: {error.strerror}",
            "Write one with result.save(path), or with fastlinear optimize --plan.",
        ) from error
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:  # bad JSON, or bytes that are no text
        why = str(error) if content else "an empty file"
        raise PlanError(
            "apply_",
            "a plan in JSON",
            f"{path}: {why}",
            "The file is corrupt: make the plan again with result.save(path).",
        ) from error


def _parse(data: dict[str, Any]) -> Plan:
    rewrites: dict[tuple[str, str], Rewrite] = {}
    for item in _of(list, data, "rewrites"):
        if not isinstance(item, dict):
            raise TypeError(f"a rewrite is {_json_kind(item)}")
        rewrite = Rewrite(**_named_as_today(_without_fast_matmul(item)))
        known = rewrite.rule in RULES and rewrite.route in ROUTES and rewrite.activation in NAMES
        for rule, route in _WHOLE.items():
            known &= (rewrite.rule == rule) == (rewrite.route == route)
        known &= rewrite.route != "compile" or rewrite.backend in COMPILE_MODES
        known &= isinstance(rewrite.fqn, str)
        for name in (rewrite.activation_fqn, rewrite.parent_fqn, rewrite.backend):
            known &= name is None or isinstance(name, str)
        known &= isinstance(rewrite.problem, dict) and isinstance(rewrite.backends, dict)
        known = known and all(isinstance(name, str) for name in rewrite.backends.values())
        known = known and (rewrite.fqn, rewrite.rule) not in rewrites
        if known and rewrite.problem:
            Problem.from_json(rewrite.problem)
        if not known:
            raise ValueError(f"unknown rewrite of {rewrite.fqn!r}: {rewrite.rule}, {rewrite.route}")
        rewrites[rewrite.fqn, rewrite.rule] = rewrite
    if data["mode"] not in MODES:
        raise ValueError(f"mode {data['mode']!r}")
    given = _of(dict, data, "inputs")
    inputs = {"args": list(given["args"]), "kwargs": dict(given["kwargs"])}
    facts, model = _of(dict, data, "environment"), _of(dict, data, "model")
    _of(str, facts, "torch")
    _of(dict, {"flags": {}, **facts}, "flags")
    for key in ("slug", "kind"):
        _of(str, _of(dict, facts, "device"), key)
    return Plan(
        model={k: model[k] for k in ("class", "fingerprint", "parameters")},
        mode=data["mode"],
        environment=dict(facts),
        inputs=inputs,
        rewrites=tuple(rewrites.values()),
        fastlinear=str(data["fastlinear"]),
        tuned=tuple(
            _named_as_today(_tuned(item)) for item in _of(list, {"tuned": [], **data}, "tuned")
        ),
        advice=tuple(_of(list, {"advice": [], **data}, "advice")),
    )


def _named_as_today(item: Any) -> Any:
    """A rewrite or a measurement with the names that its family's backends have today."""
    if not isinstance(item, dict):
        return item
    problem = item.get("problem")
    told = problem.get("family") if isinstance(problem, dict) else None
    now = families()[told].renamed if isinstance(told, str) and told in families() else {}
    if not now:
        return item
    item = dict(item)
    for name in ("backend", "best"):
        if isinstance(item.get(name), str):
            item[name] = now.get(item[name], item[name])
    if isinstance(item.get("backends"), dict):
        item["backends"] = {
            k: now.get(v, v) if isinstance(v, str) else v for k, v in item["backends"].items()
        }
    for name in ("times_us", "hashes"):
        if isinstance(item.get(name), dict):
            item[name] = {now.get(k, k): v for k, v in item[name].items()}
    if isinstance(item.get("rivals"), list):
        item["rivals"] = [now.get(v, v) if isinstance(v, str) else v for v in item["rivals"]]
    return item


def _without_fast_matmul(item: dict[str, Any]) -> dict[str, Any]:
    """A rewrite without what plans of 0.1 say of Strassen's algorithm, which is no backend now."""
    item = dict(item)
    allowed = item.pop("allow_fast_matmul", False)
    if not isinstance(allowed, bool):
        raise TypeError("'allow_fast_matmul' is not true or false")
    if allowed and item.get("backend") == "strassen":
        item["backend"] = None
    return item


def _tuned(item: Any) -> Any:
    """A measurement whose Problem has no option ``fast``, as those of mlp had in plans of 0.1.

    Where it was ``"yes"``, the option stays: no call has that Problem now.
    """
    problem = item.get("problem") if isinstance(item, dict) else None
    options = problem.get("options") if isinstance(problem, dict) else None
    if not isinstance(problem, dict) or not isinstance(options, dict):
        return item
    if problem.get("family") != "mlp" or options.get("fast") != "no":
        return item
    options = {name: value for name, value in options.items() if name != "fast"}
    return item | {"problem": problem | {"options": options}}


_JSON_NAMES: dict[Any, str] = {list: "an array", dict: "an object", str: "a text"}


def _of(kind: type[T], data: dict[str, Any], key: str) -> T:
    """The value of a field. Raises KeyError without it and TypeError for one of another kind."""
    value = data[key]
    if not isinstance(value, kind):
        raise TypeError(f"{key!r} is not {_JSON_NAMES[kind]}")
    return value
