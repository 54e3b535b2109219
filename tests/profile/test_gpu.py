"""Kernel time on a real device: joined to modules, and complete."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastlinear.profile.capture import profile

pytestmark = pytest.mark.gpu


def model(width, **kwargs):
    layers = []
    for _ in range(3):
        layers += [nn.Linear(width, width, **kwargs), nn.GELU(approximate="tanh")]
    return nn.Sequential(*layers).cuda()


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_kernels_reach_their_modules(mode):
    x = torch.randn(4096, 1024, device="cuda")
    report = profile(model(1024), x, mode)
    print(report.table())
    assert report.device == "cuda:0"
    assert report.attributed >= 0.95, report.unattributed
    own = {(r.fqn, r.direction): r.device_us for r in report.records if r.device_us > 0}
    directions = ["forward", "backward"] if mode == "train" else ["forward"]
    assert set(own) == {(str(i), d) for i in range(6) for d in directions}
    times = sorted(own[str(i), "forward"] for i in (0, 2, 4))
    assert times[2] < 1.5 * times[0]  # equal layers take equal time
    kernels = sum(r.device_us for r in report.records) + sum(us for _, us in report.unattributed)
    assert kernels == pytest.approx(report.device_busy_us, rel=0.05)  # one stream: no overlap
    assert report.device_busy_us <= 1.05 * report.step_us
    codes = {f.code for f in report.findings}
    assert {"linear_activation", "fp32_no_tensor_cores"} <= codes
    assert "launch_bound" not in codes


def test_small_work_is_launch_bound():
    report = profile(model(64), torch.randn(16, 64, device="cuda"))
    found = [f for f in report.findings if f.code == "launch_bound"]
    assert len(found) == 1
    assert found[0].details["share"] > 0.5
    assert "fp32_no_tensor_cores" not in {f.code for f in report.findings}


def test_dimensions_off_the_fast_path():
    layer = nn.Linear(4095, 4095, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(4096, 4095, device="cuda", dtype=torch.bfloat16)
    report = profile(layer, x)
    print([(f.code, f.message) for f in report.findings])
    assert "slow_dims" in {f.code for f in report.findings}
    even = nn.Linear(4096, 4096, device="cuda", dtype=torch.bfloat16)
    report = profile(even, torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16))
    assert report.findings == ()


def test_gpt2_on_the_device():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=100)
    gpt2 = transformers.GPT2Model(config).cuda()
    report = profile(gpt2, {"input_ids": torch.randint(0, 100, (8, 256)).cuda()}, "train")
    print(report.table())
    assert report.attributed >= 0.95, report.unattributed
    assert sum(s.activation == "gelu_tanh" for s in report.sites) == 2
