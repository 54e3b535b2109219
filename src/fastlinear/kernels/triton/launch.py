"""Launching one Triton kernel again and again with little Python work.

``kernel[grid](...)`` re-derives the specialisation from every argument at each call. A caller that
looks its calls up in a table of its own (shapes, strides, dtypes, alignment) already knows that
nothing has changed, so the compiled kernel can be launched directly.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from fastlinear.fastpath import lookup, recorder
from fastlinear.fastpath.launch import FastpathLaunch, launch_of
from fastlinear.native.cuda_driver import TensorMap, loading_allowed

# The compiled kernel's own launcher has no stable interface: others go the official way.
_DIRECT = triton.__version__.startswith("3.6.")
Place = Any  # of an argument among a call's tensors: a number, a Spot, None, or a tuple of those
_L2_PROMOTION_128B = 2  # as Triton's launcher asks for
_INTEGERS: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}
# Said at every compilation: Triton 3.10 is to stop fusing where nothing is said, and 3.9 warns.
OPTIONS = {"enable_fp_fusion": True}
_current_device = torch.cuda.current_device


class Spot(NamedTuple):
    """Memory among a call's tensors: a number, and bytes behind its first element."""

    number: int
    offset: int


class Launch:
    """One kernel, grid and set of non-tensor arguments, specialised to one kind of call.

    Call it with the kernel's leading tensor arguments (None where the kernel takes none). Between
    calls their dtypes, their None-ness and their 16-byte alignment must not change; that is for
    the owner's key to ensure. Descriptors are given by ``block_shapes``: position → block.

    Args:
        kernel: a ``triton.jit`` function whose first parameters are the tensors.
        grid: one to three positive program counts.
        rest: the remaining parameters, in order.
        device: where the tensors live; a CPU device runs under Triton's interpreter.
        warps, stages: ``num_warps`` and ``num_stages``.
        block_shapes: tensors to be passed as TMA descriptors.
    """

    __slots__ = (
        *("_args", "_blocks", "_compiled", "_device", "_fastpath", "_grid", "_kernel", "_options"),
        "_untried",
    )

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        rest: tuple[Any, ...],
        device: torch.device,
        *,
        warps: int,
        stages: int = 3,
        block_shapes: dict[int, list[int]] | None = None,
    ) -> None:
        self._kernel = kernel
        self._grid: Any = (*grid, *(1,) * (3 - len(grid)))
        self._args = rest
        self._device = device.index if device.type == "cuda" else None
        self._options = OPTIONS | {"num_warps": warps, "num_stages": stages}
        self._blocks = block_shapes or {}
        self._compiled: Any = None
        self._fastpath: Any = None  # the launch by the compiled fast path, where that is there
        self._untried = True

    @property
    def described(self) -> bool:
        """Whether it takes descriptors."""
        return bool(self._blocks)

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launch on the current stream of the tensors' device, or record the launch."""
        recording = recorder.active()
        if recording is not None:
            recording.launch(self._recorded(recording, tensors))
            return
        if self._fastpath is not None and self._fastpath(*tensors):
            return
        device = self._device
        if device is not None and device != _current_device():
            with torch.cuda.device(device):
                self._launch(tensors)
        else:
            self._launch(tensors)

    def _recorded(
        self, recording: recorder.Recording, tensors: tuple[Any, ...]
    ) -> FastpathLaunch | None:
        def place(t: Any) -> Any:
            if isinstance(t, tuple):
                return tuple(map(place, t))
            return None if t is None else Spot(*recording.memory(t))

        described = {i: t for i, t in enumerate(tensors) if i in self._blocks and t is not None}
        return self.in_fastpath(tuple(map(place, tensors)), described)

    def _launch(self, tensors: tuple[torch.Tensor | None, ...]) -> None:
        compiled = self._compiled
        hooked = knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls
        if compiled is None or hooked or not _DIRECT:
            checked = [
                TensorDescriptor(t, list(t.shape), list(t.stride()), self._blocks[i])
                if i in self._blocks and t is not None
                else t
                for i, t in enumerate(tensors)
            ]
            capturing = self._device is not None and torch.cuda.is_current_stream_capturing()
            with loading_allowed() if capturing else nullcontext():
                self._compiled = self._kernel[self._grid](*checked, *self._args, **self._options)
            return
        if self._untried and self._device is not None and lookup.ready():
            self._untried = False
            # the fast path's callers give them flat
            nested = any(isinstance(t, tuple) for t in tensors)
            places = tuple(None if t is None else i for i, t in enumerate(tensors))
            found = self.in_fastpath(places) if lookup.serves_cuda() and not nested else None
            self._fastpath = None if found is None else lookup.launcher(found.kernel())
        gx, gy, gz = self._grid
        stream = driver.active.get_current_stream(self._device)
        args: tuple[Any, ...] = tensors
        if self._blocks:
            args = tuple(
                _Descriptor(t) if i in self._blocks and t is not None else t
                for i, t in enumerate(tensors)
            )
        compiled.run(
            gx,
            gy,
            gz,
            stream,
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,
            *args,
            *self._args,
        )

    def in_fastpath(
        self, tensors: tuple[Place, ...], described: Mapping[int, torch.Tensor] | None = None
    ) -> FastpathLaunch | None:
        """This launch for the compiled fast path, once it has been made at least once.

        Args:
            tensors: which of the call's tensors each leading argument is; None for None. A tuple
                of them for an argument that is a tuple.
            described: tensors laid out as those that are passed as descriptors, by position.

        Returns:
            None where it takes more: scratch memory, clusters, another Triton, descriptors of
            which nothing is known.
        """
        compiled, described = self._compiled, described or {}
        if compiled is None or not _DIRECT or self._device is None:
            return None
        meta = compiled.metadata
        maps = iter(getattr(meta, "tensordesc_meta", None) or ())
        more = (meta.launch_cooperative_grid, meta.launch_pdl, meta.num_ctas != 1)
        if any(more) or meta.global_scratch_size or meta.profile_scratch_size:
            return None
        kinds = tuple(compiled.src.signature.values())
        address = max((t.data_ptr() for t in described.values()), default=0)  # of any of them
        arguments: list[Any] = []
        addresses = []
        for at, (kind, value) in enumerate(_leaves(kinds, (*tensors, *self._args))):
            if kind == "constexpr":
                continue
            if kind.startswith("tensordesc"):
                facts = next(maps, None)  # of the map; none where the kernel reads no maps
                if facts is None or at not in described:
                    return None
                t = described[at]
                arguments.append(_descriptor_map(t, facts, address, self._device))
                addresses.append((arguments[-1], value))
                arguments += [ctypes.c_int32(size) for size in t.shape]
                arguments += [ctypes.c_int64(stride) for stride in t.stride()]
            elif kind.startswith("*"):
                arguments.append(ctypes.c_void_p(0))
                addresses.append((arguments[-1], value))
            elif kind in _INTEGERS:
                arguments.append(_INTEGERS[kind](value))
            else:
                return None
        arguments += [ctypes.c_void_p(0), ctypes.c_void_p(0)]  # no scratch memory
        warps, _, shared = compiled.packed_metadata
        hooks = knobs.runtime.launch_enter_hook.calls, knobs.runtime.launch_exit_hook.calls
        spots = [v if isinstance(v, Spot) else Spot(v, 0) for _, v in addresses]
        found = launch_of(
            compiled.function,
            self._grid,
            32 * warps,
            shared,
            arguments,
            [(a, v.number) for (a, _), v in zip(addresses, spots, strict=True)],
            hooks,
            compiled,
        )
        return replace(found, offsets=tuple(v.offset for v in spots))


def _leaves(kinds: tuple[Any, ...], values: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """The arguments in the order the kernel takes them: those inside of tuples as well."""
    assert len(kinds) == len(values), (kinds, values)
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, str):
            yield kind, value
        else:
            yield from _leaves(tuple(kind), tuple(value))


def _descriptor_map(
    t: torch.Tensor, facts: Mapping[str, Any], address: int, device: int
) -> TensorMap:
    """The map that Triton's launcher encodes of a descriptor, for a tensor laid out as t."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    assert not facts["fp4_padded"]
    return TensorMap.encoded(
        TMA_DTYPE_DEVICE_TO_HOST[facts["elem_type"]],
        t.shape[::-1],
        [stride * facts["elem_size"] for stride in t.stride()[-2::-1]],
        facts["block_size"][::-1],
        facts["swizzle"],
        _L2_PROMOTION_128B,
        address,
        device,
    )


class _Descriptor:
    """What the launcher reads of a TensorDescriptor, without its checks: they passed before."""

    __slots__ = ("base", "padding", "shape", "strides")

    def __init__(self, t: torch.Tensor) -> None:
        self.base = t
        self.shape = t.shape
        self.strides = t.stride()
        self.padding = "zero"
