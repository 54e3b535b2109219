"""The public function unequal_linear: linear layers of different sizes as one operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.ops.common import calls, door, door_node, layouts
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.common.layouts import REMEDY, unlike_strided
from fastlinear.ops.unequal_linear import programs
from fastlinear.ops.unequal_linear.autograd import Formula, Maybe, kernels, loop, recorded

NAME = "unequal_linear"

BACKENDS = ("loop", "together")
# Most operations of a group, on average: without gradients, and with them. Measured with gradients,
# 26 groups: of 2.7 billion each 1845 µs on an H100 where a loop takes 2132 on an H200, and of 330
# million whose rows begin anywhere 691 where it takes 1348.
_MOST_FLOPS = 3_000_000_000, 3_000_000_000
_MOST_FLOPS_ODD = 400_000_000, 400_000_000  # where rows do not begin at 16 bytes
_MOST_FLOPS_SINGLE = 400_000_000, 400_000_000  # in float32
# K·N of a group on the CPU, on average, up to which it wins over MKL's and oneDNN's products
_MOST_WEIGHTS = {torch.float32: 1 << 17, torch.bfloat16: 1 << 18}
_MAX_SEEN, _MAX_PLANS = 1024, 256
_is_compiling = torch.compiler.is_compiling


def unequal_linear(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Maybe | None = None,
    *,
    activation: str = "none",
    backend: str | None = None,
) -> list[Tensor]:
    """Linear layers of different sizes: ``y_g = act(x_g W_gᵀ + b_g)`` for every g.

    Args:
        xs: one input a group, shape (..., K_g), any strides; numbers of tokens may differ too.
        weights: one weight a group, shape (N_g, K_g), of x's dtype and device.
        biases: one bias a group, shape (N_g,), or None for a group without; None for none at all.
        activation: a name ``grouped_linear`` knows.
        backend: ``"loop"``, a product of PyTorch a group; ``"together"``, one launch forward and
            at most two backward on CUDA devices, one C++ call each way on CPUs. None lets
            fastlinear choose.

    Returns:
        The y_g (..., N_g), in order. With "together" they share one allocation.

    Raises:
        InputError: lists, shapes, dtypes or devices do not fit, or a name is unknown.
        UnsupportedError: a forced backend cannot serve the call; the message says why.

    float32, bfloat16, float16 and float64; 16-bit dtypes accumulate in float32. Deterministic for
    a given backend and shapes. Differentiable, to any order.

    >>> import torch, fastlinear as fl
    >>> xs = [torch.ones(5, 3), torch.ones(2, 7)]
    >>> ys = fl.unequal_linear(xs, [torch.ones(4, 3), torch.ones(6, 7)])
    >>> [tuple(y.shape) for y in ys]
    [(5, 4), (2, 6)]
    """
    if not _is_compiling():
        xs, weights = _sequence("xs", xs), _sequence("weights", weights)
        biases = None if biases is None else _sequence("biases", biases)
        ys: list[Tensor] | None = _door(xs, weights, biases, activation, backend)
        if ys is not None:
            return ys
        if any(layouts.is_odd(t) for t in (*xs, *weights, *(biases or ()))):
            run = partial(_looked_up, xs, weights, biases, activation, backend)
            return layouts.carried(NAME, run, xs=xs, weights=weights, biases=biases)
    return _looked_up(xs, weights, biases, activation, backend)


def _sequence(name: str, given: Any) -> Any:
    """The tensors as the door reads them: a list or a tuple.

    Raises:
        InputError: they come in nothing that keeps an order, or in no container at all.
    """
    if type(given) is list or type(given) is tuple:
        return given
    single = isinstance(given, Tensor) and (unlike_strided(given) is not None or not given.dim())
    if single or isinstance(given, (str, Mapping, Set)) or not hasattr(given, "__iter__"):
        received = type(given).__name__
        if single:
            received = unlike_strided(given) or "a tensor of no dimensions"
        _fail(f"{name} to be a list or tuple of tensors, one a group", received, _LISTS)
    return list(given)


_LISTS = "Give them in the order of the groups: [first, second, ...]."


def _looked_up(
    given_xs: Sequence[Tensor],
    given_weights: Sequence[Tensor],
    given_biases: Maybe | None,
    activation: str,
    backend: str | None,
) -> list[Tensor]:
    activation_of(activation, NAME)
    if backend is not None and backend not in BACKENDS:
        _fail(f"backend in {', '.join(BACKENDS)} or None", repr(backend), "Leave it out.")
    xs, weights = list(_sequence("xs", given_xs)), list(_sequence("weights", given_weights))
    biases: list[Tensor | None] = [None] * len(xs)
    if given_biases is not None:
        biases = list(_sequence("biases", given_biases))
    if not len(xs) == len(weights) == len(biases):
        received = f"{len(xs)} inputs, {len(weights)} weights, {len(biases)} biases"
        _fail("as many inputs as weights and biases", received, "Pass one of each a group.")
    if not xs:
        return []
    named: tuple[tuple[str, Maybe], ...] = ("input", xs), ("weight", weights), ("bias", biases)
    for name, held in named:
        for g, t in enumerate(held):
            if t is not None or name != "bias":
                _check_tensor(f"{name} {g}", t)
    autocast = calls.autocast_dtype(xs[0]) is not None
    if autocast:
        cast = [calls.as_autocast(*group) for group in zip(xs, weights, biases, strict=True)]
        xs, weights = [x for x, _, _ in cast], [w for _, w, _ in cast]
        biases = [b for _, _, b in cast]
    _validate(xs, weights, biases)
    why = _reason_not_together(xs, weights, biases) if backend != "loop" else ""
    if backend == "together" and why is not None:
        raise UnsupportedError(
            NAME,
            "a call that backend 'together' can serve",
            f"one that it cannot: {why}",
            "Leave backend out.",
        )
    tensors = (*xs, *weights, *biases)
    grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    formula = None
    if why is None and (backend == "together" or (backend is None and _pays(xs, weights, grad))):
        formula = Formula(activation)
    if formula is None:
        ys = loop(xs, weights, biases, activation)
    elif grad:
        ys = recorded(formula, xs, weights, biases)
    else:
        ys = formula.inference(xs, weights, biases)[0]
    if not autocast and not _is_compiling():
        given = given_xs, given_weights, given_biases
        _admit(formula, xs[0], tensors, grad, *given, activation, backend)
    return ys


# --------------------------------------------------------------------------------------------
# The compiled door: calls of the same sizes again


def _no_door(*_: Any) -> None:
    return None


_door: Callable[..., Any] = _no_door
_seen: set[int] = set()  # hashes of calls that have run once
_admitted = 0


def _forget() -> None:
    """Have the door ask again: calls that run in Python go through C++ from here on."""
    global _admitted
    _admitted = 0
    table = door.table(NAME) if _door is not _no_door else None
    if table is not None:
        table.clear()


door_node.on_ready(_forget)


def _admit(
    formula: Formula | None,
    x: Tensor,
    tensors: Sequence[Tensor | None],
    grad: bool,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Maybe | None,
    activation: str,
    backend: str | None,
) -> None:
    """Make the plan of a call that has run known to the compiled door, if that wants it: at the
    second call of a kind, since sizes that change at every call would be prepared in vain."""
    global _admitted, _door
    table = door.table(NAME)
    if table is None:
        return
    _door = table.call
    if calls.transforms_active() or calls.recorded() or (x.is_cuda and not door.serves_cuda()):
        return
    shapes = tuple([None if t is None else t.shape for t in tensors])
    kind = hash((activation, backend, grad, x.dtype, x.device, shapes))
    if kind not in _seen:
        if len(_seen) >= _MAX_SEEN:
            _seen.clear()
        _seen.add(kind)
        return
    given = xs, weights, biases, activation, backend
    if not table.wants(*given):
        return
    if _admitted >= _MAX_PLANS:
        _forget()
    _admitted += 1
    made = None if formula is None else programs.plan(formula, xs, weights, biases, grad)
    table.admit(*given, made or _plan(formula, activation, grad))


def _plan(formula: Formula | None, activation: str, grad: bool) -> Callable[..., list[Tensor]]:
    """What serves such calls in Python."""

    def plan(xs: Any, weights: Any, biases: Any) -> list[Tensor]:
        if formula is None:
            return loop(xs, weights, biases, activation)
        if grad:
            return recorded(formula, xs, weights, biases)
        return formula.inference(xs, weights, biases)[0]

    return plan


# --------------------------------------------------------------------------------------------


def _pays(xs: Sequence[Tensor], weights: Sequence[Tensor], grad: bool) -> bool:
    """Whether all together are faster than a product a group, which waits for launches where
    products are small: 26 groups of 330 million operations each pay, and in 16-bit dtypes
    whose rows begin at 16 bytes of 2.7 billion."""
    if not xs[0].is_cuda:
        numbers = sum(w.shape[0] * w.shape[1] for w in weights)
        return len(xs) > 1 and numbers <= _MOST_WEIGHTS[xs[0].dtype] * len(xs)
    if len(xs) < 4:
        return False
    products = sum(2 * x.numel() * w.shape[0] for x, w in zip(xs, weights, strict=True))
    if xs[0].dtype is torch.float32:
        most = _MOST_FLOPS_SINGLE
    else:
        even = all(size % 8 == 0 for w in weights for size in w.shape)
        most = _MOST_FLOPS if even else _MOST_FLOPS_ODD
    return products <= most[grad] * len(xs)


def why_not(backend: str, device: str) -> str | None:
    """Why a backend serves nothing on this machine's ``device`` (``"cpu"`` or ``"cuda"``), or None.
    Compiles nothing."""
    if backend == "loop":
        return None
    if device == "cpu":
        from fastlinear.ops.unequal_linear import cpu

        return cpu.reason_not_here()
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    from fastlinear.ops.unequal_linear import cuda

    return cuda.reason_not_on(torch.device(device))


def served_by(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Maybe | None = None,
    *,
    grad: bool = False,
) -> str:
    """The backend that serves valid tensors by default, with gradients or without."""
    given = [None] * len(xs) if biases is None else biases
    able = _reason_not_together(xs, weights, given) is None
    return "together" if able and _pays(xs, weights, grad) else "loop"


def _reason_not_together(
    xs: Sequence[Tensor], weights: Sequence[Tensor], biases: Maybe
) -> str | None:
    """Why one launch cannot serve, or None."""
    x = xs[0]
    if x.device.type not in ("cuda", "cpu"):
        return "its kernels run on CUDA devices and CPUs only"
    if torch.compiler.is_compiling():
        return "torch.compile makes its own kernels"
    if calls.transforms_active() or calls.forward_mode() or calls.recorded():
        return "a transform or a recorder is active"
    for t in (*xs, *weights, *(b for b in biases if b is not None)):
        if type(t) not in calls.PLAIN or t.layout is not torch.strided:
            return f"takes plain strided tensors, got {type(t).__name__}"
    why: str | None = kernels(x).reason_not(xs, weights)
    return why


def _validate(xs: Sequence[Tensor], weights: Sequence[Tensor], biases: Maybe) -> None:
    first = xs[0]
    if first.dtype not in DTYPE_NAMES:
        _fail(
            f"a dtype in {', '.join(DTYPE_NAMES.values())}",
            str(first.dtype),
            "Convert the inputs, for example x.float().",
        )
    dtype, device = first.dtype, first.device
    for g, (x, w, b) in enumerate(zip(xs, weights, biases, strict=True)):
        fits = w.dim() == 2 and x.shape[-1:] == w.shape[1:]
        if fits and (b is None or b.shape == w.shape[:1]):
            given = (x, w) if b is None else (x, w, b)
            if all(t.dtype is dtype and t.device == device for t in given):
                continue
        _refuse(g, x, w, b, first)


def _check_tensor(name: str, t: Any) -> None:
    if not isinstance(t, Tensor):
        _fail(f"{name} to be a tensor", type(t).__name__, "Convert it with torch.as_tensor.")
    # a loop of PyTorch's own linears takes sparse weights and jagged inputs
    bias = name.startswith("bias") and unlike_strided(t) is not None
    if bias or (t.is_nested and t.layout is torch.strided):
        _fail(f"{name} to be a dense tensor", str(unlike_strided(t)), REMEDY)


def _refuse(g: int, x: Tensor, w: Tensor, b: Tensor | None, first: Tensor) -> NoReturn:
    """Say what is wrong with a group."""
    if w.dim() != 2:
        _fail(f"weight {g} of shape (N, K)", f"shape {tuple(w.shape)}", "Reshape it.")
    if x.dim() < 1 or x.shape[-1] != w.shape[1]:
        _fail(
            f"input {g} with {w.shape[1]} features in its last dimension, as weight {g} has",
            f"shape {tuple(x.shape)}",
            "Check the order of the lists.",
        )
    if b is not None and b.shape != (w.shape[0],):
        _fail(
            f"bias {g} of shape ({w.shape[0]},)",
            f"shape {tuple(b.shape)}",
            "Give one number per output feature, or None.",
        )
    named = {"input": x, "weight": w, **({} if b is None else {"bias": b})}
    like = first.dtype, first.device
    name, t = next((n, t) for n, t in named.items() if (t.dtype, t.device) != like)
    _fail(
        f"{name} {g} of dtype {first.dtype} on {first.device}, as input 0 is",
        f"{t.dtype} on {t.device}",
        "Convert or move it, or use torch.autocast.",
    )


def _fail(expected: str, received: str, remedy: str) -> NoReturn:
    raise InputError(NAME, expected, received, remedy)
