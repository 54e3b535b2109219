"""One run under watch before a callable is recorded: what a CUDA graph cannot hold is named here.

A graph replays kernels at fixed addresses. So a callable must not read values back to the host, and
every tensor it reads must be an argument or one whose address is checked at each call.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastlinear.core.errors import UnsupportedError

_aten = torch.ops.aten
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index"}
_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
_STATIC = "Compute with tensors all the way (torch.where, masks), or leave that part outside."


def user_line() -> str:
    """The innermost line of code on the stack that belongs to neither torch nor fastlinear."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_FOLDERS, "<")):
            return line_text(name, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return "a line that could not be found"


def line_text(name: str, number: int) -> str:
    """``file:number: `code` `` of one source line."""
    return f"{name}:{number}: `{linecache.getline(name, number).strip()}`"


def raised_line(error: BaseException) -> str:
    """`` at `` and the innermost line of a traceback outside torch and fastlinear, if any."""
    found, trace = "", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith((*_FOLDERS, "<")):
            found = f" at {line_text(name, trace.tb_lineno)}"
        trace = trace.tb_next
    return found


class Inspection(TorchDispatchMode):
    """Watches the torch ops of one run and raises UnsupportedError at what no graph can hold.

    Args:
        function: whom errors speak for.
        device: where all tensors must live.
        arguments: the run's tensor arguments, which it must not write.
        watched: tensors it may read besides, and write.

    Attributes:
        random: whether an op drew random numbers.
        generators: those it was given to draw from, each with its state from before.
        before: the watched tensors that it wrote, each with its values from before.
        made_bytes: the memory of all its results together.
    """

    def __init__(
        self,
        function: str,
        device: torch.device,
        arguments: Sequence[Tensor],
        watched: Sequence[Tensor],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.random = False
        self.generators: list[tuple[torch.Generator, Tensor]] = []
        self.before: list[tuple[Tensor, Tensor]] = []
        self.made_bytes = 0
        self._function, self._device = function, device
        self._arguments = {_storage(t) for t in arguments}
        self._watched: dict[int, list[Tensor]] = {}
        for t in watched:
            self._watched.setdefault(_storage(t), []).append(t)
        self._saved: set[int] = set()
        self._made: set[int] = set()

    def restore(self) -> None:
        """Put back what the run wrote into watched tensors."""
        with torch.no_grad():
            for tensor, values in self.before:
                tensor.copy_(values)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Check one op, run it, and remember what it made."""
        kwargs = dict(kwargs or {})
        self._refuse_data_dependence(func, args)
        given = list(_tensors((args, kwargs)))
        if func is _aten.lift_fresh.default:  # a constant written out in the code
            self._made.update(map(_storage, given))
        for t in given:
            self._check_known(t)
        self._check_writes(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random = True
            for g in (*args, *kwargs.values()):
                if isinstance(g, torch.Generator) and all(g is not h for h, _ in self.generators):
                    self.generators.append((g, g.get_state()))
        out = func(*args, **kwargs)
        theirs, made = set(map(_storage, given)), list(_tensors(out))
        # beside results on the device, attention returns the seeds of no dropout on the host
        first = made[0].device if made else self._device
        if first.type != self._device.type and any(g.device != first for g in given):
            self._refuse("no copy between devices", f"a copy to {first}")
        for t in made:
            self._made.add(_storage(t))
            self.made_bytes += 0 if _storage(t) in theirs else t.nbytes
        return out

    def _refuse_data_dependence(self, func: Any, args: Sequence[Any]) -> None:
        tags = func.tags
        if torch.Tag.data_dependent_output in tags:
            self._refuse("no control flow that depends on values", f"{func} reads a value back")
        name = func._schema.name
        masks = name in _INDEXED and any(
            t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]
        )
        if masks or (torch.Tag.dynamic_output_shape in tags and name not in _INDEXED):
            self._refuse("shapes that do not depend on values", f"{func}")

    def _check_known(self, t: Tensor) -> None:
        storage = _storage(t)
        if storage in self._made:
            return
        if t.device.type != self._device.type:  # a replay would not look at it again
            what = "a number held in a" if t.dim() == 0 else "values of a"
            self._refuse(f"tensors on {self._device.type}", f"{what} {t.device.type} tensor read")
        if storage in self._arguments or storage in self._watched:
            return
        raise UnsupportedError(
            self._function,
            "every tensor it reads to be an argument, or a parameter, buffer or attribute "
            "of the module, so that a new one in its place is noticed",
            f"a {tuple(t.shape)} {t.dtype} tensor from elsewhere at {user_line()}",
            "Pass it as an argument, register it as a buffer, or name it in watch=[...].",
        )

    def _check_writes(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if "batch_norm" in func._schema.name:  # writes running statistics its schema hides
            self._save(t for t in _tensors((args, kwargs)) if not t.requires_grad)
        if not func._schema.is_mutable:
            return
        for i, a in enumerate(func._schema.arguments):
            if a.alias_info is None or not a.alias_info.is_write:
                continue
            value = args[i] if i < len(args) else kwargs.get(a.name)
            for t in _tensors(value):
                if _storage(t) in self._arguments:
                    self._refuse(
                        "arguments that are only read",
                        f"{func} writes into one",
                        "Work on a copy inside, or name the argument in by_address.",
                    )
                self._save([t])

    def _save(self, written: Iterable[Tensor]) -> None:
        for storage in map(_storage, written):
            if storage in self._watched and storage not in self._saved:
                self._saved.add(storage)
                with torch.no_grad():
                    self.before += [(w, w.detach().clone()) for w in self._watched[storage]]

    def _refuse(self, expected: str, received: str, remedy: str = _STATIC) -> None:
        raise UnsupportedError(
            self._function,
            f"{expected}, which a CUDA graph cannot record",
            f"{received} at {user_line()}",
            remedy,
        )


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata  # type: ignore[no-any-return]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for v in value:
            yield from _tensors(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from _tensors(v)
