"""Cases drawn at random from what users have: a Problem each, the same for the same seed.

Numbers of rows are log-uniform from 1 to 2^17: one request, a policy's step, a batch, the points of
a coordinate network. Widths are a mixture; the published ones are of these models:

- GPT-2, BERT, ViT (768, 3072; 1024, 4096; 1280, 5120), T5 (512, 1024, 2048),
- Llama 2 and 3, Mistral (4096, 11008, 14336), Qwen 2.5 (896, 4864; 1536, 8960; 3584),
  Gemma 2 (2304, 9216), SmolLM (576, 1536),
- experts of DeepSeek-V2-Lite (2048, 1408) and Qwen3-30B-A3B (2048, 768),
- recommenders (415, 512, 256; DLRM's 13, 512, 256, 64), soft actor-critic (376, 256, 17),
- tabular networks (100, 512, 10), coordinate networks (63, 256; tiny ones of 64).

What takes more than a device's ``Limit`` is drawn again, so that a case takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.core.precision import FLOAT_DTYPES, matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import family
from fastlinear.dispatch.steps import STEP
from fastlinear.families.gated.stacking import ORDERS

INFERENCE, TRAINING = "inference", "train"
_PUBLISHED = (
    *(768, 3072, 1024, 4096, 1280, 5120, 512, 2048, 4096, 11008, 14336, 896, 4864, 1536, 8960),
    *(3584, 2304, 9216, 576, 2048, 1408, 768, 415, 256, 64, 13, 376, 17, 100, 512, 10, 63, 256),
)
_USUAL = ("none", "relu", "gelu", "gelu_tanh", "silu")
_MOST_ROWS = 1 << 17


@dataclass(frozen=True)
class Limit:
    """The most that a call may compute and move at least: products' operations, and bytes."""

    flops: float
    bytes: float


LIMITS = {"cpu": Limit(4e9, 1 << 27), "cuda": Limit(2e12, 1 << 32)}
_DTYPES = {
    "cpu": {"float32": 6, "bfloat16": 3, "float16": 1},
    "cuda": {"float32": 3, "bfloat16": 5, "float16": 2},
}


@dataclass(frozen=True)
class Drawn:
    """One case: the ``index``-th of a seed.

    ``problem`` is the forward's, of a call with gradients or without; on a GPU every second case is
    recorded into a CUDA graph.
    """

    seed: int
    index: int
    problem: Problem

    @property
    def inputs_seed(self) -> int:
        """Of the case's tensors."""
        return self.seed * 100_003 + self.index


def cases(
    name: str, seed: int, count: int, device: str, mode: str, dtypes: Sequence[str] = ()
) -> list[Drawn]:
    """The first ``count`` cases of a family and seed; fewer of them are the first of these."""
    return [case(name, seed, i, device, mode, dtypes) for i in range(count)]


def case(
    name: str,
    seed: int,
    index: int,
    device: str,
    mode: str,
    dtypes: Sequence[str] = (),
    limit: Limit | None = None,
) -> Drawn:
    """The ``index``-th case of a family and seed.

    Args:
        name: the family's.
        device: ``"cpu"`` or ``"cuda"``.
        mode: ``"inference"`` or ``"train"``.
        dtypes: only these; by default the device's own mixture of three.
        limit: the most that it may take; by default the device's in ``LIMITS``.
    """
    rng, draw, most = Random(f"{name} {mode} {seed} {index}"), _DRAWS[name], limit or LIMITS[device]
    known = family(name)
    while True:
        shares = dict.fromkeys(dtypes, 1) or _DTYPES[device]
        dtype = rng.choices(list(shares), list(shares.values()))[0]
        facts: dict[str, Any] = {
            "dtype": dtype,
            "device": device,
            "needs_grad": mode == TRAINING,
            "captured": device == "cuda" and index % 2 == 1,
            "precision": matmul_precision(FLOAT_DTYPES[dtype]),
        }
        sizes, options = draw(rng)
        assert known.space is not None
        p = known.space.problem("forward", *sizes, **facts, **options)
        least = known.cost(p.with_piece(STEP) if mode == TRAINING else p)
        if least.flops <= most.flops and least.bytes <= most.bytes:
            return Drawn(seed, index, p)


# --------------------------------------------------------------------------------------------
# What is drawn


def _log_uniform(rng: Random, low: int, high: int) -> int:
    return min(high, round(low * (high / low) ** rng.random()))


def _rows(rng: Random) -> int:
    return _log_uniform(rng, 1, _MOST_ROWS)


def width(rng: Random, most: int = 16384) -> int:
    """A number of features: published, a power of two, a multiple, or anything."""
    kinds: tuple[Callable[[], int], ...] = (
        lambda: rng.choice(_PUBLISHED),
        lambda: 1 << rng.randint(4, 13),
        lambda: _multiple(rng, 64),
        lambda: _multiple(rng, rng.choice((8, 16))),
        lambda: _log_uniform(rng, 2, 4096) | 1,
        lambda: rng.randint(2, 32),
    )
    return min(most, rng.choices(kinds, (6, 5, 3, 3, 2, 1))[0]())


