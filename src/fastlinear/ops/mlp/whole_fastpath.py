"""A launch of ``whole_cuda`` as the compiled fast path makes it: a copy of what its plan prepared.

A plan's kernel takes one block of parameters. The copy has the sizes, the descriptors of weights
and the workspace of the call it was made from; the fast path fills in addresses of the others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fastlinear.ops.common import cuda_driver as driver
from fastlinear.ops.common.fastpath_launch import FastpathLaunch

_ALIGNMENT = 64  # of a TMA descriptor in host memory


@dataclass(frozen=True)
class Places:
    """Where in its parameters a kernel finds addresses, in bytes.

    Attributes:
        x, y: of the tensors.
        weights: of the first layer's; the others follow. None where descriptors hold them.
        biases: of the first layer's.
        shared: whether blocks share a workspace, which belongs to one stream.
    """

    x: int
    y: int
    weights: int | None
    biases: int
    shared: bool


@dataclass(frozen=True)
class WholeLaunch:
    """The launch, and what a call has to have in common with the one it was made from.

    Attributes:
        launch: its tensors by number: 0 x, then weights, then biases, and y after them all.
        fixed: whether the weights have to lie where they lay.
        stream: the raw stream it may run on, or None for any.
    """

    launch: FastpathLaunch
    fixed: bool
    stream: int | None


def whole_launch(
    plan: Any, x: Tensor, weights: Sequence[int], biases: Sequence[int], stream: int, y: int
) -> WholeLaunch:
    """The launch of a plan for calls like this one, which is run once more.

    ``weights`` and ``biases`` are addresses, 0 for no bias. No other thread may run the plan.
    """
    plan.run(x, weights, biases, stream)
    places: Places = plan.places
    size = ctypes.sizeof(plan._params)
    memory = (ctypes.c_char * (size + _ALIGNMENT))()
    base = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
    ctypes.memmove(base, plan._params, size)
    slots = (ctypes.c_void_p * 1)(base)
    config = driver._LaunchConfig()
    ctypes.memmove(ctypes.addressof(config), plan.launch._config_ref, ctypes.sizeof(config))

    def at(offset: int) -> ctypes.c_void_p:
        return ctypes.c_void_p.from_address(base + offset)

    layers = len(weights)
    tensors = [(at(places.x), 0), (at(places.y), y)]
    if places.weights is not None:
        tensors += [(at(places.weights + 8 * i), 1 + i) for i in range(layers)]
    tensors += [
        (at(places.biases + 8 * i), 1 + layers + i) for i, bias in enumerate(biases) if bias
    ]
    return WholeLaunch(
        FastpathLaunch(
            plan.launch._handle,
            ctypes.addressof(config),
            ctypes.addressof(slots),
            tuple(tensors),
            (),
            (memory, slots, config, plan),
        ),
        places.weights is None,
        stream if places.shared else None,
    )
