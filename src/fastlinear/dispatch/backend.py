"""Records of families and of their backends, and the registry that holds them."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fastlinear.core.cost import Cost
from fastlinear.core.deprecated import renamed
from fastlinear.core.errors import InputError
from fastlinear.core.precision import float32_precision
from fastlinear.core.problem import Problem
from fastlinear.dispatch.space import Space
from fastlinear.dispatch.work import Work

WIDENED = "widened"
"""The backend that several families have, see ``dispatch.widened``."""
about_to_run: ContextVar[bool] = ContextVar("about_to_run", default=False)
"""Whether ``reason_not`` is asked for a call that runs: its libraries are then compiled."""


def always(_: Problem) -> str | None:
    """``reason_not`` of a backend that serves every Problem."""
    return None


@dataclass(frozen=True)
class Backend:
    """One way to compute one piece of a family.

    Attributes:
        family: the family's name.
        piece: which piece it computes (``"forward"``, ``"grad_pre"``…).
        name: ``"eager"``, ``"cublaslt"``, ``"triton"``, ``"cuda"``, ``"onednn"``…
        target: ``"package.module:function"``; imported on first use only, so that importing
            fastlinear never imports Triton or a CUDA compiler.
        reason_not: why it cannot serve a Problem, or None when it can. Must not initialise CUDA
            or import the target.
        sources: files and folders of the package whose code, besides the module's own, the cache
            key covers.
        why_avoided: why it is not chosen by prediction where another one can serve, for its
            numbers' sake, or None.
        on_request: whether it is taken only where the caller asks for it, never for its speed.
        by_problem: whether the target makes the function for a Problem's kind of calls.
    """

    family: str
    piece: str
    name: str
    target: str
    reason_not: Callable[[Problem], str | None]
    sources: tuple[str, ...] = ()
    why_avoided: Callable[[Problem], str | None] = always
    on_request: bool = False
    by_problem: bool = False

    def load(self, problem: Problem | None = None) -> Callable[..., Any]:
        """Import the module and return the function, for calls of the Problem's kind where it is
        made ``by_problem``."""
        target = _load(self.target)
        return target(problem) if self.by_problem else target

    def why_not_ready(self, problem: Problem) -> str | None:
        """Why it cannot serve a Problem at once, or None; what it needs is compiled first."""
        token = about_to_run.set(True)
        try:
            return self.reason_not(problem)
        finally:
            about_to_run.reset(token)

    def source_files(self) -> tuple[Path, ...]:
        """Its module's file, and all files of ``sources``."""
        return _source_files(self.target, self.sources)

    def source_hash(self) -> str:
        """Twelve hex digits over the source files of this backend."""
        return _source_hash(self.target, self.sources)


@dataclass(frozen=True)
class Family:
    """One op with everything dispatch and tests need to know of it.

    Attributes:
        name: the op's name.
        pieces: the pieces that are chosen separately.
        backends: every backend of every piece. Where nobody tells what they cost, the first that
            can serve is taken.
        make_inputs: (Problem, device, seed) → the argument tuple the piece's backends take.
        reference: (Problem, inputs) → the result in the inputs' own dtype by plain PyTorch; with
            float64 inputs it is the oracle. A tensor or a tuple of tensors and None.
        cost: least flops and bytes of a Problem.
        cold: whether on a GPU its calls find the L2 cache filled by others. True for a layer of a
            large model, which other layers' weights follow: tuning then rotates over inputs that
            together exceed the cache. False for what is a whole small model, run over and over:
            one set of inputs.
        timed: (Backend, Problem) → what tuning times in place of the backend's function: a
            callable of the same arguments that costs what a caller of the op pays, or None for
            the function itself. Verification is always of the function.
        examples: facts of a device (``dtype``, ``device``, ``precision``) → calls that backends are
            meant for, by what is special of each; ``""`` is the ordinary one.
        space: small calls of every kind, from which tests draw.
        command: ``"package.module:COMMAND"``, the ``op.command.Command`` that describes its calls
            on the command line; imported there only.
        tuning_order: the forward's Problem → all that decide about such a call, in the order in
            which to tune them; None where that is the order of ``pieces``.
        backward_of: (the backward's Problem, a backend of the forward) → that Problem behind it,
            where what the forward keeps depends on the backend.
        cpu_work, gpu_work: (Problem, backend's name) → what the backend does in such a call on a
            CPU, on a GPU, as kinds of work that have prices; None where nobody has told.
        removed: names of backends that earlier versions had → what to use instead, one sentence.
        renamed: former names of backends → those of today.
    """

    name: str
    pieces: tuple[str, ...]
    backends: tuple[Backend, ...]
    make_inputs: Callable[[Problem, torch.device, int], tuple[Any, ...]]
    reference: Callable[[Problem, tuple[Any, ...]], Any]
    cost: Callable[[Problem], Cost]
    cold: bool = False
    timed: Callable[[Backend, Problem], Callable[..., Any] | None] | None = None
    examples: Callable[[Mapping[str, Any]], Mapping[str, Problem]] | None = None
    space: Space | None = None
    command: str | None = None
    tuning_order: Callable[[Problem], tuple[Problem, ...]] | None = None
    backward_of: Callable[[Problem, str], Problem] | None = None
    cpu_work: Callable[[Problem, str], tuple[Work, ...] | None] | None = None
    gpu_work: Callable[[Problem, str], tuple[Work, ...] | None] | None = None
    removed: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)

    def candidates(self, piece: str, *, on_request: bool = False) -> tuple[Backend, ...]:
        """All backends of one piece, able to serve or not.

        Args:
            on_request: with those that are taken only where the caller asks for them.
        """
        every = (b for b in self.backends if b.piece == piece)
        return tuple(b for b in every if on_request or not b.on_request)

    def work_of(self, p: Problem, backend: str) -> tuple[Work, ...] | None:
        """What a backend does in a call, or None where nobody has told."""
        if backend == WIDENED:
            return _widened_work(self, p)  # type: ignore[no-any-return]
        told = {"cpu": self.cpu_work, "cuda": self.gpu_work}.get(p.device)
        return None if told is None else told(p, backend)

    def load_command(self) -> Any:
        """Its command, or None."""
        return None if self.command is None else _load(self.command)

    def current(self, backend: str) -> str:
        """The name today of a backend that a caller or a plan names; a former one warns once."""
        now = self.renamed.get(backend)
        return backend if now is None else renamed("backend", backend, now)

    def remedy(self, unknown: str) -> str:
        """What to do where a caller names a backend that the family does not have."""
        instead = self.removed.get(unknown)
        leave_out = "Leave backend out to let fastlinear choose."
        return leave_out if instead is None else f"It was removed. {instead} {leave_out}"


