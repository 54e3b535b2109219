"""For tests of kernels that are written for Hopper."""

from __future__ import annotations

import pytest
import torch

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
hopper_tests = [pytest.mark.gpu, on_hopper]
