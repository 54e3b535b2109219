"""The functions a rewrite puts in place of ``forward``, and the eager ones they replace.

Each takes the module first and reads its parameters at call time, so that optimizers, ``.to()``,
``load_state_dict`` and deep copies act on it as on any module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils._device import DeviceContext

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.errors import InputError
from fastlinear.core.function_mode import KnowingMode
from fastlinear.core.wrappers import PLAIN
from fastlinear.families.linear import linear_act
from fastlinear.families.mlp import mlp
from fastlinear.rewrite.swap.functional_linear import FunctionalLinear
from fastlinear.rewrite.swap.stand_in import mark

Forward = Callable[..., Any]
_hooked_globally: Callable[[], bool] = torch.nn.modules.module._has_any_global_hook
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_trace: Callable[[], Any] = torch._C._get_tracing_state  # of torch.jit.trace; Dynamo knows it
_function_mode_at: Callable[[int], Any] = torch._C._get_function_stack_at


def watched() -> bool:
    """Whether every function of torch, or every module's call, is watched, by ``torch.jit.trace``
    as well: what replays or is compiled would pass that by.

    A default device is a function mode as well, anywhere among the others, but watches nothing.
    """
    for i in range(_function_modes()):
        if type(_function_mode_at(i)) is not DeviceContext:
            return True
    return is_traced() or _hooked_globally()


def is_traced() -> bool:
    """Whether ``torch.jit.trace`` records ops, which takes what C++ gives it for constants."""
    return _trace() is not None


def overridden() -> bool:
    """Whether somebody else has a say in every linear: by hooks of every module's call, by another
    function in place of ``F.linear`` or of a module's call, or by a function mode.

    Then modules run their own forwards, as a fused call would pass that by.
    """
    if (
        _hooked_globally()
        or nn.Linear.forward is not _FORWARD
        or nn.Linear.__call__ is not _CALL
        or F.linear is not _LINEAR
    ):
        return True
    for i in range(_function_modes()):
        kind = type(_function_mode_at(i))
        if kind is not DeviceContext and not issubclass(kind, KnowingMode):
            return True
    return False


def plain_linear(linear: nn.Module, backend: str | None) -> Forward:
    """Forward of an ``nn.Linear`` or Conv1D by this backend: (..., K) → (..., N).

    The result holds no reference to ``linear``; on an instance of another class, or after its
    class got another forward, that forward runs.
    """
    plain, turned = type(linear).forward, type(linear) not in PLAIN_LINEARS

    def forward(self: Any, input: Tensor) -> Any:
        if type(self).forward is not plain or overridden():
            return type(self).forward(self, input)
        weight, bias = weight_as_is_and_bias(self)
        return call_linear_act(input, weight.t() if turned else weight, bias, "none", backend)

    return forward


def float64_linear(conv1d: bool) -> Forward:
    """A linear computed in float64 and rounded once: part of the oracle, never of a rewrite."""

    def forward(self: Any, input: Tensor) -> Tensor:
        dtype = input.dtype
        if torch.is_autocast_enabled(input.device.type):
            dtype = torch.get_autocast_dtype(input.device.type)
        with torch.autocast(input.device.type, enabled=False):
            weight = self.weight.t() if conv1d else self.weight
            bias = None if self.bias is None else self.bias.double()
            return F.linear(input.double(), weight.double(), bias).to(dtype)

    return mark(forward)


def call_fused_linear(linear: nn.Module, x: Tensor, activation: str, backend: str | None) -> Tensor:
    """act(linear(x)) for a linear or Conv1D that is a child of a rewritten parent:
    (..., K) → (..., N).

    Fused only while the child is a plain linear without hooks; otherwise the child itself is
    called, so that hooks, adapters and replaced layers keep their say.
    """
    if is_plain(linear) and not overridden() and not is_hooked(linear.__dict__):
        return call_linear_act(x, *weight_and_bias(linear), activation, backend)
    y: Tensor = activation_of(activation).value(linear(x))
    return y


def call_fused_chain(
    parent: nn.Module,
    paths: Sequence[Sequence[str] | FunctionalLinear],
    x: Tensor,
    activation: str,
    final_activation: str,
    backend: str | None,
) -> Tensor:
    """The linears of a rewritten parent that follow each other, as one call of ``mlp``:
    (..., n_0) → (..., n_L). ``paths`` lead from the parent to each, those written on parameters
    say where these are.

    Only while every one is a plain linear without hooks; otherwise each is called by itself.
    """
    linears, weights, biases = [], [], []
    fusable = not overridden()
    for path in paths:
        if isinstance(path, FunctionalLinear):
            found = path.tensors(parent, x)
            linears.append(partial(path.plain, parent))
            fusable = fusable and found is not None
            if found is not None:
                weights.append(found[0])
                biases.append(found[1])
            continue
        linear: Any = parent
        for name in path:
            linear = linear._modules[name]
        linears.append(linear)
        fusable = fusable and is_plain(linear) and not is_hooked(linear.__dict__)
        if fusable:
            weight, bias = weight_and_bias(linear)
            weights.append(weight)
            biases.append(bias)
    if fusable:
        return call_mlp(x, weights, biases, activation, final_activation, backend)
    for i, linear in enumerate(linears, 1):
        name = final_activation if i == len(linears) else activation
        x = activation_of(name).value(linear(x))
    return x


def call_chain_of(paths: Sequence[Sequence[str] | FunctionalLinear]) -> Callable[..., Tensor]:
    """``call_fused_chain`` for linears some of which are written on parameters."""

    def call_chain(parent: nn.Module, x: Tensor, *how: Any) -> Tensor:
        return call_fused_chain(parent, paths, x, *how)

    return call_chain


def call_functional_linear_of(linear: FunctionalLinear) -> Callable[..., Tensor]:
    """``call_fused_linear``, given the parent, for a linear written on parameters."""

    def call_functional_linear(
        parent: nn.Module, x: Tensor, activation: str, backend: str | None
    ) -> Tensor:
        found = linear.tensors(parent, x)
        if found is not None:
            return call_linear_act(x, *found, activation, backend)
        y: Tensor = activation_of(activation).value(linear.plain(parent, x))
        return y

    return call_functional_linear


def is_plain(linear: nn.Module) -> bool:
    """Whether its class is nn.Linear or transformers' Conv1D itself, whose forward is known."""
    kind: Any = type(linear)
    return kind in PLAIN_LINEARS or (
        kind.__name__ == "Conv1D"
        and kind.__module__.startswith(CONV1D_HOME)
        and kind.forward.__module__ == kind.__module__  # not another in its place
    )


