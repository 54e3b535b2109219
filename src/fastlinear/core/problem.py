"""A Problem is one concrete call: op, dims, dtype, layout, device, needs_grad."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

# Dims that vary from call to call; they are bucketed in cache keys. The others are kept exact.
_BATCH_DIMS = frozenset({"M"})


@dataclass(frozen=True, slots=True)
class Problem:
    """One concrete call of one piece of a family.

    Attributes:
        family: op name, for example ``"linear_act"``.
        piece: what is computed: ``"forward"`` or one piece of the backward.
        dims: named sizes, for example ``(("M", 64), ("K", 128), ("N", 256))``.
        dtype: torch dtype name without the prefix, for example ``"bfloat16"``.
        device: ``"cpu"`` or ``"cuda"``.
        options: named facts that change which backend can serve, for example the activation.
        needs_grad: whether the forward must keep what the backward needs.
        precision: ``float32_precision()`` for float32, else ``"n/a"``.
        captured: whether the call is recorded into a CUDA graph: then only the device's time
            counts, else the host's work for each call as well.
    """

    family: str
    piece: str
    dims: tuple[tuple[str, int], ...]
    dtype: str
    device: str
    options: tuple[tuple[str, str], ...] = ()
    needs_grad: bool = False
    precision: str = "n/a"
    captured: bool = False

    def dim(self, name: str) -> int:
        """Size of the named dimension."""
        return dict(self.dims)[name]

    def option(self, name: str) -> str:
        """Value of the named option; the empty string when it is absent."""
        return dict(self.options).get(name, "")

    def with_piece(self, piece: str) -> Problem:
        """The same call, another piece of it."""
        return replace(self, piece=piece)

    def with_rows(self, rows: int) -> Problem:
        """The same call with another number of rows."""
        return replace(self, dims=tuple((k, rows if k in _BATCH_DIMS else v) for k, v in self.dims))

    @property
    def rows(self) -> int:
        """The bucket of its number of rows, 0 where it has none."""
        return next((v for k, v in self.bucketed().dims if k in _BATCH_DIMS), 0)

    def bucketed(self) -> Problem:
        """The representative of this Problem's bucket: batch dims become powers of two."""
        dims = tuple((k, bucket_size(v) if k in _BATCH_DIMS else v) for k, v in self.dims)
        return replace(self, dims=dims)

    def key(self) -> str:
        """Stable text key of the bucket, used by caches and tables."""
        p = self.bucketed()
        dims = ",".join(f"{k}={v}" for k, v in p.dims)
        opts = ",".join(f"{k}={v}" for k, v in p.options)
        grad = "grad" if p.needs_grad else "nograd"
        key = f"{p.family}|{p.piece}|{dims}|{p.dtype}|{p.device}|{opts}|{grad}|{p.precision}"
        return f"{key}|captured" if p.captured else key

    def describe(self) -> str:
        """One readable line, for tables and messages."""
        dims = " ".join(f"{k}={v}" for k, v in self.dims)
        opts = " ".join(f"{k}={v}" for k, v in self.options)
        tail = " captured" if self.captured else ""
        return f"{self.family}.{self.piece} {dims} {self.dtype} {self.device} {opts}".strip() + tail

    def other_regime(self) -> Problem | None:
        """The same call inside a CUDA graph if this one is outside, and the other way round; None
        on a CPU."""
        return replace(self, captured=not self.captured) if self.device == "cuda" else None

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; ``from_json`` is its inverse."""
        data = asdict(self)
        data["dims"] = dict(self.dims)
        data["options"] = dict(self.options)
        return data

    @staticmethod
    def from_json(data: dict[str, Any]) -> Problem:
        """Rebuild a Problem written by ``to_json``. Raises KeyError or TypeError on bad data."""
        return Problem(
            family=str(data["family"]),
            piece=str(data["piece"]),
            dims=tuple((str(k), int(v)) for k, v in data["dims"].items()),
            dtype=str(data["dtype"]),
            device=str(data["device"]),
            options=tuple((str(k), str(v)) for k, v in data["options"].items()),
            needs_grad=bool(data["needs_grad"]),
            precision=str(data["precision"]),
            captured=bool(data.get("captured", False)),
        )


def bucket_size(size: int) -> int:
    """The power of two nearest to ``size`` on a log scale (0 stays 0)."""
    if size <= 1:
        return size
    low = 1 << (size.bit_length() - 1)
    return low if size * size <= low * low * 2 else low * 2
