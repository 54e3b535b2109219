"""A Case is one line of an experiment: a problem, a direction and the metrics to take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

DIRECTIONS = ("forward", "backward", "forward+backward", "step")
BOTH_MODES = ("forward", "forward+backward")
"""Directions without and with gradients."""
TIMED = ("wall", "device")
METRICS = (*TIMED, "first_call", "peak_memory", "kernels")


def timed_on(device: str) -> tuple[str, ...]:
    """The metrics of time that a device type has, the first decides."""
    return ("device", "wall") if device == "cuda" else ("wall",)


@dataclass(frozen=True)
class Case:
    """One measured situation, as plain data.

    Attributes:
        experiment: the experiment it belongs to.
        family: the op family under test.
        dims: named sizes; M tokens, K in features, N out features, L layers.
        dtype: dtype name.
        device: ``"cpu"`` or ``"cuda"``.
        direction: ``"forward"`` (no gradients), ``"forward+backward"`` (gradients of x and of
            every parameter) or ``"step"`` (forward, backward and an SGD update).
        metrics: which of ``wall``, ``device``, ``first_call``, ``peak_memory`` and ``kernels``
            (the names of what one call runs) to take.
        options: named facts of the family, for example the activation.
        seed: seed of every random draw.
        light: leave out the contenders that take minutes to prepare.
        without: further contenders that take too long to prepare here, by name.
        left_out: why nobody is measured in it, or the empty string; it is then one skipped row.
    """

    experiment: str
    family: str
    dims: tuple[tuple[str, int], ...]
    dtype: str
    device: str
    direction: str
    metrics: tuple[str, ...]
    options: tuple[tuple[str, str], ...] = ()
    seed: int = 0
    light: bool = False
    without: tuple[str, ...] = ()
    left_out: str = ""

    def __post_init__(self) -> None:
        assert self.direction in DIRECTIONS, self.direction
        assert set(self.metrics) <= set(METRICS), self.metrics

    def dim(self, name: str) -> int:
        """Size of the named dimension."""
        return dict(self.dims)[name]

    def option(self, name: str) -> str:
        """Value of the named option; the empty string when it is absent."""
        return dict(self.options).get(name, "")

    @property
    def problem(self) -> str:
        """The readable name of what is computed, without direction and metric."""
        sizes = " ".join(f"{k}{v}" for k, v in self.dims if (k, v) != ("L", 1))
        named = ("activation", "model", "x", "sizes")
        facts = " ".join(v for k, v in self.options if k in named)
        facts += f" skip {self.option('skips')}" if self.option("skips") else ""
        bare = " no bias" if self.option("bias") == "no" else ""
        more = " residual" if self.option("residual") == "yes" else ""
        return f"{facts} {sizes} {self.dtype}{bare}{more}".strip()

    @property
    def name(self) -> str:
        """What ``--only`` is matched against: the problem, then the direction."""
        return f"{self.problem} {self.direction}"

    @property
    def needs_grad(self) -> bool:
        """Whether anything is differentiated."""
        return self.direction != "forward"

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        data = asdict(self)
        data["dims"] = dict(self.dims)
        data["options"] = dict(self.options)
        data["metrics"], data["without"] = list(self.metrics), list(self.without)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Case:
        """The case that ``to_json`` wrote."""
        fields = dict(data)
        for name in ("dims", "options"):
            fields[name] = tuple(data[name].items())
        for name in ("metrics", "without"):
            fields[name] = tuple(data.get(name, ()))
        return cls(**fields)
