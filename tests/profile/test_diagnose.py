"""Findings from hand-made records: what is reported, what is not, and the arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastlinear.core.cost import Ceilings, Cost
from fastlinear.profile.diagnose import Step, diagnose, linear_cost
from fastlinear.profile.records import LinearSite, Record
from fastlinear.profile.sites import Share

M, K, N = 1024, 512, 2048
SITE = LinearSite(
    fqn="fc",
    parent_fqn="",
    kind="linear",
    module_class="Linear",
    in_features=K,
    out_features=N,
    bias=True,
    calls=1,
    shapes=((M, K),),
    rows=M,
    dtype="float32",
    weight_dtype="float32",
    device="cuda:0",
    input_grad=True,
    weight_grad=True,
    x_layouts=("rows",),
    activation=None,
    activation_fqn=None,
    how="none",
    node=None,
    code="no_activation",
    reason="",
)
FUSED = replace(SITE, activation="gelu", activation_fqn="act", how="modules", code="ok")
SHARES = {"fc": Share("act", None, 1.0)}
CUDA = Step("inference", "cuda", step_us=1000, busy_us=950, precision="high", op_us=0)


def ceilings(dtype, precision):
    """1 TB/s; 100 Tflop/s, or 20 for float32 under "highest"."""
    slow = (dtype, precision) == ("float32", "highest")
    return Ceilings(20e12 if slow else 100e12, 1e12)


def record(fqn, us, op="aten::linear", direction="forward", cpu=0.0):
    return Record(fqn, "Linear", op, direction, 1, cpu, us)


def find(step, records, site, shares=SHARES):
    return {f.code: f for f in diagnose(step, tuple(records), (site,), shares, ceilings)}


def test_cost():
    forward = linear_cost(SITE, "inference")
    assert forward == Cost(2.0 * M * N * K, 4 * (M * K + N * K + N + M * N))
    assert linear_cost(SITE, "train").flops == 3 * forward.flops
    first = replace(SITE, input_grad=False)
    assert linear_cost(first, "train").flops == 2 * forward.flops
    frozen = replace(first, weight_grad=False)
    assert linear_cost(frozen, "train") == forward
    extra = linear_cost(FUSED, "train").bytes - linear_cost(SITE, "train").bytes
    assert extra == 4 * 2 * M * N  # the pre-activation, written and read


def test_a_healthy_linear_yields_nothing():
    assert find(CUDA, [record("fc", 30)], SITE) == {}


def test_linear_activation_in_inference_saves_the_whole_activation():
    found = find(CUDA, [record("fc", 30), record("act", 12, "aten::gelu")], FUSED)
    finding = found["linear_activation"]
    assert set(found) == {"linear_activation"}
    assert finding.measured_us == 42
    assert finding.predicted_gain_us == 12
    assert finding.floor_us == pytest.approx(2 * M * N * K / 100e12 * 1e6)
    assert finding.bound == "compute"
    assert (finding.flops, finding.fqn) == (2.0 * M * N * K, "fc")


def test_linear_activation_never_gains_below_the_floor():
    finding = find(CUDA, [record("fc", 15), record("act", 12)], FUSED)["linear_activation"]
    assert finding.predicted_gain_us == pytest.approx(27 - finding.floor_us)


def test_linear_activation_in_training_keeps_the_pass_it_must():
    step = replace(CUDA, mode="train")
    records = [
        record("fc", 100),
        record("act", 20, "aten::gelu"),
        record("act", 25, "GeluBackward0", "backward"),
    ]
    one_pass = 4 * M * N / 1e12 * 1e6
    gelu = find(step, records, FUSED)["linear_activation"]
    assert gelu.measured_us == 145
    assert gelu.predicted_gain_us == pytest.approx(20 - one_pass + one_pass)
    relu = find(step, records, replace(FUSED, activation="relu"))["linear_activation"]
    assert relu.predicted_gain_us == pytest.approx(20 + one_pass)


def test_a_shared_activation_is_charged_by_share():
    shares = {"fc": Share("act", None, 0.25)}
    found = find(CUDA, [record("fc", 30), record("act", 12)], FUSED, shares)
    assert found["linear_activation"].predicted_gain_us == 3


def test_a_function_is_looked_up_in_its_parent():
    site = replace(FUSED, activation_fqn=None, how="function")
    records = [
        record("fc", 30),
        record("", 9, "aten::gelu"),
        record("", 50, "aten::add"),
    ]
    found = find(CUDA, records, site, {"fc": Share("", "gelu", 1.0)})
    assert found["linear_activation"].predicted_gain_us == 9


def test_float32_without_tensor_cores():
    step = replace(CUDA, precision="highest")
    finding = find(step, [record("fc", 120)], SITE)["fp32_no_tensor_cores"]
    fast = 2 * M * N * K / 100e12 * 1e6
    assert finding.predicted_gain_us == pytest.approx(120 - fast / 0.7)
    assert find(CUDA, [record("fc", 120)], SITE) == {}
    assert find(replace(step, device="cpu"), [record("fc", 120, cpu=120)], SITE) == {}
    half = replace(SITE, dtype="bfloat16")
    assert find(step, [record("fc", 120)], half) == {}
    small = replace(SITE, rows=16)
    assert find(step, [record("fc", 60)], small) == {}, "a tiny problem is not rate-limited"


def test_slow_dimensions():
    odd = replace(SITE, in_features=511, dtype="bfloat16")
    finding = find(CUDA, [record("fc", 120)], odd)["slow_dims"]
    assert 0 < finding.predicted_gain_us < 120
    assert "K is no multiple of 8" in finding.message
    assert find(CUDA, [record("fc", 22)], odd) == {}, "fast enough: not worth a word"
    assert find(CUDA, [record("fc", 120)], replace(odd, dtype="float32")) == {}
    even = replace(SITE, dtype="bfloat16")
    assert find(CUDA, [record("fc", 120)], even) == {}


def test_launch_bound_on_cuda():
    step = replace(CUDA, busy_us=600)
    finding = find(step, [record("fc", 30)], SITE)["launch_bound"]
    assert (finding.predicted_gain_us, finding.bound, finding.fqn) == (400, "launch", "")
    assert finding.details["share"] == pytest.approx(0.4)
    assert find(replace(CUDA, busy_us=750), [record("fc", 30)], SITE) == {}


def test_launch_bound_on_a_cpu():
    step = Step("inference", "cpu", step_us=100, busy_us=100, precision="highest", op_us=5)
    records = [record("fc", 0, cpu=10, op=f"aten::op{i}") for i in range(8)]
    records.append(record("fc", 0, cpu=10, op="(python)"))
    finding = find(step, records, SITE)["launch_bound"]
    assert finding.predicted_gain_us == 8 * 5
    assert find(replace(step, op_us=2), records, SITE) == {}


@pytest.mark.parametrize(
    ("code", "step", "site", "us"),
    [
        ("linear_activation", CUDA, FUSED, 30),
        ("fp32_no_tensor_cores", replace(CUDA, precision="highest"), SITE, 120),
        ("slow_dims", CUDA, replace(SITE, in_features=511, dtype="bfloat16"), 120),
        ("launch_bound", replace(CUDA, busy_us=600), SITE, 30),
    ],
)
def test_every_kind_of_finding_carries_its_arithmetic(code, step, site, us):
    finding = find(step, [record("fc", us), record("act", 12, "aten::gelu")], site)[code]
    cost = linear_cost(site, step.mode)
    assert (finding.flops, finding.bytes) == (cost.flops, cost.bytes)
    limits = ceilings(site.dtype, step.precision)
    compute, memory = cost.flops / limits.flops_per_s, cost.bytes / limits.bytes_per_s
    assert finding.floor_us == pytest.approx(1e6 * max(compute, memory))
    named = {"launch"} if code == "launch_bound" else {"compute" if compute >= memory else "memory"}
    assert finding.bound in named
    assert 0 < finding.predicted_gain_us <= finding.measured_us
    assert finding.floor_us <= finding.measured_us


def test_largest_gain_first():
    step = replace(CUDA, busy_us=600, precision="highest")
    records = [record("fc", 120), record("act", 12)]
    found = diagnose(step, tuple(records), (FUSED,), SHARES, ceilings)
    gains = [f.predicted_gain_us for f in found]
    assert gains == sorted(gains, reverse=True)
    assert len(found) == 3


def test_sites_that_never_run_are_left_out():
    idle = replace(FUSED, calls=0, rows=0, code="not_called")
    assert find(CUDA, [], idle) == {}