def iterates_plainly(sequential: nn.Module) -> bool:
    """Whether a Sequential's forward calls its children in order, all of them."""
    kind: Any = type(sequential)
    return kind.__iter__ is _ITER


def weight_and_bias(linear: nn.Module) -> tuple[Tensor, Tensor | None]:
    """The weight as (N, K), of a Conv1D transposed, and the bias (N,) of a plain linear."""
    weight, bias = weight_as_is_and_bias(linear)
    return (weight if type(linear) in PLAIN_LINEARS else weight.t()), bias


def weight_as_is_and_bias(linear: nn.Module) -> tuple[Tensor, Tensor | None]:
    """The weight, of a Conv1D (K, N), and the bias (N,) of a plain linear.

    Looked up where a module keeps them: its attribute lookup takes longer than a small layer.
    """
    own = linear.__dict__
    known: Any = own["_parameters"]
    if "weight" in known and "bias" in known and "weight" not in own and "bias" not in own:
        weight, bias = known["weight"], known["bias"]
    else:  # a replica of DataParallel, say
        weight, bias = linear.weight, linear.bias
    return weight, bias  # type: ignore[return-value]


def is_foreign(x: Tensor) -> bool:
    """Whether a tensor's class has a say in functions of torch's, ours unknown to it."""
    return type(x) not in PLAIN and has_torch_function_unary(x)


def call_linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, backend: str | None
) -> Tensor:
    """``linear_act`` as one of torch's functions: a mode of fastlinear's sees the call whole.

    What it does not take, PyTorch does, or says what is wrong.
    """
    try:
        if not has_torch_function_unary(x):
            return linear_act(x, weight, bias, activation=activation, backend=backend)
        if not is_foreign(x):
            how: dict[str, Any] = {"activation": activation, "backend": backend}
            y: Tensor = handle_torch_function(linear_act, (x,), x, weight, bias, **how)
            return y
    except InputError:
        pass
    return _one_by_one(x, [weight], [bias], "none", activation)


def call_mlp(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: str,
    final_activation: str,
    backend: str | None,
) -> Tensor:
    """``mlp`` in the same way."""
    how: dict[str, Any] = {
        "activation": activation,
        "final_activation": final_activation,
        "backend": backend,
    }
    try:
        if not has_torch_function_unary(x):
            return mlp(x, weights, biases, **how)
        if not is_foreign(x):
            y: Tensor = handle_torch_function(mlp, (x,), x, weights, biases, **how)
            return y
    except InputError:
        pass
    return _one_by_one(x, weights, biases, activation, final_activation)


def _one_by_one(
    x: Any,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: str,
    final_activation: str,
) -> Tensor:
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True), 1):
        name = final_activation if i == len(weights) else activation
        x = activation_of(name).value(F.linear(x, weight, bias))
    return x  # type: ignore[no-any-return]


def is_hooked(own: dict[str, Any]) -> bool:
    """Whether a module's attributes hold a hook or a forward of its own."""
    return bool(
        "forward" in own
        or "_call_impl" in own
        or own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
    )


PLAIN_LINEARS = (nn.Linear, NonDynamicallyQuantizableLinear)
"""The classes whose forward is exactly ``F.linear(x, weight, bias)``."""
_FORWARD, _LINEAR = nn.Linear.forward, F.linear
_CALL = nn.Linear.__call__  # nn.Module's
_ITER = nn.Sequential.__iter__
CONV1D_HOME = "transformers."
"""The package whose Conv1D is a linear with a weight of shape (K, N)."""
