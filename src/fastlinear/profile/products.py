"""Watch one forward below autograd: every product that a parameter takes part in, whoever writes
it.

What a product reads may be a parameter, a part of one, or computed from parameters alone (cast,
joined, looked up by expert). Modules run as they do unwatched: PyTorch's fast paths, which leave
modules that they hold uncalled, are taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as module_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fastlinear.core.tensor_kinds import is_odd

# Words of the names of ATen's ops that contract a dimension, and of those that have such a name
# without contracting one.
_CONTRACTS = frozenset(
    {
        *("mm", "addmm", "bmm", "baddbmm", "addbmm", "smm", "sspaddmm", "hspmm", "matmul"),
        *("mv", "addmv", "dot", "vdot", "linear", "trilinear", "cdist", "euclidean"),
        *("conv", "conv1d", "conv2d", "conv3d", "convolution", "rnn", "lstm", "gru"),
        *("attention", "encoder"),
    }
)
_PREPARES = frozenset({"flatten", "reorder", "prepack", "pack", "combination"})
_SCALES = frozenset(
    {*("mul", "mul_", "div", "div_", "addcmul", "addcmul_", "addcdiv", "addcdiv_", "lerp")}
    | {"native_layer_norm", "native_group_norm", "_fused_rms_norm", "_prelu_kernel"}
)
_LOOKUPS = frozenset({"embedding", "embedding_bag", "_embedding_bag"})
_PICKS = frozenset({"index", "_unsafe_index", "index_select", "gather"})
_OWN_SPACES = frozenset({"aten", "prims", "prim"})
_NOTHING: frozenset[str] = frozenset()
_DEVICE = torch.ops.prim.device.default


@dataclass(frozen=True)
class Operand:
    """What one product reads of one parameter.

    Attributes:
        fqn: the parameter's first name.
        how: ``"whole"``, ``"part"`` (of its elements) or ``"computed"`` (from it, and from nothing
            that depends on the inputs).
    """

    fqn: str
    how: str


@dataclass
class Product:
    """Calls of one op, in one module, with the same parameters.

    Attributes:
        op: for example ``"aten::addmm"``.
        by: the innermost module that runs it; None outside of all modules.
        operands: one tuple for each factor that is a parameter, or computed from several.
        elementwise: whether it multiplies element by element.
        constant: whether no factor depends on the model's inputs.
        windows: of a convolution, its kernel's sizes, and the number of groups.
        calls: how often it ran.
        flops: of all calls, one multiplication and one addition being two.
    """

    op: str
    by: nn.Module | None
    operands: tuple[tuple[Operand, ...], ...]
    elementwise: bool = False
    constant: bool = False
    windows: tuple[tuple[int, ...], int] | None = None
    calls: int = 0
    flops: float = 0.0


@dataclass
class Products:
    """The products of one forward.

    Attributes:
        found: those with a parameter of two or more dimensions.
        flops: of all products, those of activations with each other included.
        failed: why the forward could not be watched, or None.
    """

    found: list[Product] = field(default_factory=list)
    flops: float = 0.0
    failed: str | None = None


def products_of(
    model: nn.Module, forward: Callable[[], object], modules: list[nn.Module], on_instances: bool
) -> Products:
    """Run ``forward`` once and watch.

    Args:
        model: whose parameters.
        forward: calls it.
        modules: those to tell apart.
        on_instances: whether to put hooks onto these, and none onto all modules: for a model with
            compiled or scripted parts. PyTorch's fast paths look for the former.
    """
    torch.clear_autocast_cache()  # casts of weights that an earlier run left
    watch = _Watch(model, set(modules))
    eager = torch.compiler.set_stance("force_eager")  # compiling under a mode spoils later calls
    try:
        with watch.told(on_instances), eager, watch:
            forward()
    except Exception as error:  # noqa: BLE001  a forward that runs unwatched only
        first = (str(error).strip().splitlines() or [""])[0]
        return Products(failed=f"{type(error).__name__}: {first}")
    return Products(list(watch.found.values()), watch.flops)


class _Watch(TorchDispatchMode):
    """Sees every op below autograd; knows by its storage what depends on parameters alone."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, modules: set[nn.Module]) -> None:
        super().__init__()
        self.modules = modules
        self.stack: list[nn.Module] = []
        self.found: dict[Any, Product] = {}
        self.flops = 0.0
        self.homes: dict[Any, list[tuple[int, int, str, int]]] = {}
        self.known: dict[Any, tuple[StorageWeakRef | None, frozenset[str]]] = {}
        for name, p in model.named_parameters():
            held = name if p.dim() > 1 else ""
            self.homes.setdefault(_storage(p), []).append((*_span(p), held, p.numel()))
        for b in model.buffers():
            self.keep(b, _NOTHING)

    @contextmanager
    def told(self, on_instances: bool) -> Iterator[None]:
        """Hooks that say which module runs."""

        def enter(module: nn.Module, args: Any) -> None:
            if module in self.modules:
                self.stack.append(module)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self.stack and self.stack[-1] is module:
                self.stack.pop()

        handles: list[Any] = []
        try:
            if on_instances:
                for m in self.modules:
                    handles.append(m.register_forward_pre_hook(enter, prepend=True))
                    handles.append(m.register_forward_hook(leave, always_call=True))
            else:
                handles.append(module_hooks.register_module_forward_pre_hook(enter))
                handles.append(module_hooks.register_module_forward_hook(leave, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "_overloadpacket", None)
        odd = any(is_odd(t) for t in _tensors(args))  # their ops decompose into themselves
        if (
            not odd
            and packet not in _formulas()
            and hasattr(func, "decompose")
            and func is not _DEVICE
        ):
            with self:
                done = func.decompose(*args, **kwargs)
            if done is not NotImplemented:
                return done
        given = _named(func, args, kwargs)
        known = [(name, t, self.origin(t)) for name, value in given for t in _tensors(value)]
        out = func(*args, **kwargs)
        space, _, op = func.name().partition("::") if packet is not None else ("", "", "")
        op = op.partition(".")[0] or str(func)
        words = set(op.split("_"))
        factors = [(t, names) for name, t, names in known if _multiplies(op, name)]
        weights = [(t, names) for t, names in factors if names]
        foreign = space not in _OWN_SPACES
        contracts = bool(words & _CONTRACTS) and not words & _PREPARES and len(factors) > 1
        constant = all(names is not None for _, _, names in known)
        joined = frozenset().union(*(names or _NOTHING for _, _, names in known))
        if contracts or (foreign and weights and "embedding" not in op):
            work = _flops(packet, op, args, kwargs, out, weights)
            self.flops += work
            fixed = all(names is not None for _, names in factors)
            name = f"{space or 'higher_order'}::{op}"
            self.keep_product(name, weights, work, args, constant=fixed)
            joined = _NOTHING  # what was multiplied has been told
        elif op in _SCALES and weights and not constant:
            work = float(sum(t.numel() for t in _tensors(out)[:1]))
            self.flops += work
            self.keep_product(f"{space}::{op}", weights, work, args, elementwise=True)
        elif op in _LOOKUPS:
            constant = False  # a row that is looked up is an activation
        elif op in _PICKS and known and known[0][2] and _picks_matrices(op, args, known[0][1]):
            constant, joined = True, known[0][2]
        for t in _tensors(out):
            self.keep(t, joined if constant else None)
        return out

    def keep_product(
        self,
        op: str,
        weights: list[tuple[Tensor, frozenset[str]]],
        flops: float,
        args: tuple[Any, ...],
        *,
        elementwise: bool = False,
        constant: bool = False,
    ) -> None:
        if not weights:
            return
        operands = tuple(self.operands(t, names) for t, names in weights)
        by = self.stack[-1] if self.stack else None
        key = (op, by, operands, constant)
        windows = None
        if "conv" in op and len(args) > 1 and isinstance(args[1], Tensor):
            groups = args[8] if len(args) > 8 and isinstance(args[8], int) else 1
            windows = (tuple(args[1].shape[2:]), groups)
        one = self.found.setdefault(key, Product(op, by, operands, elementwise, constant, windows))
        one.calls += 1
        one.flops += flops

    def operands(self, t: Tensor, names: frozenset[str]) -> tuple[Operand, ...]:
        sizes = {name: size for _, _, name, size in self.homes.get(_storage(t), ())}
        return tuple(
            Operand(
                name,
                "computed"
                if name not in sizes
                else "whole"
                if t.numel() >= sizes[name]
                else "part",
            )
            for name in sorted(names)
        )

    def origin(self, t: Tensor) -> frozenset[str] | None:
        """The parameters of two or more dimensions that a tensor is, or is computed from; None of
        one that depends on the inputs."""
        key = _storage(t)
        if key in self.homes:
            start, end = _span(t)
            inside = {name for a, b, name, _ in self.homes[key] if a < end and start < b}
            return frozenset(inside - {""})
        ref, names = self.known.get(key, (None, None))
        if ref is not None and ref.expired():
            return None
        return names

    def keep(self, t: Tensor, names: frozenset[str] | None) -> None:
        key = _storage(t)
        if key in self.homes:
            return
        if names is None:
            self.known.pop(key, None)
        else:
            strided = not isinstance(key, tuple)
            ref = StorageWeakRef(t.untyped_storage()) if strided else None
            self.known[key] = (ref, names)


def _storage(t: Tensor) -> Any:
    """What tensors share that are views of each other."""
    if t.layout is torch.strided:
        return t.untyped_storage()._cdata
    return ("sparse", id(t))


def _span(t: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor reaches over."""
    if is_odd(t) or not t.numel():
        return 0, 1 << 62
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    start = int(t.storage_offset()) * t.element_size()
    return start, start + (int(last) + 1) * t.element_size()


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return [("", args), *kwargs.items()]
    return [*zip((a.name for a in schema.arguments), args, strict=False), *kwargs.items()]


def _multiplies(op: str, name: str) -> bool:
    """Whether an argument of this name is a factor, not an addend."""
    adds = op.strip("_").startswith(("add", "badd", "sparse_addmm", "sparse_sampled_addmm"))
    return not (adds and name in ("self", "input")) and "bias" not in name and "mask" not in name


def _picks_matrices(op: str, args: tuple[Any, ...], source: Tensor) -> bool:
    """Whether what is picked by one index has two dimensions or more."""
    taken = sum(i is not None for i in args[1]) if "index" in op and op[-1] == "x" else 1
    return source.dim() - taken > 1


def _formulas() -> Any:
    """torch's own counts of operations by op. Its module imports Triton: only where needed."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry


def _attention_flops() -> Any:
    from torch.utils.flop_counter import sdpa_flop_count

    return sdpa_flop_count


def _flops(
    packet: Any,
    op: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
    weights: list[tuple[Tensor, frozenset[str]]],
) -> float:
    found = _tensors(args)
    if not any(is_odd(t) for t in found):
        if packet in _formulas():
            return float(_formulas()[packet](*args, **kwargs, out_val=out))
        if op.startswith("_scaled_dot_product"):
            return float(_attention_flops()(*(t.shape for t in found[:3])))
    if not weights or not found:
        return 0.0
    x = next((t for t in found if all(t is not w for w, _ in weights)), found[0])
    rows = x.numel() // max(1, x.size(-1)) if x.dim() else 1
    # each row of a grouped product meets one matrix of the weight
    sizes = (math.prod(w.shape[-2:] if "grouped" in op else w.shape) for w, _ in weights)
    return 2.0 * rows * sum(sizes)


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
