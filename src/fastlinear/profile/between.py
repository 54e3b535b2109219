"""The finding that much of a step is pointwise work between the linears, each op a pass."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from fastlinear.core.cost import Cost, floor_us
from fastlinear.profile.records import Finding, LinearSite, Record
from fastlinear.profile.site_cost import ITEM_BYTES, CeilingsOf, Step

CODE = "pointwise_between"
_SHARE = {"cuda": 0.2, "cpu": 0.3}  # of the time: below this it is not worth a compilation
_NAMED = 3  # ops the message calls by name
_POINTWISE_TEXT = """
    add sub rsub mul div pow sqrt rsqrt exp log sin cos neg abs reciprocal square where masked_fill
    clamp clamp_min clamp_max maximum minimum lerp addcmul addcdiv relu gelu silu sigmoid tanh erf
    mish leaky_relu elu hardtanh hardsigmoid hardswish softplus dropout native_dropout bernoulli
    layer_norm native_layer_norm rms_norm fused_rms_norm group_norm native_group_norm batch_norm
    native_batch_norm cudnn_batch_norm softmax log_softmax mean sum var std norm
    to to_copy type_as float half bfloat16 copy clone contiguous cat stack
"""
_POINTWISE = frozenset(_POINTWISE_TEXT.split())
_BACKWARD = re.compile(r"Backward\d*$")
_CAMEL = re.compile(r"(?<!^)(?=[A-Z])")


def pointwise_between(
    step: Step,
    records: Iterable[Record],
    sites: tuple[LinearSite, ...],
    findings: Iterable[Finding],
    ceilings_of: CeilingsOf,
) -> Finding | None:
    """Pointwise ops, normalizations and copies outside the linears take much of the time (a
    fifth on CUDA, 30% on a CPU), or None.

    Measured: those ops' time, less what the activations take that a linear's own rewrite can fuse.
    Floor: fused completely, what lies between two linears reads the output of one and writes the
    input of the next, once each. The predicted gain is the difference: an upper bound.

    Args:
        step: what is known of the step; times are the device's on CUDA, else the host's.
        records: host and device time by module and op.
        sites: the linears.
        findings: those of activations, whose share is left out.
        ceilings_of: measured limits of the device; asked only for what is found.
    """
    cuda = step.device == "cuda"
    times: Counter[str] = Counter()
    total, calls = 0.0, 0
    linears = {s.fqn for s in sites}
    for r in records:
        us = r.device_us if cuda else r.cpu_us
        total += us
        name = op_name(r.op)
        if name in _POINTWISE and r.fqn not in linears:
            times[name] += us  # type: ignore[assignment]
            calls += r.calls
    fusable = sum(
        f.details["activation_forward_us"] + f.details["activation_backward_us"]
        for f in findings
        if f.code == "linear_activation"
    )
    measured = max(0.0, sum(times.values()) - fusable)
    share = measured / total if total else 0.0
    real = [s for s in sites if s.calls and s.rows and s.dtype in ITEM_BYTES]
    if share < _SHARE[step.device] or not real:
        return None
    passes = 3 if step.mode == "train" else 1  # forward, and for the gradients twice as much
    moved, floor = 0.0, 0.0
    for s in real:
        one = passes * s.rows * (s.in_features + s.out_features) * ITEM_BYTES[s.dtype]
        moved += one
        floor += floor_us(Cost(0.0, one), ceilings_of(s.dtype, step.precision))
    named = ", ".join(f"{name} {us:.0f} µs" for name, us in times.most_common(_NAMED))
    return Finding(
        code=CODE,
        fqn="",
        title=f"Pointwise work between linears: {share:.0%} of the time",
        message=(
            f"{calls} ops, each a pass of its own, take {measured:.0f} µs ({named}). Fused, they "
            f"would move {moved / 1e6:.1f} MB in about {floor:.0f} µs. torch.compile fuses such "
            "ops: optimize_ with Config(compile=True), or --compile."
        ),
        measured_us=measured,
        floor_us=floor,
        predicted_gain_us=max(0.0, measured - floor),
        flops=0.0,
        bytes=moved,
        bound="memory",
        details={"share": share, "ops": calls, "us_by_op": dict(times.most_common())},
    )


def op_name(op: str) -> str:
    """An op's or autograd node's name as the forward op spells it: ``aten::add_`` → ``add``,
    ``NativeLayerNormBackward0`` → ``native_layer_norm``."""
    if op.startswith("aten::"):
        return op.removeprefix("aten::").strip("_")
    if _BACKWARD.search(op):
        return _CAMEL.sub("_", _BACKWARD.sub("", op)).lower()
    return op
