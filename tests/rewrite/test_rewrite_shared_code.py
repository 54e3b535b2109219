"""What the code of a forward shows of writes between the calls of its linears."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastlinear.rewrite.rules.grouped.shared.code import why_not_shared, writes_nothing_between


class Between(nn.Module):
    """Forwards whose code is looked at."""

    q = k = v = torch.relu
    norm = relu_ = q

    def plain(self, x: Tensor) -> Any:
        x = x + 1
        x += 1
        return self.q(x), self.norm(x), self.k(x).view(-1), x.add_(1)

    def adds(self, x: Tensor) -> Any:
        q = self.q(x)
        x += 1
        return q, self.k(x)

    def method(self, x: Tensor) -> Any:
        return self.q(x), x.mul_(2), self.k(x)

    def item(self, x: Tensor) -> Any:
        q = self.q(x)
        x[0] = 1
        return q, self.k(x)

    def out(self, x: Tensor) -> Any:
        return self.q(x), torch.add(x, x, out=x), self.k(x)

    def loop(self, x: Tensor) -> Any:
        found = []
        for _ in range(2):
            x += 1
            found += [self.k(x), self.q(x)]
        return found

    def nested(self, x: Tensor) -> Any:
        return [f(x) for f in (self.q, lambda x: x.add_(1), self.k)]

    def data(self, x: Tensor) -> Any:
        q = self.q(x)
        x.data = x + 1
        return q, self.k(x)


@pytest.mark.parametrize("name", ["plain", "adds", "method", "item", "out", "loop", "nested"])
def test_code_that_writes_between_calls_is_seen(name: str) -> None:
    made = type("Made", (nn.Module,), {"forward": getattr(Between, name)})()
    assert writes_nothing_between(made, ("q", "k")) == (name == "plain")
    assert not writes_nothing_between(made, ("q", "z"))
    assert why_not_shared(made) is None


def test_code_that_names_data_is_left_alone() -> None:
    made = type("Made", (nn.Module,), {"forward": Between.data})()
    why = why_not_shared(made)
    assert why is not None
    assert "data" in why
