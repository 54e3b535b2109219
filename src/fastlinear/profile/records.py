"""What a profile holds: plain, frozen data that any reader can print or store."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

FORMAT = 1
WELL_ATTRIBUTED = 0.95
_PHASES = {
    "(autograd engine)": "what autograd does before its first node runs and after its last",
    "(loss)": "the loss function, its ops and its Python code",
    "(loss, backward)": "the backward of the loss function's ops",
    "(step)": "what runs between forward, loss and backward",
}


@dataclass(frozen=True)
class Record:
    """Time of one kind of op inside one module, per step.

    Attributes:
        fqn: fully qualified name of the innermost module; ``""`` is the model itself.
        module_class: class name of that module.
        op: outermost op or autograd node, for example ``"aten::linear"`` or ``"MmBackward0"``;
            ``"(python)"`` is the module's own time between ops.
        direction: ``"forward"``, ``"backward"`` or ``"other"``.
        calls: how often it ran in one step.
        cpu_us: host time, scaled onto the step time measured without the profiler.
        device_us: time of its kernels on the device's own clock; 0 on a CPU.
    """

    fqn: str
    module_class: str
    op: str
    direction: str
    calls: int
    cpu_us: float
    device_us: float


IN_PLACE = "optimize_ has put it in place"  # in the place of advice


@dataclass(frozen=True)
class Finding:
    """One thing that wastes time, with the arithmetic behind it.

    Attributes:
        code: ``"linear_activation"``, ``"launch_bound"``, ``"launch_bound_region"``,
            ``"pointwise_between"``, ``"fp32_no_tensor_cores"``, ``"slow_dims"``,
            ``"diagonal_linear"``, ``"linear_dropout"``, ``"grouped_linear"``, ``"ragged_linear"``,
            ``"gated_mlp"``, ``"chain_stopped"`` or ``"own_call"``.
        fqn: the module it is about; ``""`` is the whole model.
        title: a few words.
        message: what is slow, why, and what would help.
        measured_us: time spent on it in one step.
        floor_us: the least time the measured ceilings allow for the same work.
        predicted_gain_us: what removing it should save in one step; an estimate.
        flops, bytes: least arithmetic and memory traffic of the work in one step.
        bound: ``"compute"``, ``"memory"`` or ``"launch"``: what limits it.
        details: further facts, all JSON-ready; ``"advice"`` is what to put in its place,
            ``"part_of"`` the module in whose finding the gain is counted, ``"left_alone"`` why
            ``optimize_`` does not do it.
    """

    code: str
    fqn: str
    title: str
    message: str
    measured_us: float
    floor_us: float
    predicted_gain_us: float
    flops: float
    bytes: float
    bound: str
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def untimed(
        cls, code: str, fqn: str, title: str, message: str, details: dict[str, Any]
    ) -> Finding:
        """One that nothing was measured of: its numbers are 0."""
        return cls(code, fqn, title, message, 0.0, 0.0, 0.0, 0.0, 0.0, "memory", details)

    @property
    def advice(self) -> str | None:
        """What the reader is to put in its place; None where nothing is, or ``optimize_`` has."""
        found = self.details.get("advice")
        return None if found in (None, IN_PLACE) else str(found)

    @property
    def part_of(self) -> str | None:
        """The module in whose finding its gain is counted; None where it is counted here."""
        found = self.details.get("part_of")
        return None if found is None else str(found)


@dataclass(frozen=True)
class LinearSite:
    """One Linear-shaped module and what surrounds it in a real run; or a linear that a forward
    writes on parameters (``F.linear``, ``torch.addmm``, a matrix product), under its weight's name.

    Attributes:
        fqn: the Linear's first fully qualified name.
        parent_fqn: the module whose ``forward`` calls it (``""`` is the model); None if never
            called. Not always the owner: a list of layers is called by the module around it.
        kind: ``"linear"`` (weight (N, K)) or ``"conv1d"`` (transformers' Conv1D, weight (K, N)).
        module_class: class name; ``"Parameter"`` of a linear written on parameters.
        in_features, out_features: K and N.
        bias: whether there is one.
        calls: calls in one step.
        shapes: input shapes seen, each (..., K), one entry per different shape.
        rows: M summed over all calls of one step.
        dtype: the input's dtype name; the weight's own where it was never called.
        weight_dtype: the weight's dtype name.
        device: the weight's device.
        input_grad, weight_grad: whether the step computes dx, and dW or db.
        x_layouts: ``"rows"``, ``"rows_odd"`` or ``"strided"`` as in a linear_act Problem, one
            entry per shape; ``"other"`` of sparse and nested inputs, whose shape is ``()``.
        activation: name of the activation right after it, or None.
        activation_fqn: the activation module's name when ``how == "modules"``.
        how: ``"modules"``: the activation is a module called right after; ``"function"``: a
            function or method in the parent's ``forward``; ``"none"``.
        node: the activation as the parent's traced graph writes it, or None.
        code: ``"ok"`` when Linear and activation form one chain with no other reader, else why
            not: ``"no_activation"``, ``"not_called"``, ``"untraceable"``, ``"several_users"``,
            ``"mixed_use"``, ``"several_callers"``, ``"already_fused"``; ``"on_parameters"`` of one
            written on parameters.
        reason: one sentence for the code.
        flags: facts a rewriter must honour: ``"subclass"``, ``"hooks"``, ``"parametrized"``,
            ``"weight_subclass"``, ``"shared_weight"``, ``"patched_forward"``,
            ``"several_names"``, ``"shared_activation"``, ``"activation_hooks"``,
            ``"activation_inplace"``; of one that is not called ``"used_by_parent"`` (its weight is
            multiplied by all the same) and ``"used_as_parameter"`` (and is a site by its name).
    """

    fqn: str
    parent_fqn: str | None
    kind: str
    module_class: str
    in_features: int
    out_features: int
    bias: bool
    calls: int
    shapes: tuple[tuple[int, ...], ...]
    rows: int
    dtype: str
    weight_dtype: str
    device: str
    input_grad: bool
    weight_grad: bool
    x_layouts: tuple[str, ...]
    activation: str | None
    activation_fqn: str | None
    how: str
    node: str | None
    code: str
    reason: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotFollowed:
    """A parameter of two or more dimensions that a step multiplies by in code that is no linear's.

    Attributes:
        fqn: its first name.
        parent_fqn: the module whose own code multiplies by it; ``""`` is the model.
        shape: its shape.
        ops: what multiplies by it, for example ``("aten::addmm",)``.
        calls: how often one forward does.
        flops: of these products in one forward; of one with several parameters, a share by size.
        share: the same over the flops of all products in one forward, 0 to 1.
        code: ``"by_parent"`` (the weight of a layer that is not called), ``"convolution"``,
            ``"pointwise_convolution"`` (a linear over channels), ``"recurrent"``,
            ``"torch_module"`` (code of another layer of PyTorch's), ``"stacked"`` (three or more
            dimensions), ``"part"`` (of it only), ``"computed"`` (what is multiplied by is computed
            from it first), ``"library_op"`` (an op of another library), ``"elementwise"``,
            ``"constant"`` (a product that no input has a part in), ``"compiled_part"`` (scripted
            ones too) or ``"written"`` (anything else).
        reason: one sentence for the code.
        hint: how optimize_ would follow it, or None.
    """

    fqn: str
    parent_fqn: str
    shape: tuple[int, ...]
    ops: tuple[str, ...]
    calls: int
    flops: float
    share: float
    code: str
    reason: str
    hint: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return asdict(self) | {"shape": list(self.shape), "ops": list(self.ops)}


@dataclass(frozen=True)
class ProfileData:
    """What ``profile`` found, as plain data.

    Attributes:
        model_class: class name of the model.
        mode: ``"inference"`` or ``"train"``.
        device: where the model ran.
        step_us: median wall time of one step, measured without the profiler.
        device_busy_us: time per step in which the device ran at least one kernel; on a CPU the
            step time itself.
        records: largest first.
        sites: every Linear-shaped module, in ``named_modules`` order, then the linears written on
            parameters.
        findings: largest predicted gain first.
        attributed: fraction of the time (of kernels on CUDA, of the step on a CPU) that falls
            inside some module, 0 to 1.
        unattributed: (name, microseconds per step) of the rest, largest first.
        environment: versions and device facts.
        not_followed: the parameters of two or more dimensions that a step multiplies by and that
            are no followed site's nor a fastlinear layer's, most flops first.
        unwatched: why that is not known, or None.
    """

    model_class: str
    mode: str
    device: str
    step_us: float
    device_busy_us: float
    records: tuple[Record, ...]
    sites: tuple[LinearSite, ...]
    findings: tuple[Finding, ...]
    attributed: float
    unattributed: tuple[tuple[str, float], ...]
    environment: dict[str, Any] = field(default_factory=dict)
    not_followed: tuple[NotFollowed, ...] = ()
    unwatched: str | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings: where less than 95% of the time falls inside modules, with the largest rest;
        where it is not known which parameters a step multiplies by."""
        unwatched: tuple[str, ...] = ()
        if self.unwatched is not None:
            text = "which parameters a step multiplies by beside the sites is not known: watched"
            unwatched = (f"{text}, the forward raises {self.unwatched}",)
        return (*self._attribution(), *unwatched)

    def _attribution(self) -> tuple[str, ...]:
        if self.attributed >= WELL_ATTRIBUTED:
            return ()
        clock = "kernel time" if self.device.startswith("cuda") else "step"
        text = f"only {self.attributed:.1%} of the {clock} falls inside modules"
        if not self.unattributed:
            return (f"{text}; nothing names the rest",)
        name, us = self.unattributed[0]
        what = _PHASES.get(name)
        text += f"; the largest rest is {name}, {us:.1f} µs"
        text += "" if what is None else f" ({what})"
        others = len(self.unattributed) - 1
        if others:
            text += f", {others} more take {sum(us for _, us in self.unattributed[1:]):.1f} µs"
        if self.mode == "train":
            text += ": the loss and autograd's own work lie outside of the model; "
            text += f"{self.named:.1%} of the {clock} has a name"
        return (text,)

    @property
    def named(self) -> float:
        """Share of the time with a name: a module's, or of a part of the step outside of the model
        (the loss function, its backward, the autograd engine, the Python code between)."""
        known = sum(us for name, us in self.unattributed if name in _PHASES)
        rest = sum(us for _, us in self.unattributed)
        return self.attributed + (1.0 - self.attributed) * (known / rest if rest else 0.0)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict of kind ``"profile"``."""
        data = asdict(self)
        for name in ("records", "sites", "findings"):
            data[name] = list(data[name])
        for site in data["sites"]:
            site["shapes"] = [list(shape) for shape in site["shapes"]]
            site["x_layouts"] = list(site["x_layouts"])
            site["flags"] = list(site["flags"])
        data["not_followed"] = [one.to_json() for one in self.not_followed]
        data["unattributed"] = [[name, us] for name, us in self.unattributed]
        data["notes"] = list(self.notes)
        return {"kind": "profile", "format": FORMAT, **data}
