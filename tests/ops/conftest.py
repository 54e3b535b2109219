"""What tests of operations get: the contract of all backends, and the compiled nodes."""

from __future__ import annotations

import pytest
from contract import Contract

from fastlinear.ops.common import fastpath, fastpath_node


@pytest.fixture
def contract() -> Contract:
    """The contract of all backends."""
    return Contract()


@pytest.fixture(scope="session")
def nodes_built() -> None:
    """The compiled fast path and its nodes are loaded."""
    assert fastpath.wait(), fastpath.reason_not()
    assert fastpath_node.wait(), fastpath_node.reason_not()
