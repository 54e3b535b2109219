"""What tests of operations get: the contract of all backends, and the compiled nodes."""

from __future__ import annotations

import pytest
from contract import Contract

from fastlinear.ops.common import door, door_node


@pytest.fixture
def contract() -> Contract:
    """The contract of all backends."""
    return Contract()


@pytest.fixture(scope="session")
def nodes_built() -> None:
    """The compiled door and its nodes are loaded."""
    assert door.wait(), door.reason_not()
    assert door_node.wait(), door_node.reason_not()
