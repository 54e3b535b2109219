"""Watch one forward: which Linear-shaped modules run, on what, and who reads their outputs.

The profile's sites and the rewriter's candidates both come from what is seen here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.weak import TensorWeakRef

from fastlinear.core.function_mode import KnowingMode
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.core.tensor_kinds import is_odd
from fastlinear.families.linear.problem import x_layout_of
from fastlinear.profile import equations
from fastlinear.profile.graph import Observed, Use
from fastlinear.profile.positional import positional
from fastlinear.profile.step import watched_modules

OTHER = "other"
_METADATA = frozenset(
    {
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset"),
        *("is_contiguous", "element_size", "get_device", "data_ptr", "is_floating_point"),
        *("is_complex", "requires_grad_", "type", "__len__", "is_same_size", "register_hook"),
    }
)
_MATMULS = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}
_OWN_HOMES = ("torch.", "fastlinear.")  # whose modules are no code to rewrite
_DATA_PROPERTIES = ("T", "H", "mT", "mH", "data", "real", "imag", "grad")


def linear_kind(module: nn.Module) -> str | None:
    """``"linear"``, ``"conv1d"`` (transformers' transposed Linear) or None."""
    if isinstance(module, nn.Linear):
        return "linear"
    weight = getattr(module, "weight", None)
    named = any(c.__name__ == "Conv1D" for c in type(module).__mro__)
    if named and isinstance(weight, Tensor) and weight.dim() == 2:
        nf = getattr(module, "nf", None)
        bias = getattr(module, "bias", None)
        if nf == weight.shape[1] and isinstance(bias, Tensor) and bias.shape == (nf,):
            return "conv1d"
    return None


@dataclass
class Call:
    """One call of a Linear-shaped module.

    Attributes:
        shape, layout, dtype: of its input; ``layout`` as in a linear_act Problem, or ``OTHER`` of a
            sparse or nested one, whose shape is left out.
        input_grad: whether its input needs a gradient.
        grad: whether the call is to be differentiated at all.
        autocast: the autocast dtype in force, or None.
        positional: whether the input was its first positional argument.
        sample: a copy of the input in its own strides, when samples are wanted and it has such; one
            copy serves all calls on inputs of the same shape, strides and dtype.
        caller: the module whose forward made the call; None if the model itself is the Linear.
        uses: who read the output directly inside the caller, in order.
        bias: of a product with a parameter, whether the same function adds one.
    """

    shape: tuple[int, ...]
    layout: str
    dtype: str
    input_grad: bool
    grad: bool
    autocast: torch.dtype | None
    caller: nn.Module | None
    positional: bool
    sample: Tensor | None = field(default=None, repr=False)
    uses: list[Use] = field(default_factory=list)
    bias: bool = False


@dataclass
class Observation:
    """What one forward showed.

    Attributes:
        calls: Linear-shaped module → its calls in order.
        products: a two-dimensional parameter, by its ``id`` → what code that is no Linear's
            multiplies by it: ``F.linear``, ``torch.addmm`` and matrix products, by ``torch.einsum``
            too, in order.
        arguments: module → the arguments of its first call, tensors left out.
        module_calls: how often each module ran.
        grad_enabled: whether the modules ran with gradients.
        elements: elements that left a module, and each (module, function name) called in it.
    """

    calls: dict[nn.Module, list[Call]] = field(default_factory=dict)
    products: dict[int, list[Call]] = field(default_factory=dict)
    arguments: dict[nn.Module, Observed] = field(default_factory=dict)
    module_calls: Counter[nn.Module] = field(default_factory=Counter)
    elements: Counter[Any] = field(default_factory=Counter)
    grad_enabled: bool = False


def observe(
    model: nn.Module, forward: Callable[[], object], *, samples: bool = False
) -> Observation:
    """Run ``forward`` once and watch. Hooks are removed again, also when it raises.

    With ``samples`` every call keeps a copy of its input. Where a layer of PyTorch's takes its
    linears into a kernel of its own unless it is watched, ``forward`` runs once more, and linears
    that are called for being watched only are not seen.
    """
    watch = _Watch({} if samples else None)
    handles: list[Any] = []
    try:
        for module in watched_modules(model):
            handles += [
                module.register_forward_pre_hook(watch.enter, prepend=True, with_kwargs=True),
                module.register_forward_hook(watch.leave, always_call=True),
            ]
        with watch:
            forward()
    finally:
        for handle in handles:
            handle.remove()
    if any(isinstance(m, nn.TransformerEncoderLayer) and not m.training for m in model.modules()):
        called = _called(forward)
        watch.seen.calls = {m: c for m, c in watch.seen.calls.items() if m in called}
    return watch.seen


def _called(forward: Callable[[], object]) -> set[nn.Module]:
    """The modules that a forward calls where none of them has a hook."""
    found: set[nn.Module] = set()

    def enter(module: nn.Module, _: object) -> None:
        found.add(module)

    with register_module_forward_pre_hook(enter):
        forward()
    return found


class _Watch(KnowingMode):
    """Sees every torch function and every module call, and whose output each one reads."""

    def __init__(self, samples: dict[tuple[Any, ...], Tensor] | None) -> None:
        super().__init__()
        self.samples = samples
        self.seen = Observation()
        self.stack: list[nn.Module] = []
        self.outputs: dict[int, tuple[TensorWeakRef, Call]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if self.stack and not _is_metadata(func, name):
            here = self.stack[-1]
            for value in _tensors((args, tuple(kwargs.values()))):
                call = self.call_of(value)
                if call is not None and call.caller is here:
                    call.uses.append(_function_use(func, name, args, kwargs, value))
            self.multiply(here, func, args, kwargs)
        result = func(*args, **kwargs)
        if self.stack and isinstance(result, Tensor):
            self.seen.elements[self.stack[-1], name] += result.numel()
            if any(result is a for a in args[:1]) and not _is_metadata(func, name):
                self.outputs.pop(id(result), None)  # written in place: no linear's output any more
        return result

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen = self.seen
        caller = self.stack[-1] if self.stack else None
        for value in _tensors((args, tuple(kwargs.values()))):
            call = self.call_of(value)
            if call is not None and call.caller is caller:
                alone = len(args) == 1 and args[0] is value and not kwargs
                run = module.forward if alone else None
                call.uses.append(Use("module", type(module).__name__, module, run))
        seen.arguments.setdefault(module, Observed.of(args, kwargs))
        seen.module_calls[module] += 1
        seen.grad_enabled |= torch.is_grad_enabled()
        self.stack.append(module)
        if linear_kind(module):
            x = next(iter(_tensors((args, tuple(kwargs.values())))), None)
            if x is not None:
                with torch._C.DisableTorchFunction():
                    trained = any(p.requires_grad for p in module.parameters())
                    call = self.new_call(trained, x, caller, bool(args) and args[0] is x)
                seen.calls.setdefault(module, []).append(call)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.stack and self.stack[-1] is module:
            self.stack.pop()
        if isinstance(output, Tensor):
            self.seen.elements[module] += output.numel()
            if module in self.seen.calls:
                call = self.seen.calls[module][-1]
                self.outputs[id(output)] = (TensorWeakRef(output), call)

    def multiply(
        self, here: nn.Module, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Keep the call if it multiplies by a parameter in code that is no Linear's own."""
        found = multiplied(func, args, kwargs)
        if found is None or linear_kind(here) or type(here).__module__.startswith(_OWN_HOMES):
            return
        x, weight, bias = found
        trained = any(p.requires_grad for p in (weight, bias) if isinstance(p, Tensor))
        call = self.new_call(trained, x, here, True)
        call.bias = bias is not None
        self.seen.products.setdefault(id(weight), []).append(call)

    def new_call(
        self, trained: bool, x: Tensor, caller: nn.Module | None, positional: bool
    ) -> Call:
        odd = is_odd(x)
        layout = OTHER if odd else "rows"
        if not odd and x.numel():
            k = x.shape[-1] if x.dim() else 1
            like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            layout = x_layout_of(like.reshape(-1, k))
        device = x.device.type
        grad = x.requires_grad or trained
        return Call(
            shape=() if odd else tuple(x.shape),
            layout=layout,
            dtype=DTYPE_NAMES.get(x.dtype, str(x.dtype)),
            input_grad=x.requires_grad,
            grad=torch.is_grad_enabled() and grad,
            autocast=torch.get_autocast_dtype(device)
            if torch.is_autocast_enabled(device)
            else None,
            caller=caller,
            positional=positional,
            sample=None if odd else self.sample_of(x),
        )

    def sample_of(self, x: Tensor) -> Tensor | None:
        if self.samples is None:
            return None
        key = (tuple(x.shape), x.stride(), x.dtype)
        if key not in self.samples:
            self.samples[key] = own_copy(x)
        return self.samples[key]

    def call_of(self, value: Tensor) -> Call | None:
        """The Linear call whose output object ``value`` is."""
        ref, call = self.outputs.get(id(value), (None, None))
        return call if ref is not None and ref() is value else None


def own_copy(x: Tensor) -> Tensor:
    """A detached copy in x's own strides; of expanded and non-strided tensors a plain clone."""
    if x.layout is not torch.strided or 0 in x.stride():
        return x.detach().clone()
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return copy.copy_(x.detach())


def _function_use(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], value: Tensor
) -> Use:
    args, kwargs = positional(func, args, kwargs)
    rest = args[1:]
    if args and args[0] is value and not _tensors((rest, tuple(kwargs.values()))):
        return Use("function", name, call=lambda t: func(t, *rest, **kwargs))
    return Use("function", name)


def multiplied(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, nn.Parameter, Any] | None:
    """The input, the two-dimensional parameter and the bias of a product that ``func`` computes."""
    x: Any
    weight: Any
    bias: Any = None
    args, kwargs = positional(func, args, kwargs)
    if func is F.linear:
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        x, weight, bias = given.get("input"), given.get("weight"), given.get("bias")
    elif func is torch.addmm and len(args) == 3:
        bias, x, weight = args
    elif func in _MATMULS and len(args) == 2:
        x, weight = args
    elif func is torch.einsum and len(args) == 3 and (how := equations.linear(args[0])) is not None:
        x, weight = args[1 + how.x], args[2 - how.x]
    else:
        return None
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    held = weight if isinstance(weight, nn.Parameter) else weight._base
    whole = isinstance(held, nn.Parameter) and held.dim() == 2 and held.numel() == weight.numel()
    return (x, held, bias) if whole else None  # type: ignore[return-value]


def _is_metadata(func: Any, name: str) -> bool:
    """Whether a function only asks what a tensor is like, not what it holds."""
    if name == "__get__":
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        return owner not in _DATA_PROPERTIES
    return name in _METADATA


def _tensors(values: Any) -> list[Tensor]:
    """Tensors in nested tuples and lists."""
    found: list[Tensor] = []
    for v in values:
        if isinstance(v, Tensor):
            found.append(v)
        elif isinstance(v, list | tuple):
            found += _tensors(v)
    return found
