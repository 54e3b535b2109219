"""The front end: how a public call finds and runs its plan.

A warm call is one look-up in a table of C++, by every fact of its tensors. Where that knows no such
call, or cannot be built, ``looked_up`` finds the plan; the first call of a kind makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from fastlinear.core import calls
from fastlinear.core.errors import InputError, not_invariant
from fastlinear.core.precision import float32_precision
from fastlinear.core.settings import BATCH_INVARIANT, asked, first_use_off, first_use_s
from fastlinear.core.tensor_kinds import carried
from fastlinear.dispatch import cache
from fastlinear.dispatch.backend import deferred
from fastlinear.dispatch.explain import Explanation
from fastlinear.dispatch.select import Choice
from fastlinear.fastpath import autograd_node, lookup
from fastlinear.op import library
from fastlinear.op.spec import Arguments, OpSpec, Resolved, first, leaves, mapped

_Function = TypeVar("_Function", bound=Callable[..., Any])
_PUBLIC: dict[str, Callable[..., Any]] = {}
_is_compiling = torch.compiler.is_compiling
_is_traced = torch.compiler.is_dynamo_compiling  # costs half as much, and knows no export
_is_transformed = calls.transforms_active
_any_autocast = torch._C._is_any_autocast_enabled
_grad_enabled = torch.is_grad_enabled
_precision = float32_precision
_PLAIN, _STRIDED, _FLOAT32 = calls.PLAIN, torch.strided, torch.float32
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_facts = attrgetter("shape", "dtype", "device", "layout", "requires_grad")


_measure = deferred("fastlinear.dispatch.first_use:measure")
_have_blas = deferred("fastlinear.op.blas:make_ready")


def no_table(*_: Any) -> None:
    """Stands in for a table that is not there yet: it knows no call."""
    return


def public(function: _Function) -> _Function:
    """Decorator of a public function, unchanged: tensor subclasses receive it."""
    _PUBLIC[function.__name__] = function
    return function


def _is_lazy(t: Tensor | None) -> bool:
    """Whether a tensor is one only to PyTorch's ops: kernels read memory as it lies."""
    return t is not None and (t.is_neg() or _is_wrapped(t))


def _wraps(arguments: Arguments) -> bool:
    """Whether a tensor escaped from a transform: its memory is that of another underneath."""
    return any(t is not None and _is_wrapped(t) for t in leaves(arguments))


def _given(arguments: Arguments) -> list[Tensor]:
    """The tensors of a call, x first."""
    return [t for t in leaves(arguments) if t is not None]


