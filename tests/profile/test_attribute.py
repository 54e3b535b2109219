"""Events to records, on event lists written by hand."""

from __future__ import annotations

import pytest

from fastlinear.profile.attribute import ENGINE, LOSS_BACKWARD, PYTHON, Owner, attribute
from fastlinear.profile.events import BACKWARD, EVALUATE, LOSS, MODULE, STEP, Event


def op(name, start, end, *, id=0, seq=-1, fwd=0, thread=1):
    return Event("op", name, start, end, thread, id, sequence=seq, forward_thread=fwd)


def forward_events():
    """Step 0–1000; model 10–900 with child fc 100–300 and act 400–500."""
    return [
        op(STEP, 0, 1000, id=1),
        op(MODULE, 10, 900, id=2),
        op(MODULE + "fc", 100, 300, id=3),
        op("aten::linear", 120, 280, id=4, seq=0),
        op("aten::addmm", 150, 250, id=5, seq=1),
        op(MODULE + "act", 400, 500, id=6),
        op("aten::relu", 420, 480, id=7, seq=2),
        op("aten::add", 600, 700, id=8, seq=3),
    ]


def test_self_times_add_up_and_name_the_innermost_module():
    found = attribute(forward_events())
    cpu = {(o.fqn, o.op): t.cpu_ns for o, t in found.times.items()}
    assert cpu == {
        ("", PYTHON): 890 - 200 - 100 - 100,
        ("fc", PYTHON): 200 - 160,
        ("fc", "aten::linear"): 160,  # addmm inside it is part of it
        ("act", PYTHON): 40,
        ("act", "aten::relu"): 60,
        ("", "aten::add"): 100,
    }
    assert sum(cpu.values()) == 890 == found.step_ns
    assert found.fraction(device=False) == 1.0


def test_order_of_events_does_not_matter():
    events = forward_events()
    assert attribute(events[::-1]).times == attribute(events).times


def test_ops_outside_every_module_are_named_and_counted_against():
    events = [op(STEP, 0, 100), op(MODULE, 0, 80), op(LOSS, 80, 100), op("aten::mean", 85, 95)]
    found = attribute(events)
    outside = {o.op: t.cpu_ns for o, t in found.times.items() if o.fqn is None}
    assert outside == {"(loss)": 10, "aten::mean": 10}
    assert found.fraction(device=False) == pytest.approx(0.8)


def test_events_outside_the_step_are_ignored():
    found = attribute([op("aten::zeros", 0, 50), op(STEP, 100, 200), op(MODULE, 100, 200)])
    assert {o.op for o in found.times} == {PYTHON}


def backward_events(thread):
    """act then fc, backwards, then the gradient of a parameter; loss first."""
    return [
        op(LOSS, 905, 950),
        op("aten::mean", 910, 940, seq=4),
        op(BACKWARD, 1000, 2000),
        op(EVALUATE + "MeanBackward0", 1010, 1100, seq=4, fwd=1, thread=thread),
        op(EVALUATE + "ReluBackward0", 1150, 1250, id=20, seq=2, fwd=1, thread=thread),
        op("ReluBackward0", 1160, 1240, id=21, seq=2, fwd=1, thread=thread),
        op("aten::threshold_backward", 1170, 1230, id=22, thread=thread),
        op(EVALUATE + "AddmmBackward0", 1300, 1600, id=23, seq=1, fwd=1, thread=thread),
        op("AddmmBackward0", 1310, 1590, id=24, seq=1, fwd=1, thread=thread),
        op("aten::mm", 1320, 1400, id=25, thread=thread),
        op("aten::mm", 1420, 1500, id=26, thread=thread),
        op(EVALUATE + "torch::autograd::AccumulateGrad", 1620, 1650, id=27, thread=thread),
        op("torch::autograd::AccumulateGrad", 1625, 1645, id=28, thread=thread),
    ]


def train_events(thread):
    events = forward_events()
    events[0] = op(STEP, 0, 2000, id=1)
    return events + backward_events(thread)