_CODE = (".py", ".cu", ".cpp", ".h")
_FOLDERS = {
    "linear_act": "linear",
    "mlp": "mlp",
    "diagonal_linear": "diagonal",
    "gated_mlp": "gated",
    "grouped_linear": "grouped",
    "ragged_linear": "grouped.ragged",
    "unequal_linear": "grouped.unequal",
    "experts": "experts",
}
_HOMES = {name: f"fastlinear.families.{folder}.backends" for name, folder in _FOLDERS.items()}
"""Where the package's own families register themselves, imported when first asked for."""
_FAMILIES: dict[str, Family] = {}


def register_family(family: Family) -> Family:
    """Add a family to the registry. The last registration of a name holds."""
    _FAMILIES[family.name] = family
    return family


def names() -> tuple[str, ...]:
    """The names of ``families``; imports none of them."""
    return (*_FOLDERS, *(name for name in _FAMILIES if name not in _HOMES))


def home(name: str) -> str:
    """The package that holds a family of the package's own."""
    return _HOMES[name].rpartition(".")[0]


def families() -> Mapping[str, Family]:
    """The package's families, and those registered besides, by name."""
    for home in _HOMES.values():
        importlib.import_module(home)
    return dict(_FAMILIES)


def family(name: str) -> Family:
    """The family of that name. Raises InputError for an unknown one."""
    if name not in _FAMILIES and name in _HOMES:
        importlib.import_module(_HOMES[name])
    if name not in _FAMILIES:
        raise InputError(
            "fastlinear",
            f"a family in {', '.join(sorted(families()))}",
            repr(name),
            "A family of your own is known once it was given to register_family.",
        )
    return _FAMILIES[name]


def deferred(target: str) -> Callable[..., Any]:
    """The function ``"package.module:function"``, imported at its first call."""

    def function(*arguments: Any) -> Any:
        return _load(target)(*arguments)

    return function


_widened_work = deferred("fastlinear.dispatch.widened:work")


def widened_backends(family: str, *pieces: str) -> tuple[Backend, ...]:
    """``widened`` for a family's pieces, see ``dispatch.widened``."""
    target = "fastlinear.dispatch.widened:load"
    made = (Backend(family, p, WIDENED, target, _why_not_widened, by_problem=True) for p in pieces)
    return tuple(made)


def _why_not_widened(p: Problem) -> str | None:
    if p.device != "cpu":
        return "for CPUs only: GPUs multiply 16 bits at a higher rate than float32"
    if p.dtype not in ("bfloat16", "float16"):
        return f"bfloat16 and float16 only, not {p.dtype}"
    if float32_precision() != "highest":
        return "float32 products of lower precision may be less exact than those of 16 bits"
    return None


@lru_cache(maxsize=256)
def _load(target: str) -> Callable[..., Any]:
    module, _, attribute = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return function


def check_backend(backend: str | None, family_name: str, function: str) -> None:
    """For a name given before any call: raise InputError unless a forward's backend of the family
    has it, or it is None."""
    if backend is None:
        return
    known = family(family_name)
    backend = known.current(backend)
    names = sorted({b.name for b in known.candidates("forward", on_request=True)})
    if backend not in names:
        raise InputError(
            function,
            f"a backend of {family_name} in {', '.join(names)}",
            repr(backend),
            known.remedy(backend),
        )


def why_no_gpu(problem: Problem, *packages: str) -> str | None:
    """Why no kernel of ours for a GPU can serve a Problem, or None.

    Args:
        packages: what compiles it must be installed.
    """
    if problem.device != "cuda":
        return "its kernels run on CUDA devices only"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    missing = [package for package in packages if not is_installed(package)]
    return f"the package {missing[0]} is not installed" if missing else None


def why_no_hopper(problem: Problem) -> str | None:
    """Why no kernel of ours for Hopper can serve a Problem, or None."""
    if (why := why_no_gpu(problem)) is not None:
        return why
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"needs compute capability 9.0 (Hopper), not {capability[0]}.{capability[1]}"
    return None


@lru_cache(maxsize=8)
def is_installed(package: str) -> bool:
    """Whether a package is there to be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def _source_files(target: str, sources: tuple[str, ...]) -> tuple[Path, ...]:
    spec = importlib.util.find_spec(target.partition(":")[0])
    assert spec is not None
    assert spec.origin is not None
    found, package = [Path(spec.origin)], Path(__file__).parents[1]
    for place in (package / name for name in sources):
        if place.is_dir():
            found += sorted(file for file in place.iterdir() if file.suffix in _CODE)
        else:
            found.append(place)
    return tuple(found)


@lru_cache(maxsize=256)
def _source_hash(target: str, sources: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for file in _source_files(target, sources):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
