"""What tests of operations get: the contract of all backends, and the compiled nodes."""

from __future__ import annotations

import pytest

from fastlinear.fastpath import autograd_node, lookup
from tests.families.contract import Contract


@pytest.fixture
def contract() -> Contract:
    """The contract of all backends."""
    return Contract()


@pytest.fixture(scope="session")
def nodes_built() -> None:
    """The compiled fast path and its nodes are loaded."""
    assert lookup.wait(), lookup.reason_not()
    assert autograd_node.wait(), autograd_node.reason_not()
