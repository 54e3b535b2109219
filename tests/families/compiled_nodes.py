"""For tests of what the compiled fast path records and runs."""

from __future__ import annotations

import pytest

from fastlinear.fastpath import autograd_node

needs_nodes = [
    pytest.mark.skipif(autograd_node.reason_not() is not None, reason="no C++ nodes here"),
    pytest.mark.usefixtures("nodes_built"),
]