def test_backward_follows_sequence_numbers():
    found = attribute(train_events(thread=1))
    back = {
        (o.fqn, o.op): (t.cpu_ns, t.calls)
        for o, t in found.times.items()
        if o.direction in ("backward", LOSS_BACKWARD)
    }
    assert found.times[Owner(None, LOSS_BACKWARD, "MeanBackward0")].cpu_ns == 90
    assert back == {
        (None, "MeanBackward0"): (90, 1),
        (None, ENGINE): (10, 0),
        ("act", "ReluBackward0"): (100, 1),
        ("act", ENGINE): (50, 0),
        ("fc", "AddmmBackward0"): (300, 1),
        ("fc", ENGINE): (50 + 20, 0),
        ("fc", "AccumulateGrad"): (30, 1),
    }
    assert found.times[Owner(None, "other", ENGINE)].cpu_ns == 350  # after the last node
    assert found.total_ns(device=False) == found.step_ns


def test_a_wrong_sequence_number_moves_time_out_of_the_module():
    events = [e for e in train_events(thread=1) if e.sequence != 1 or e.forward_thread]
    found = attribute(events)
    assert Owner(None, "backward", "AddmmBackward0") in found.times


def test_the_last_op_with_a_sequence_number_made_the_node():
    """An op that makes no node carries the number the next one will get."""
    events = [
        op(STEP, 0, 1000),
        op(MODULE, 0, 500),
        op("aten::arange", 10, 20, seq=7),
        op(MODULE + "emb", 100, 200),
        op("aten::embedding", 110, 190, seq=7),
        op(BACKWARD, 600, 900),
        op(EVALUATE + "EmbeddingBackward0", 610, 800, seq=7, fwd=1),
    ]
    found = attribute(events)
    assert found.times[Owner("emb", "backward", "EmbeddingBackward0")].cpu_ns == 190


def test_recomputed_forward_inside_backward_belongs_to_its_module():
    events = [
        op(STEP, 0, 1000),
        op(MODULE, 0, 100),
        op("Checkpoint", 10, 90, seq=0),
        op(BACKWARD, 200, 900),
        op(EVALUATE + "CheckpointBackward", 200, 800, seq=0, fwd=1),
        op(MODULE + "block", 300, 500),
        op("aten::linear", 310, 490, seq=1),
    ]
    found = attribute(events)
    assert found.times[Owner("block", "backward", "aten::linear")].cpu_ns == 180


def cuda_events():
    """The training step with autograd on its own thread, and kernels launched four ways."""
    kernel = [
        Event("device", "addmm_kernel", 3000, 3400, id=901, link=5),  # linked to aten::addmm
        Event("device", "relu_kernel", 3400, 3500, id=902),  # through its runtime call's link
        Event("device", "relu_backward_kernel", 3600, 3700, id=903),  # only by time and thread
        Event("device", "mm_kernel", 3700, 3900, id=904, link=25),
        Event("device", "triton_kernel", 3900, 3950, id=905),  # straight from module fc's Python
        Event("device", "Memcpy HtoD", 3960, 4000, id=999),  # nothing known about it
    ]
    runtime = [
        Event("runtime", "cudaLaunchKernel", 160, 170, 77, id=901, link=5),
        Event("runtime", "cudaLaunchKernel", 430, 440, 77, id=902, link=7),
        Event("runtime", "cudaLaunchKernel", 1180, 1190, 2, id=903),
        Event("runtime", "cuLaunchKernelEx", 285, 290, 1, id=905),
    ]
    return train_events(thread=2) + runtime + kernel


def test_kernels_are_joined_to_modules():
    found = attribute(cuda_events())
    device = {
        (o.fqn, o.direction, o.op): t.device_ns for o, t in found.times.items() if t.device_ns
    }
    assert device == {
        ("fc", "forward", "aten::linear"): 400,
        ("act", "forward", "aten::relu"): 100,
        ("act", "backward", "ReluBackward0"): 100,
        ("fc", "backward", "AddmmBackward0"): 200,
        ("fc", "forward", "triton_kernel"): 50,
        (None, "other", "Memcpy HtoD"): 40,
    }
    assert found.fraction(device=True) == pytest.approx(850 / 890)


def test_waiting_for_autograds_thread_is_not_work():
    found = attribute(cuda_events())
    assert found.waited_ns == 1000
    assert found.times[Owner(None, "other", ENGINE)].cpu_ns == 0


def test_busy_time_is_the_union_of_kernels():
    events = cuda_events() + [Event("device", "overlapping", 3050, 3450, id=906)]
    assert attribute(events).busy_ns() == 500 + 350 + 40
    assert attribute([]).busy_ns() == 0
