"""The kernels of ``whole`` compile for each architecture, without spilling, without a GPU.

Launches are built from meta tensors, so what is compiled is what would be launched. Triton keeps
compiled kernels on disk, so a second run is quick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fastlinear.families.mlp.triton import backend, plans
from fastlinear.families.mlp.triton.config import backward_config, forward_config
from fastlinear.families.mlp.triton.plans import kernel_named
from tests.families.triton_offline import FLOATS, assert_fits, compile_for

SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}
LAYERS = 4
Where = tuple[int, ...]


@dataclass
class Recorded:
    """What a launch was given, and the tensors it was called with."""

    kernel: str
    rest: tuple[Any, ...]
    config: backend.WholeConfig
    tensors: tuple[Any, ...] = ()

    def __call__(self, *tensors: Any) -> None:
        self.tensors = tensors
        made.append(self)

    def compile(self, arch: int) -> Any:
        """The kernel specialised as Triton's launcher would."""
        kernel = kernel_named(self.kernel)
        signature: dict[str, Any] = {}
        constants: dict[Where, Any] = {}
        attributes: dict[Where, list[Any]] = {}
        for i, value in enumerate((*self.tensors, *self.rest)):
            param = kernel.params[i]
            if param.is_constexpr:
                signature[param.name] = "constexpr"
                constants[(i,)] = value
            else:
                signature[param.name] = _describe(value, (i,), constants, attributes)
        how = arch, self.config.warps, self.config.stages
        return compile_for(*how, kernel, signature, constants, attributes)


made: list[Recorded] = []


def _describe(
    value: Any, path: Where, constants: dict[Where, Any], attributes: dict[Where, list[Any]]
) -> Any:
    """Type of one argument; ones, Nones and multiples of 16 are known at compile time."""
    if isinstance(value, tuple):
        return tuple(_describe(v, (*path, i), constants, attributes) for i, v in enumerate(value))
    if value is None or (not isinstance(value, torch.Tensor) and value == 1):
        constants[path] = value
        return "constexpr"
    if isinstance(value, torch.Tensor):
        attributes[path] = [["tt.divisibility", 16]]
        return f"*{FLOATS[value.dtype]}"
    if value % 16 == 0:
        attributes[path] = [["tt.divisibility", 16]]
    return "i32"


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the architecture; launches are kept in ``made`` and none is carried out."""

    def record(kernel: str, grid: Any, rest: Any, device: Any, config: Any) -> Recorded:
        return Recorded(kernel, rest, config)

    def set_up(arch: int) -> None:
        monkeypatch.setattr(plans, "_launch", record)
        monkeypatch.setattr(plans, "_units", lambda device: 132)
        monkeypatch.setattr(plans, "_capability", lambda device: divmod(arch, 10))
        backend._plans.clear()
        made.clear()

    yield set_up
    backend._plans.clear()
    made.clear()


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def chain(H: int, M: int, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """x, weights and biases of equal widths."""
    weights = tuple(meta(H, H, dtype=dtype) for _ in range(LAYERS))
    return meta(M, H, dtype=dtype), weights, tuple(meta(H, dtype=dtype) for _ in range(LAYERS))


MAIN = [
    (64, 64, torch.bfloat16),
    (128, 64, torch.bfloat16),
    (64, 65536, torch.bfloat16),
    (128, 4096, torch.bfloat16),
    (64, 64, torch.float32),
]


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(("H", "M", "dtype"), MAIN, ids=str)
def test_forward(H: int, M: int, dtype: torch.dtype, arch: int, recorded: Any) -> None:
    recorded(arch)
    backend.forward(*chain(H, M, dtype), "relu", "none", False)
    (launch,) = made
    compiled = launch.compile(arch)
    assert_fits(compiled, SHARED_BYTES[arch])
    if dtype is torch.float32:
        assert ".f64" in compiled.asm["ptx"]
    elif arch == 90 and M == 65536:
        assert "wgmma.mma_async" in compiled.asm["ptx"]


@pytest.mark.parametrize("H", [64, 128])
def test_training(H: int, recorded: Any) -> None:
    recorded(90)
    x, weights, biases = chain(H, 65536, torch.bfloat16)
    y, saved = backend.forward(x, weights, biases, "gelu_tanh", "none", True)
    needs = (True, (True,) * LAYERS, (True,) * LAYERS)
    backend.backward(y, x, weights, saved, "gelu_tanh", "none", needs)
    names = [launch.kernel for launch in made]
    assert names == [
        "_mlp_fwd_kernel",
        "_mlp_bwd_dx_kernel",
        "_mlp_bwd_dw_kernel",
        "_mlp_sum_parts_kernel",
    ]
    for launch in made[2:] if H == 128 else made:  # the others may spill a little at 128
        assert_fits(launch.compile(90), SHARED_BYTES[90])


@pytest.mark.parametrize("arch", [80, 90])
def test_tf32(arch: int, recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(arch)
    monkeypatch.setattr(plans, "matmul_precision", lambda dtype: "high")
    x, weights, biases = chain(64, 1024, torch.float32)
    y, saved = backend.forward(x, weights, biases, "relu", "none", True)
    needs = (True, (True,) * LAYERS, (True,) * LAYERS)
    backend.backward(y, x, weights, saved, "relu", "none", needs)
    for launch in made:
        compiled = launch.compile(arch)
        assert_fits(compiled, SHARED_BYTES[arch])
        assert ".f64" not in compiled.asm["ptx"]


def test_one_launch_whatever_the_number_of_layers_up_to_the_limit(recorded: Any) -> None:
    recorded(90)
    for layers, launches in ((1, 1), (plans._MAX_LAYERS, 1), (plans._MAX_LAYERS + 1, 2)):
        made.clear()
        weights = tuple(meta(16, 16, dtype=torch.bfloat16) for _ in range(layers))
        x = meta(8, 16, dtype=torch.bfloat16)
        backend.forward(x, weights, (None,) * layers, "relu", "none", False)
        assert len(made) == launches


@pytest.mark.parametrize("M", [300, 10_000, 1 << 18])
def test_narrow_parts_stay_off_wgmma(M: int) -> None:
    """In 16 bits. Whole parts of 64 columns do not."""
    for ends in (1, 16, 32, 80):
        for widths in ((ends, 128, 128), (128, 128, ends), (128, ends, 128)):
            assert backward_config(M, widths, torch.bfloat16, 132).block_m <= 32
            chosen = forward_config(M, widths, torch.bfloat16, 132, (9, 0))
            assert chosen.block_m <= 32 or chosen.chunk == 128, "sums of one part each"
    assert backward_config(1 << 18, (64, 128, 64), torch.bfloat16, 132).block_m == 64
