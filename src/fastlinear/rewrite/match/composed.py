"""The trace of a parent's forward with those of modules that it calls in place of their calls."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Graph, Node


def composed(graph: Graph, blocks: Mapping[str, Graph]) -> Graph:
    """``graph`` with these modules' own forwards in it, names of modules as the parent sees them.

    Args:
        graph: a forward, children as leaves.
        blocks: name inside the parent → the module's forward; it takes one tensor and returns one.
            Blocks of blocks are found by their names inside the parent as well.
    """
    made = Graph()
    _copied(made, graph, "", None, blocks)
    return made


def returned(graph: Graph) -> Node | None:
    """The one value a forward returns, of the one it takes; None where it is any other."""
    given = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in graph.nodes if node.op == "output")
    value = output.args[0]
    return value if isinstance(value, Node) and len(given) == 1 else None


def _copied(
    made: Graph, graph: Graph, path: str, given: Node | None, blocks: Mapping[str, Graph]
) -> Node | None:
    """Put ``graph``, the forward of the module at ``path``, behind what is ``made``; of a block,
    which is given a value, the one it returns."""
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        name = f"{path}.{node.target}" if path else str(node.target)
        if node.op == "placeholder" and given is not None:
            copies[node] = given
        elif node.op == "output" and given is not None:
            return copies[node.args[0]]
        elif node.op == "call_module" and name in blocks:
            value = _copied(made, blocks[name], name, copies[node.args[0]], blocks)
            assert value is not None
            copies[node] = value
        else:
            copies[node] = copy = made.node_copy(node, lambda n: copies[n])
            if node.op in ("call_module", "get_attr"):
                copy.target = name
    return None