class Front:
    """The front end of one family.

    Attributes:
        call: ``Arguments`` unpacked → the result; traced by ``torch.compile`` as a registered op.
        table: the C++ look-up of ready plans; ``no_table`` until it is built.
        plans: key of a kind of call → what serves it.
    """

    def __init__(self, spec: OpSpec) -> None:
        self.spec = spec
        self.table: Callable[..., Any] = no_table
        self.plans: dict[Any, Resolved] = {}
        self.flat = not spec.sequences and all(isinstance(n, str) for n in spec.operands)
        self.call: Callable[..., Any] = _entry(self, len(spec.options))
        cache.on_change(self.forget)
        # those seen before are made anew, and put into the table
        lookup.on_ready(self.plans.clear)
        autograd_node.on_ready(self.clear_table)

    def run(self, *arguments: Any) -> Any:
        """``call`` of tensors that exist although a compiler traces: it may run a registered op to
        see what comes out."""
        y = self.table(*arguments)
        if y is not None:
            return y
        token = first_use_off.set(True)
        try:
            return self.looked_up(*arguments)
        finally:
            first_use_off.reset(token)

    def looked_up(self, a: Any, b: Any, c: Any, *options: Any) -> Any:
        """The call by its plan, which the first call of a kind makes.

        Where no C++ can be compiled every call comes here, so each look is a look too many.
        """
        spec = self.spec
        given = a, b, c
        if spec.redirect is not None and (found := spec.redirect((*given, *options))) is not None:
            return found
        if spec.normal is not None:
            a, b, c, *_ = spec.normal((*given, *options))
        facts: list[Any] = []
        try:
            for t in (a, b, c) if self.flat else leaves((a, b, c)):
                if type(t) in _PLAIN:
                    facts += _facts(t), t.stride()
                elif t is None:
                    facts.append(None)
                else:
                    return self.fallback((a, b, c, *options))
        except RuntimeError:  # sparse and nested tensors have no strides
            return self.fallback((a, b, c, *options))
        if facts and facts[0] is None:
            spec.validate(a, b, c, *options)  # raises: there is nothing to compute on
        if _is_transformed():
            return self.fallback((a, b, c, *options))
        x = a[0] if type(a) is tuple else a
        autocast = calls.autocast_dtype(x) if _any_autocast() else None
        captured = x.is_cuda and calls.is_captured(x)
        precision = _precision() if x.dtype is _FLOAT32 else None
        lengths = (len(a), len(b)) if type(a) is tuple else len(b) if type(b) is tuple else 0
        key = (*facts, options, lengths, _grad_enabled(), autocast, precision, captured)
        try:
            plan = self.plans.get(key)
        except TypeError:  # an option that cannot be hashed: validation names it
            plan = None
        again = plan is not None
        if captured:  # this thread's calls before may have been in C++
            _have_blas(x.device)
        if plan is None:
            arguments = (a, b, c, *options)
            if any(t is not None and t.layout is not _STRIDED for t in leaves(arguments)):
                return self.fallback(arguments)
            if calls.watched():
                return self._watched(arguments, autocast)
            began = cache.changes()
            plan = self._resolved(arguments, autocast)
            if cache.changes() != began:  # by another thread: the next call decides anew
                return plan.plan(a, b, c)
            self.plans[key] = plan
        if not plan.by_torch:
            if calls.watched():
                return self._watched((a, b, c, *options), autocast)
            if any(map(_is_lazy, leaves((a, b, c)))):
                return self._lazily(plan, (a, b, c, *options))
        y = plan.plan(a, b, c)
        if plan.in_table is not None:
            self._admit(plan, (*given, *options), again or not (spec.changing or plan.later))
        return y

    def _watched(self, arguments: Arguments, autocast: torch.dtype | None) -> Any:
        """A call of which a recorder or forward-mode differentiation must see PyTorch's ops."""
        if calls.forward_mode():
            return self.fallback(arguments)
        if autocast is not None:
            arguments = self.spec.cast(arguments, autocast)
        self.spec.validate(*arguments)
        if asked(arguments[-1]) == BATCH_INVARIANT:
            raise not_invariant(self.spec.name, "one that a recorder sees")
        return self.spec.reference(*arguments)

    def _lazily(self, found: Resolved, arguments: Arguments) -> Any:
        """A call whose tensors have a lazy sign, or wrap others."""
        if _wraps(arguments):
            return self.fallback(arguments)
        return found.plan(*mapped(Tensor.resolve_neg, arguments)[:3])

    def _normal(self, arguments: Arguments) -> tuple[Arguments, list[Any]]:
        """The call with leading arguments of one type, and the tensors it has, x first."""
        if self.spec.normal is not None:
            arguments = self.spec.normal(arguments)
        if first(arguments) is None:
            self.spec.validate(*arguments)  # raises: there is nothing to compute on
        return arguments, _given(arguments)

    def _resolved(self, arguments: Arguments, autocast: torch.dtype | None) -> Resolved:
        grad = needs_grad(arguments)
        cast = self.spec.cast
        if autocast is not None:
            arguments = cast(arguments, autocast)
        self.spec.validate(*arguments)
        if arguments[-1] is None and first_use_s() and all(t.numel() for t in _given(arguments)):
            with calls.device_of(first(arguments)):
                _measure(self.spec.problem(arguments, grad))
        check_invariant(self.spec, arguments)
        if first(arguments).is_cuda:
            _have_blas(first(arguments).device, grad)
        found = self.spec.resolve(arguments, grad, autocast is not None)
        if len(self.plans) >= self.spec.most_plans:
            self.forget()
        if autocast is None:
            return found
        inner, options, dtype = found.plan, arguments[3:], autocast

        def plan(*leading: Any) -> Any:
            return inner(*cast((*leading, *options), dtype)[:3])

        return Resolved(plan, plan, by_torch=found.by_torch)

    def _admit(self, found: Resolved, arguments: Arguments, now: bool) -> None:
        """Put the plan of a call that has run into the C++ table, if that can serve such calls.

        The table's facts tell more calls apart than a key here does. Not ``now``: only have the
        table loaded or built.
        """
        table = lookup.table(self.spec.name)
        if table is None:
            return
        self.table = table.call
        if not now or (first(arguments).is_cuda and not lookup.serves_cuda()):
            return
        if not table.wants(*arguments) or _wraps(arguments):
            return
        made = None if found.record is None else found.record(*arguments[:3])
        table.admit(*arguments, made or found.in_table)

    def fallback(self, arguments: Arguments) -> Any:
        """Tensor subclasses, FX proxies, odd layouts and transforms: PyTorch's own ops carry
        them."""
        named = self.spec.named(arguments)
        public = self.spec.called(arguments)[0]
        return carried(public, partial(self._by_torch, arguments), **named)

    def _by_torch(self, arguments: Arguments) -> Any:
        given = tuple(t for t in leaves(arguments) if t is not None)
        name, positional, keywords = self.spec.called(arguments)
        tensors = all(isinstance(t, Tensor) for t in given)
        if not tensors and has_torch_function(given):
            return handle_torch_function(_PUBLIC[name], given, *positional, **keywords)
        dtype = calls.autocast_dtype(given[0]) if tensors else None
        if dtype is not None and not self.spec.torch_casts:
            arguments = self.spec.cast(arguments, dtype)
        if dtype is None or not self.spec.torch_casts:
            self.spec.validate(*arguments)
        backend = asked(arguments[-1])
        if backend == BATCH_INVARIANT:
            raise not_invariant(name, f"x of type {type(given[0]).__name__}, or a transform of it")
        if backend not in (None, "eager"):
            raise InputError(
                name,
                "plain strided tensors outside torch.func transforms and forward-mode "
                "differentiation with a forced backend",
                f"x of type {type(given[0]).__name__}, backend={backend!r}",
                "Leave backend out; such calls take PyTorch's own path.",
            )
        return self.spec.reference(*arguments)

    def compiled(self, *arguments: Any) -> Any:
        """The call as ``torch.compile`` sees it: one registered op."""
        spec = self.spec
        if spec.redirect is not None and (found := spec.redirect(arguments)) is not None:
            return found
        arguments, given = self._normal(arguments)
        if calls.unlike_plain(given) or calls.forward_mode():
            return self._by_torch(arguments)
        dtype = calls.autocast_dtype(given[0])
        if dtype is not None:
            arguments = spec.cast(arguments, dtype)
        spec.validate(*arguments)
        grad = needs_grad(arguments)
        if spec.compiled is not None:
            return spec.compiled(arguments, grad)
        operands, options, backend = leaves(arguments), arguments[3:-1], arguments[-1] or ""
        found = library.call(spec.name, *operands, *options, grad, backend)
        return found if isinstance(found, Tensor) else found[0]

    def explain(self, arguments: Arguments, grad: bool | None) -> Explanation:
        """The choices behind a call; ``grad`` None takes from the tensors whether it trains."""
        arguments, given = self._normal(arguments)
        if grad is None:
            grad = needs_grad(arguments)
        if all(isinstance(t, Tensor) for t in given):
            dtype = calls.autocast_dtype(given[0])
            if dtype is not None:
                arguments = self.spec.cast(arguments, dtype)
        self.spec.validate(*arguments)
        return Explanation(self.choices(arguments, grad))

    def choices(self, arguments: Arguments, grad: bool) -> tuple[Choice, ...]:
        """The backend of the forward and, with ``grad``, of each piece of the backward."""
        return choices(self.spec, arguments, grad)

    def forget(self) -> None:
        """Forget all plans: the settings or measurements behind them have changed."""
        self.plans.clear()
        self.clear_table()

    def clear_table(self) -> None:
        """Have the table ask again: what runs in Python may be recorded in C++ from here on.

        Plans stay. A checkpoint counts on the same autograd nodes for a call and its repetition.
        """
        table = lookup.table(self.spec.name) if lookup.ready() else None
        if table is not None:
            table.clear()


