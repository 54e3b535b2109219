"""For tests of what the compiled door records and runs."""

from __future__ import annotations

import pytest

from fastlinear.ops.common import door_node

needs_nodes = [
    pytest.mark.skipif(door_node.reason_not() is not None, reason="no C++ nodes here"),
    pytest.mark.usefixtures("nodes_built"),
]
