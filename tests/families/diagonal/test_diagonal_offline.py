"""diagonal_linear's Triton kernels compile for each architecture, without spilling, on any machine.

Launches are built from meta tensors, so what is compiled is what would be launched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from fastlinear.families.diagonal.triton import backend, backward_config, forward_config
from fastlinear.families.diagonal.triton import config as triton_config
from tests.families.triton_offline import Recorded, dumped, recorder, usage

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recorded]]:
    """Launches made while the test runs; none is carried out."""
    made: list[Recorded] = []
    monkeypatch.setattr(backend, "EarlyLaunch", recorder(made))
    monkeypatch.setattr(backend, "_units", lambda like: 132)
    backend._plans.clear()
    yield made
    backend._plans.clear()


def run(m: int, k: int, dtype: torch.dtype, activation: str) -> None:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, w, b = empty(m, k), empty(k), empty(k)
    backend.forward(x, w, b, activation, x, None)
    backend.backward(x, x, w, b, activation, (True, True, True))


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_fit(
    arch: int,
    dtype: str,
    launches: list[Recorded],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wide, narrow, odd and few rows; the plainest activation and the dearest."""
    monkeypatch.setattr(backend, "begins_early", lambda device: arch >= 90)
    sizes = (
        ((32768, 2048), (32768, 8192), (32768, 160), (16, 64)) if arch == 90 else ((32768, 160),)
    )
    for m, k in sizes:
        for activation in ("none", "gelu"):
            launches.clear()
            run(m, k, DTYPES[dtype], activation)
            assert len(launches) == (2 if m == 16 else 3)
            for launch in launches:
                registers, stack = usage(launch.compile(arch))
                where = launch.name, m, k, activation, registers
                assert (stack, registers <= 255) == (0, True), where


def test_nothing_is_touched_before_the_kernel_before_has_ended(
    launches: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait stands before the first access to memory, in every kernel."""
    monkeypatch.setattr(backend, "begins_early", lambda device: True)
    run(4096, 160, torch.float32, "silu")
    assert len(launches) == 3
    for launch in launches:
        text = dumped(launch.compile(90), "--dump-sass")
        wait = text.index("ACQBULK")
        touched = [text.find(f" {word}") for word in ("LDG", "STG", "LDGSTS", "ATOM", "RED.")]
        assert wait < min(place for place in touched if place >= 0), launch.name


@pytest.mark.parametrize("k", [2048, 160, 100, 161])
def test_memory_is_read_sixteen_bytes_at_a_time(k: int, launches: list[Recorded]) -> None:
    """Whatever the number of features: rows of odd lengths are read side by side."""
    for dtype in DTYPES.values():
        launches.clear()
        run(32768, k, dtype, "none")
        for launch in launches[:2]:
            ptx = launch.compile(90).asm["ptx"]
            # pipelined loads go to shared memory, sixteen bytes each as well
            assert "ld.global.v4.b32" in ptx or re.search(r"cp\.async\.cg.*, 0x10", ptx)
            assert "st.global.v4.b32" in ptx


@pytest.mark.parametrize(("m", "k"), [(215_619, 25), (32767, 161), (32767, 1071)])
def test_an_odd_number_of_numbers_is_as_well(m: int, k: int, launches: list[Recorded]) -> None:
    """A forward's last few come one by one."""
    run(m, k, torch.bfloat16, "silu")
    ptx = launches[0].compile(90).asm["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx


@pytest.mark.parametrize("k", [1, 3, 16, 24, 33, 100, 128, 160, 161, 768, 1000, 1040, 8192, 24577])
@pytest.mark.parametrize("m", [1, 7, 33, 4099, 30000, 32768])
def test_every_number_has_its_tape(m: int, k: int) -> None:
    """Tiles cover what there is, and where a cut calls itself even, exactly that."""
    strips = [c for c in backward_config.BLOCKS if not c.whole]
    for config in (*forward_config.BLOCKS, *strips):
        for dense in (True, False):
            c = triton_config.cut(m, k, dense, 132, config)
            assert (c.rows - 1) * c.width + c.last == m * k
            assert 0 < c.last <= c.width
            assert c.fold == 1 or dense
            assert c.width == c.fold * k
            assert c.blocks * c.block_k >= c.width
            assert (c.blocks - 1) * c.block_k < c.width
            assert 1 <= c.strips <= -(-c.rows // c.block_m)
            whole = c.blocks * c.block_k == c.width == c.last and c.rows % c.block_m == 0
            assert c.even == whole
    for config in (c for c in backward_config.BLOCKS if c.whole):
        whole_sums = triton_config.whole_cut(m, k, config)
        assert (whole_sums.strips, whole_sums.fold, whole_sums.rows) == (1, 1, m)
        assert whole_sums.blocks * whole_sums.block_k >= k


def test_multiples_of_128_rows_leave_nothing_over() -> None:
    """Whatever the number of features, in blocks of at least 64 columns."""
    wide = [c for c in backward_config.BLOCKS if c.block_k >= 64]
    assert wide
    for k in (24, 33, 100, 160, 161, 640, 1000, 1040):
        for config in wide:
            assert triton_config.cut(32768, k, True, 132, config).even, (k, config)


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_configuration_that_may_be_chosen_fits(
    arch: int, dtype: str, launches: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of features that leave columns over too, with the dearest activation and a residual."""
    monkeypatch.setattr(backend, "begins_early", lambda device: arch >= 90)
    for config in forward_config.BLOCKS:
        for k in (1024, 1025):
            x, w = (torch.empty(s, dtype=DTYPES[dtype], device="meta") for s in ((4096, k), (k,)))
            backend.forward(x, w, w, "gelu", x, None, config=config)
    for config in backward_config.BLOCKS:
        for k in (1024, 1025):
            x, w = (torch.empty(s, dtype=DTYPES[dtype], device="meta") for s in ((4096, k), (k,)))
            backend.backward(x, x, w, w, "gelu", (True, True, True), config=config)
    for launch in launches:
        registers, stack = usage(launch.compile(arch))
        assert (stack, registers <= 255) == (0, True), (launch.name, launch.rest)
