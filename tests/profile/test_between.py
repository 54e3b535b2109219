"""Pointwise work between the linears: what counts, when it is a finding, what it could save."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastlinear.core.cost import Ceilings
from fastlinear.profile.between import CODE, op_name, pointwise_between
from fastlinear.profile.records import Finding, LinearSite, Record
from fastlinear.profile.site_cost import Step

STEP = Step("inference", "cuda", 1000.0, 500.0, "highest", 0.0)
SITE = LinearSite(
    fqn="fc",
    parent_fqn="",
    kind="linear",
    module_class="Linear",
    in_features=100,
    out_features=300,
    bias=True,
    calls=1,
    shapes=((50, 100),),
    rows=50,
    dtype="float32",
    weight_dtype="float32",
    device="cuda",
    input_grad=False,
    weight_grad=False,
    x_layouts=("rows",),
    activation=None,
    activation_fqn=None,
    how="none",
    node=None,
    code="no_activation",
    reason="",
)


def record(fqn: str, op: str, device_us: float, cpu_us: float = 1.0) -> Record:
    return Record(fqn, "X", op, "forward", 2, cpu_us, device_us)


RECORDS = (
    record("fc", "aten::linear", 60.0),
    record("fc", "aten::add", 30.0),  # inside the linear: its own
    record("norm", "aten::layer_norm", 40.0),
    record("", "aten::add_", 20.0),
    record("", "AddBackward0", 10.0),
    record("", "aten::scaled_dot_product_attention", 40.0),
)


def found(records: tuple[Record, ...] = RECORDS, step: Step = STEP, **more: Any) -> Finding | None:
    sites, findings = more.get("sites", (SITE,)), more.get("findings", ())
    return pointwise_between(step, records, sites, findings, lambda *_: Ceilings(1e12, 1e10))


def test_what_counts_and_what_it_could_save() -> None:
    finding = found()
    assert finding is not None
    assert (finding.code, finding.fqn, finding.bound) == (CODE, "", "memory")
    assert finding.measured_us == 70.0
    assert finding.details["share"] == pytest.approx(70 / 200)
    assert finding.details["us_by_op"] == {"layer_norm": 40.0, "add": 30.0}
    assert finding.details["ops"] == 6
    assert finding.bytes == 50 * (100 + 300) * 4
    assert finding.floor_us == pytest.approx(50 * 400 * 4 / 1e10 * 1e6)
    assert finding.predicted_gain_us == pytest.approx(70 - 8)
    train = found(step=replace(STEP, mode="train"))
    assert train is not None
    assert train.bytes == 3 * finding.bytes


def test_activations_that_a_linear_can_fuse_do_not_count() -> None:
    details = {"activation_forward_us": 20.0, "activation_backward_us": 5.0}
    fused = Finding("linear_activation", "fc", "", "", 0, 0, 0, 0, 0, "memory", details)
    finding = found(findings=(fused,))
    assert finding is not None
    assert finding.measured_us == 45.0
    assert (
        found(findings=(replace(fused, details={**details, "activation_forward_us": 40.0}),))
        is None
    )


def test_a_share_below_which_nothing_is_found() -> None:
    heavy = (*RECORDS, record("", "aten::matmul", 200.0))
    assert found(heavy) is None
    assert found(sites=()) is None
    assert found((), sites=(SITE,)) is None
    # on a CPU the host's time counts, and more is asked
    cpu = replace(STEP, device="cpu")
    assert found(step=cpu) is not None  # 3 of 6
    assert found((*RECORDS, record("", "aten::mm", 0.0, 5.0)), step=cpu) is None  # 3 of 11
    assert found((*RECORDS, record("", "aten::mm", 0.0, 3.0)), step=cpu) is not None  # 3 of 9


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("aten::add_", "add"),
        ("aten::_softmax", "softmax"),
        ("NativeLayerNormBackward0", "native_layer_norm"),
        ("GeluBackward0", "gelu"),
        ("(python)", "(python)"),
    ],
)
def test_names(op: str, name: str) -> None:
    assert op_name(op) == name
