"""NVRTC and the CUDA driver through ctypes: compile, load, encode tensor maps, launch.

Only libraries that a CUDA build of PyTorch already brings are used; nothing is loaded before the
first call. Every failing call raises DriverError with the library's own message.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from fastlinear.core.errors import FastlinearError
from fastlinear.core.interrupts import whole

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_TENSOR_MAP_TYPE = {"float16": 6, "float32": 7, "bfloat16": 9}
_ITEM_BYTES = {"float16": 2, "float32": 4, "bfloat16": 2}
_SWIZZLE_NONE, _SWIZZLE_64B, _SWIZZLE_128B = 0, 2, 3
_L2_PROMOTION_NONE, _L2_PROMOTION_256B = 0, 3
_CAPTURE_MODE_RELAXED = 2
_INVALID_CONTEXT = 201
_REMEDY = "Force backend='triton' or 'eager', and report this with `fastlinear doctor`'s output."


class DriverError(FastlinearError, RuntimeError):
    """A call into NVRTC or the CUDA driver failed."""

    exit_code = 5


@cache
def _driver() -> ctypes.PyDLL:
    # PyDLL keeps the interpreter lock: these calls take about a microsecond.
    return ctypes.PyDLL("libcuda.so.1")


@cache
def _nvrtc() -> ctypes.CDLL:
    names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    folders: dict[str, Path] = {}
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        folders |= {str(p): p.parent for p in sorted(Path(root).glob("*/lib/libnvrtc.so.*"))}
    for name in (*names, *folders):
        try:
            # the compiler asks for its builtins by name, which finds nothing in a wheel's folder
            for path in folders[name].glob("libnvrtc-builtins.so.*") if name in folders else ():
                ctypes.CDLL(str(path))
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise DriverError(
        "nvrtc",
        "NVRTC, which a CUDA build of torch brings",
        f"none of {', '.join((*names, *folders))} can be loaded",
        "Install a CUDA build of torch, or leave the choice of backend to dispatch.",
    )


def _check(status: int, call: str) -> None:
    if status == 0:
        return
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    raise DriverError(
        call,
        "success",
        f"error {status}, {(text.value or b'unknown').decode()}",
        _REMEDY,
    )


def make_current(device: int) -> None:
    """Give this thread the device's primary context, torch's own, where it has none.

    A thread that has only reused memory torch had cached never called the runtime, which would
    have done it.
    """
    driver = _driver()
    context = ctypes.c_void_p()
    _check(driver.cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
    if not context.value:
        _check(driver.cuCtxSetCurrent(_primary_context(device)), "cuCtxSetCurrent")


@cache
def _primary_context(device: int) -> ctypes.c_void_p:
    """Retained once and for good: torch keeps it as long as the process lives."""
    context = ctypes.c_void_p()
    _check(
        _driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        "cuDevicePrimaryCtxRetain",
    )
    return context


@whole
def loading_allowed() -> Iterator[None]:
    """Let this thread load kernels while a CUDA graph is being captured; loading is not captured.

    Outside a capture it changes nothing.
    """
    exchange = _driver().cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    _check(exchange(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")
    try:
        yield
    finally:
        _check(exchange(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")


def compile_cubin(source: str, name: str, arch: str) -> bytes:
    """CUDA C++ source → cubin for ``arch`` (for example ``sm_90a``), with NVRTC."""
    lib = _nvrtc()
    lib.nvrtcGetErrorString.restype = ctypes.c_char_p
    program = ctypes.c_void_p()

    def check(status: int, call: str) -> None:
        if status != 0:
            said = lib.nvrtcGetErrorString(status).decode()
            raise DriverError(call, "success", f"error {status}, {said}", _REMEDY)

    check(
        lib.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), name.encode(), 0, None, None
        ),
        "nvrtcCreateProgram",
    )
    try:
        options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17"]
        status = lib.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*options)
        )
        size = ctypes.c_size_t()
        if status != 0:
            check(lib.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "nvrtcGetProgramLogSize")
            log = ctypes.create_string_buffer(size.value)
            check(lib.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
            raise DriverError(
                "nvrtcCompileProgram",
                f"{name} to compile for {arch}",
                f"the compiler's log:\n{log.value.decode()}",
                _REMEDY,
            )
        check(lib.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        cubin = ctypes.create_string_buffer(size.value)
        check(lib.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        return cubin.raw
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


class Kernel:
    """A kernel of a loaded cubin; usable on every device of the cubin's architecture.

    Args:
        cubin: the compiled image, kept loaded as long as the process lives.
        name: the kernel's extern "C" name.
        shared_bytes: its dynamic shared memory.
        device: ordinal of the device on which that limit is raised.
        carveout: percent of a multiprocessor's memory that it wants as shared memory, the rest
            being its L1; None for the driver's choice.
    """

    def __init__(
        self,
        cubin: bytes,
        name: str,
        shared_bytes: int,
        device: int,
        carveout: int | None = None,
    ) -> None:
        driver = _driver()
        library = ctypes.c_void_p()
        self._image = cubin
        zero = ctypes.c_uint(0)
        _check(
            driver.cuLibraryLoadData(
                ctypes.byref(library), cubin, None, None, zero, None, None, zero
            ),
            "cuLibraryLoadData",
        )
        self.device = device
        self.handle = ctypes.c_void_p()
        self.shared_bytes = shared_bytes
        _check(
            driver.cuLibraryGetKernel(ctypes.byref(self.handle), library, name.encode()),
            "cuLibraryGetKernel",
        )
        _check(
            driver.cuKernelSetAttribute(_MAX_DYNAMIC_SHARED, shared_bytes, self.handle, device),
            "cuKernelSetAttribute",
        )
        if carveout is not None:
            _check(
                driver.cuKernelSetAttribute(_CARVEOUT, carveout, self.handle, device),
                "cuKernelSetAttribute",
            )


class _LaunchAttribute(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_uint * 16),
    ]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    ]


class TensorMap:
    """A TMA descriptor of a matrix of contiguous rows, or of a stack of them, 128-byte swizzled.

    Plain, rows of the tile lie one behind the other in shared memory, and no more than they hold is
    fetched.

    Args:
        dtype: ``"float16"``, ``"bfloat16"`` or ``"float32"``.
        rows, cols: extent; reads beyond it give zeros, writes beyond it are dropped.
        row_stride: elements between rows, of a multiple of 16 bytes.
        box_rows, box_cols: the tile one instruction moves; a row of it is at most 128 bytes, or 64
            where ``narrow``, or 256 numbers where ``plain``.
        address: first element, 16-byte aligned.
        device: ordinal of the device the matrix is on.
        narrow: rows of the tile are 64 bytes apart in shared memory and swizzled accordingly,
            instead of 128.
        plain: rows of the tile are box_cols apart, not swizzled.
        planes: matrices of a stack, one behind the other; 0 is a matrix without that dimension.
    """

    def __init__(
        self,
        dtype: str,
        rows: int,
        cols: int,
        row_stride: int,
        box_rows: int,
        box_cols: int,
        address: int,
        device: int,
        narrow: bool = False,
        plain: bool = False,
        planes: int = 0,
    ) -> None:
        swizzle = _SWIZZLE_NONE if plain else _SWIZZLE_64B if narrow else _SWIZZLE_128B
        self._reserve(address, device)
        pitch = row_stride * _ITEM_BYTES[dtype]
        dims = (cols, rows, planes) if planes else (cols, rows)
        box = (box_cols, box_rows, 1)[: len(dims)]
        promotion = _L2_PROMOTION_NONE if plain else _L2_PROMOTION_256B
        strides = (pitch, pitch * rows)[: len(dims) - 1]
        self._encode(_TENSOR_MAP_TYPE[dtype], dims, strides, box, swizzle, promotion)

    @classmethod
    def encoded(
        cls,
        kind: int,
        dims: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        swizzle: int,
        promotion: int,
        address: int,
        device: int,
    ) -> TensorMap:
        """A descriptor of any tensor, as the driver takes it.

        Args:
            kind, swizzle, promotion: the driver's numbers for them.
            dims, box: sizes of the tensor and of a tile, the contiguous dimension first.
            strides: bytes, of all dimensions but that one.
            address, device: as above.
        """
        found = cls.__new__(cls)
        found._reserve(address, device)
        found._encode(kind, dims, strides, box, swizzle, promotion)
        return found

    def _reserve(self, address: int, device: int) -> None:
        make_current(device)
        self._device = device
        self._storage = ctypes.create_string_buffer(128 + 64)
        start = ctypes.addressof(self._storage)
        self.pointer = start + (-start) % 64
        self._address = address
        self._replace = _driver().cuTensorMapReplaceAddress
        self._replace.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

    def _encode(
        self,
        kind: int,
        dims: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        swizzle: int,
        promotion: int,
    ) -> None:
        rank = len(dims)
        status = _driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(self.pointer),
            kind,
            rank,
            ctypes.c_void_p(self._address),
            (ctypes.c_uint64 * rank)(*dims),
            (ctypes.c_uint64 * (rank - 1))(*strides),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,
            swizzle,
            promotion,
            0,
        )
        given = f"dims={list(dims)}, strides={list(strides)}, box={list(box)}"
        _check(status, f"cuTensorMapEncodeTiled({given})")

    def lie_at(self, pointer: int) -> None:
        """Move the descriptor itself to other memory, on 64 bytes, that its owner keeps."""
        ctypes.memmove(pointer, self.pointer, 128)
        self.pointer = pointer

    def point_at(self, address: int) -> None:
        """Move the descriptor to another base address of the same layout."""
        if address != self._address:
            status = self._replace(self.pointer, address)
            if status == _INVALID_CONTEXT:  # this thread's first call into the driver
                make_current(self._device)
                status = self._replace(self.pointer, address)
            if status:
                _check(status, "cuTensorMapReplaceAddress")
            self._address = address


class NoTensorMap(TensorMap):
    """Stands where a kernel takes a descriptor that it makes no use of."""

    def __init__(self) -> None:
        self._storage = ctypes.create_string_buffer(128 + 64)
        start = ctypes.addressof(self._storage)
        self.pointer = start + (-start) % 64

    def point_at(self, address: int) -> None:
        """Nothing."""


Argument = TensorMap | ctypes._SimpleCData  # type: ignore[type-arg]


def slot_of(argument: Argument) -> int:
    """Where a launch reads an argument."""
    return argument.pointer if isinstance(argument, TensorMap) else ctypes.addressof(argument)


class Launch:
    """A prepared launch: kernel, grid, cluster and argument slots, re-used call after call.

    Arguments are ctypes objects (scalars) or TensorMap (passed by value); change their contents,
    then call :meth:`run`. Not safe to share between threads without a lock.
    """

    def __init__(
        self, kernel: Kernel, block: int, cluster: int, arguments: Sequence[Argument]
    ) -> None:
        self._kernel = kernel
        self._arguments = arguments
        self._slots = (ctypes.c_void_p * len(arguments))(*map(slot_of, arguments))
        self._attribute = _LaunchAttribute(_CLUSTER_DIMENSION)
        self._attribute.value[0:3] = [cluster, 1, 1]
        self._config = _LaunchConfig()
        self._config.grid[:] = [cluster, 1, 1]
        self._config.block[:] = [block, 1, 1]
        self._config.shared_bytes = kernel.shared_bytes
        self._config.attributes = ctypes.pointer(self._attribute)
        self._config.attribute_count = 1
        self._config_ref = ctypes.addressof(self._config)
        self._slots_ref = ctypes.addressof(self._slots)
        self._handle = kernel.handle.value
        self._launch = _driver().cuLaunchKernelEx
        self._launch.argtypes = [ctypes.c_void_p] * 4

    def max_clusters(self) -> int:
        """How many clusters of this launch the current device runs at once."""
        count = ctypes.c_int()
        _check(
            _driver().cuOccupancyMaxActiveClusters(
                ctypes.byref(count), self._kernel.handle, ctypes.byref(self._config)
            ),
            "cuOccupancyMaxActiveClusters",
        )
        return count.value

    def begin_early(self) -> None:
        """Let the kernel begin before the end of the one before it in the stream, for which it
        waits itself: compute capability 9.0 and later."""
        self._attributes = (_LaunchAttribute * 2)(self._attribute)
        self._attributes[1].id = _PROGRAMMATIC_SERIALIZATION
        self._attributes[1].value[0] = 1
        self._config.attributes = ctypes.cast(self._attributes, ctypes.POINTER(_LaunchAttribute))
        self._config.attribute_count = 2

    def set_grid(self, blocks: int) -> None:
        """Number of blocks, a multiple of the cluster size."""
        self._config.grid[0] = blocks

    def run(self, stream: int) -> None:
        """Enqueue on a raw stream handle; returns before the kernel has run."""
        self._config.stream = stream
        status = self._launch(self._config_ref, self._handle, self._slots_ref, None)
        if status == _INVALID_CONTEXT:
            make_current(self._kernel.device)
            status = self._launch(self._config_ref, self._handle, self._slots_ref, None)
        if status:
            _check(status, "cuLaunchKernelEx")