def _multiple(rng: Random, of: int) -> int:
    return of * _log_uniform(rng, 1, 8192 // of)


def _head(rng: Random) -> int:
    """Outputs of a network: one number, a few classes or actions, or features."""
    kind = rng.random()
    return 1 if kind < 0.3 else rng.randint(2, 32) if kind < 0.7 else width(rng, 4096)


def _activation(rng: Random) -> str:
    return rng.choice(_USUAL if rng.random() < 0.6 else ACTIVATIONS)


def _mostly(rng: Random, usual: Any, *others: Any) -> Any:
    """The usual value in five of six, else one of the others."""
    return usual if rng.random() < 5 / 6 else rng.choice(others)


_Draw = tuple[tuple[Any, ...], dict[str, Any]]


def _linear(rng: Random) -> _Draw:
    n = 1 if rng.random() < 0.05 else width(rng)
    return (_rows(rng), width(rng), n), {
        "activation": _activation(rng),
        "bias": _mostly(rng, True, False),
        "x_layout": _mostly(rng, "rows", "rows", "strided"),
        "w_layout": _mostly(rng, "nk", "kn"),
    }


def _mlp(rng: Random) -> _Draw:
    depth, kind, hidden = rng.randint(1, 10), rng.random(), width(rng, 4096)
    if kind < 0.35:
        widths = [hidden] * (depth + 1)
    elif kind < 0.65:
        widths = [width(rng, 4096), *[hidden] * (depth - 1), _head(rng)]
    else:  # a tower that narrows
        inner = sorted((width(rng, 2048) for _ in range(depth - 1)), reverse=True)
        widths = [width(rng, 4096), *inner, _head(rng)]
    activation = _activation(rng)
    return (_rows(rng), tuple(widths)), {
        "activation": activation,
        "final_activation": _mostly(rng, "none", activation, "sigmoid", "tanh"),
        "bias": _mostly(rng, "yes", "no", "some"),
        "x_layout": _mostly(rng, "rows", "rows_odd", "strided"),
        "w_layout": _mostly(rng, "nk", "mixed"),
    }


def _gated(rng: Random) -> _Draw:
    k, kind = width(rng, 8192), rng.random()
    hidden = width(rng) if rng.random() < 0.5 else max(1, round(k * rng.choice((1, 2, 8 / 3, 4))))
    down = () if kind < 0.15 else (k,) if kind < 0.85 else (width(rng, 8192),)
    return (_rows(rng), k, hidden, *down), {
        "activation": _mostly(rng, rng.choice(("silu", "gelu", "gelu_tanh")), *ACTIVATIONS),
        "bias": _mostly(rng, "no", "yes", "some"),
        "order": _mostly(rng, *ORDERS),
        "x": _mostly(rng, "dense", "strided"),
        "w": _mostly(rng, "dense", "strided"),
    }


def _diagonal(rng: Random) -> _Draw:
    return (_rows(rng), width(rng)), {
        "activation": _activation(rng),
        "bias": _mostly(rng, True, False),
        "residual": _mostly(rng, False, True),
        "x_layout": _mostly(rng, "rows", "rows_apart", "strided"),
    }


def _grouped(rng: Random) -> _Draw:
    order = rng.choice(("tokens", "tokens", "groups", "channels"))
    length = _log_uniform(rng, 1, 4096) if order == "channels" else 0
    if length == 1:  # the same memory
        order, length = "tokens", 0
    batch = _log_uniform(rng, 1, max(1, _MOST_ROWS // max(1, length)))
    rows = batch * max(1, length)
    k = width(rng, 1024)
    n = rng.choice((1, k, width(rng, 1024), width(rng, 1024)))
    return (rows, _log_uniform(rng, 2, 1024), k, n, length), {
        "activation": _activation(rng),
        "bias": _mostly(rng, True, False),
        "order": order,
        "x": _mostly(rng, "dense", "strided"),
        "w": _mostly(rng, "dense", "strided"),
    }


def _ragged(rng: Random) -> _Draw:
    sizes = _rows(rng), _log_uniform(rng, 8, 256), width(rng, 8192), width(rng, 8192)
    return sizes, {"activation": _activation(rng), "bias": _mostly(rng, True, False)}


def _unequal(rng: Random) -> _Draw:
    rows, groups = _rows(rng), _log_uniform(rng, 2, 256)
    return (max(rows, groups), groups, width(rng, 4096), width(rng, 4096)), {
        "activation": _activation(rng),
        "bias": _mostly(rng, "yes", "no", "some"),
        "rows": rng.choice(("aligned", "unaligned")),
    }


_DRAWS: dict[str, Callable[[Random], _Draw]] = {
    "linear_act": _linear,
    "mlp": _mlp,
    "gated_mlp": _gated,
    "diagonal_linear": _diagonal,
    "grouped_linear": _grouped,
    "ragged_linear": _ragged,
    "unequal_linear": _unequal,
}
FAMILIES = tuple(_DRAWS)
"""Families of which cases are drawn."""
