"""Elementwise sequences that diagonal_linear computes in one pass, found while a model runs.

``x * w``, in place or not, then ``+ b`` or ``- b``, an activation and ``+ residual``, each where it
follows, whatever modules the ops belong to. It only watches: one forward with ``Watch`` around it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastlinear.fastpath.aten_steps import name_of

_aten = torch.ops.aten
_MUL = {_aten.mul.Tensor, _aten.mul_.Tensor}
_ADD = {_aten.add.Tensor, _aten.add_.Tensor}
_SUB = {_aten.sub.Tensor, _aten.sub_.Tensor}
_ADDCMUL = {_aten.addcmul.default}


@dataclass
class Sequence:
    """One run of ops that computes act(x ∘ w ± b) + r, as it was seen.

    Attributes:
        fqn: the module in which it begins.
        span: the smallest module in which all of it lies.
        weight, bias: names of the parameters in the model, of shape (K,) or (1, …, 1, K).
        activation: its name.
        residual: whether a tensor of x's shape is added last.
        ops: how many ops of PyTorch it takes.
        calls: how often such ops ran here.
        x: the first input seen, detached.
        whole: whether nothing else reads what lies between.
        minus, in_place: whether the bias is subtracted, and the product written over x.
    """

    fqn: str
    span: str
    weight: str
    x: Tensor
    bias: str | None = None
    activation: str = "none"
    residual: bool = False
    ops: int = 1
    calls: int = 1
    whole: bool = True
    minus: bool = False
    in_place: bool = False
    inner: list[weakref.ref[Tensor]] = field(default_factory=list, repr=False)

    @property
    def key(self) -> tuple[Any, ...]:
        """What is the same at every call of the same place."""
        facts = self.bias, self.minus, self.activation, self.residual, self.x.shape, self.x.dtype
        return (self.fqn, self.weight, *facts)


class Watch(TorchDispatchMode):
    """Sees every op of a forward, and which module of ``model`` it belongs to.

    Args:
        model: its parameters of shape (K,) or (1, …, 1, K) are the candidates for w and b.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._names = {
            id(p): n
            for n, p in model.named_parameters()
            if p.dim() == 1 or (p.dim() > 1 and p.numel() == p.shape[-1] > 1)
        }
        self._stack: list[str] = []
        self._open: dict[int, tuple[weakref.ref[Tensor], Sequence]] = {}
        self._inner: dict[int, tuple[weakref.ref[Tensor], Sequence]] = {}
        self._aliases: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}
        self._found: list[Sequence] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Watch:
        for fqn, module in self._model.named_modules():
            if getattr(module, "never_called", False):
                continue
            self._handles.append(module.register_forward_pre_hook(self._begin(fqn)))
            end = module.register_forward_hook(self._end, always_call=True)
            self._handles.append(end)
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        for handle in self._handles:
            handle.remove()

    def _begin(self, fqn: str) -> Callable[..., None]:
        return lambda *_: self._stack.append(fqn)

    def _end(self, *_: Any) -> None:
        self._stack.pop()

    def sequences(self) -> list[Sequence]:
        """Those of two ops or more that were whole at every call, in the order of the model."""
        kept: dict[tuple[Any, ...], Sequence] = {}
        broken = {s.key for s in self._found if not s.whole}
        for s in self._found:
            if s.ops < 2 or s.key in broken:
                continue
            known = kept.setdefault(s.key, s)
            known.calls += known is not s
        return list(kept.values())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Carry the op out, then see what it continues."""
        out = func(*args, **(kwargs or {}))
        if func is _aten.detach.default:  # autograd's, of a result it keeps, or the model's own
            self._aliases[id(out)] = weakref.ref(out), weakref.ref(args[0])
        elif self._stack:  # inside the forward
            continued = None
            if isinstance(out, Tensor):
                continued = self._continued(func, args, kwargs or {}, out)
            self._noted(args, continued)
        return out

    def _continued(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
    ) -> Sequence | None:
        if func in _MUL:
            begun = self._begun(args[0], args[1], out)
            if begun is not None:
                begun.in_place = out is args[0]
            return begun
        if func in _ADDCMUL:
            bias = self._names.get(id(args[0]))
            if bias is None or kwargs:
                return None
            found = self._begun(args[1], args[2], out)
            if found is not None:
                found.bias, found.ops = bias, 2
            return found
        if func in _SUB and not kwargs:
            found = self._of(args[0])
            if found is None or not self._shifted(found, args[1], out):
                return None
            found.minus = True
            return self._grown(found, args[0], out)
        if func in _ADD and not kwargs:
            for i in (0, 1):
                found = self._of(args[i])
                if found is not None and self._added(found, args[i], args[1 - i], out):
                    return self._grown(found, args[i], out)
            return None
        name = name_of(func, args, kwargs)
        found = self._of(args[0]) if name is not None and args else None
        if found is None or name is None or found.activation != "none" or found.residual:
            return None
        found.activation = name
        return self._grown(found, args[0], out)

    def _begun(self, a: Any, b: Any, out: Tensor) -> Sequence | None:
        for x, w in ((a, b), (b, a)):
            weight = self._names.get(id(w))
            if weight is None or not isinstance(x, Tensor) or id(x) in self._names:
                continue
            if out.shape != x.shape or out.dtype != x.dtype or x.shape[-1:] != w.shape[-1:]:
                continue
            where = self._stack[-1]
            found = Sequence(where, where, weight, x.detach())
            self._found.append(found)
            self._open[id(out)] = weakref.ref(out), found
            return found
        return None

    def _added(self, s: Sequence, last: Tensor, other: Any, out: Tensor) -> bool:
        if not isinstance(other, Tensor) or out.dtype != s.x.dtype or s.residual:
            return False
        if id(other) in self._names:
            return self._shifted(s, other, out)
        if other.shape != s.x.shape or other.dtype != s.x.dtype or _shares(other, last):
            return False
        s.residual = True
        return True

    def _shifted(self, s: Sequence, other: Any, out: Tensor) -> bool:
        """Whether other is a parameter that becomes the sequence's bias."""
        bias = self._names.get(id(other))
        if bias is None or out.dtype != s.x.dtype or out.shape != s.x.shape or s.residual:
            return False
        if s.bias is not None or s.activation != "none" or other.shape[-1:] != out.shape[-1:]:
            return False
        s.bias = bias
        return True

    def _grown(self, s: Sequence, last: Tensor, out: Tensor) -> Sequence:
        s.ops += 1
        s.span = _common(s.span, self._stack[-1])
        del self._open[id(last)]
        if out is not last:
            self._inner[id(last)] = weakref.ref(last), s
        self._open[id(out)] = weakref.ref(out), s
        return s

    def _of(self, t: Any) -> Sequence | None:
        ref, found = self._open.get(id(t), (None, None))
        return found if ref is not None and ref() is t else None

    def _original(self, t: Any) -> Any:
        """What a detached tensor was detached from, while there is such a tensor."""
        alias, original = self._aliases.get(id(t), (None, None))
        if alias is None or original is None or alias() is not t:
            return t
        return original()

    def _noted(self, args: Iterable[Any], continued: Sequence | None) -> None:
        """An op that reads what lies inside a sequence, or its end, without continuing it."""
        for t in map(self._original, args):
            if not isinstance(t, Tensor):
                continue
            ref, inside = self._inner.get(id(t), (None, None))
            if inside is not None and ref is not None and ref() is t and inside is not continued:
                inside.whole = False
            at_end = self._of(t)
            if at_end is not None and at_end is not continued:
                del self._open[id(t)]  # it is read as it is: the sequence ends here


def _shares(a: Tensor, b: Tensor) -> bool:
    """Whether one is the other or, as far as their storage says, a part of it."""
    try:
        return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # no memory to ask about
        return True


def _common(a: str, b: str) -> str:
    """The name of the smallest module that contains both."""
    first, second = a.split("."), b.split(".")
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    return ".".join(first[:shared])
