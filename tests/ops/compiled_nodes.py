"""For tests of what the compiled fast path records and runs."""

from __future__ import annotations

import pytest

from fastlinear.ops.common import fastpath_node

needs_nodes = [
    pytest.mark.skipif(fastpath_node.reason_not() is not None, reason="no C++ nodes here"),
    pytest.mark.usefixtures("nodes_built"),
]