def _entry(self: Front, options: int) -> Callable[..., Any]:
    """``Front.call`` for that many options. Every warm call runs it, and parameters of their own
    cost less than ``*arguments``."""

    def two(a: Any, b: Any, c: Any, first: Any, backend: Any) -> Any:
        if _is_traced():
            return self.compiled(a, b, c, first, backend)
        y = self.table(a, b, c, first, backend)
        if y is not None:
            return y
        return (self.compiled if _is_compiling() else self.looked_up)(a, b, c, first, backend)

    def three(a: Any, b: Any, c: Any, first: Any, second: Any, backend: Any) -> Any:
        if _is_traced():
            return self.compiled(a, b, c, first, second, backend)
        y = self.table(a, b, c, first, second, backend)
        if y is not None:
            return y
        return (self.compiled if _is_compiling() else self.looked_up)(
            a, b, c, first, second, backend
        )

    def more(*arguments: Any) -> Any:
        if _is_traced():
            return self.compiled(*arguments)
        y = self.table(*arguments)
        if y is not None:
            return y
        return (self.compiled if _is_compiling() else self.looked_up)(*arguments)

    entries: dict[int, Callable[..., Any]] = {2: two, 3: three}
    return entries.get(options, more)


def choices(spec: OpSpec, arguments: Arguments, grad: bool) -> tuple[Choice, ...]:
    """The backend of each piece of a valid call; facts of a GPU are read from the call's own."""
    with calls.device_of(first(arguments)):
        return spec.choices(spec.problem(arguments, grad), asked(arguments[-1]), arguments)


def check_invariant(spec: OpSpec, arguments: Arguments) -> None:
    """Raise UnsupportedError where rows are asked not to depend on each other, and a call's empty
    weights or device would leave it to PyTorch's own ops."""
    if asked(arguments[-1]) != BATCH_INVARIANT:
        return
    x, *others = _given(arguments)
    if x.device.type not in ("cpu", "cuda", "meta"):
        raise not_invariant(spec.name, f"one on the device {x.device.type}")
    if x.shape[:-1].numel() and not all(t.numel() for t in others):
        raise not_invariant(spec.name, "one of empty weights")


def needs_grad(arguments: Arguments) -> bool:
    """Whether a call is to be differentiated."""
    return torch.is_grad_enabled() and any(
        isinstance(t, Tensor) and t.requires_grad for t in leaves(arguments)
    )
