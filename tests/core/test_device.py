"""What a processor says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastlinear.core import device


@pytest.mark.parametrize(
    ("name", "family", "flags", "wide"),
    [
        ("AMD EPYC", 26, "avx2 avx512f", True),
        ("AMD EPYC", 25, "avx2 avx512f", False),  # Zen 4: 256 bits at a time
        ("AMD EPYC", 26, "avx2", False),  # as a virtual machine may hide it
        ("Intel(R) Xeon(R)", 26, "avx2 avx512f", False),
    ],
)
def test_processors_of_512_bits_by_amd_are_told_by_their_family(
    name: str, family: int, flags: str, wide: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\ncpu family\t: {family}\nflags\t\t: {flags}\n")
    monkeypatch.setattr(device, "Path", lambda _: info)
    monkeypatch.setattr(device, "cpu_name", lambda: name)
    monkeypatch.setattr(device, "cpu_flags", device.cpu_flags.__wrapped__)
    assert device.is_wide_amd.__wrapped__() is wide
