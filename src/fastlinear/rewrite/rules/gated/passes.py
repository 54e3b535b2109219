"""What passes over memory between the products of a gated MLP, and which of it each backend fuses.

Counted are numbers of hidden size for each token, results that the products write there included:
both pre-activations, what the activation and the product of the halves read and write, and in
training what the gradients of these do.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastlinear.families.linear.cpu.onednn import is_post_op
from fastlinear.fastpath import aten_steps

_PRODUCT = (3, 6)  # of the two halves
_GLU = (3, 5)  # both in PyTorch's own glu
LAID_AND_GLU = 7  # forward: halves that are apart laid together, then glu
_EPILOGUES = ("triton", "cuda")
EAGER = "eager"


def moved(
    activation: str,
    backends: Mapping[str, str],
    *,
    train: bool,
    down: bool,
    glu: bool = False,
    opened: int | None = None,
) -> int:
    """Numbers of hidden size that a call reads and writes between its products, for each token.

    Args:
        activation: of the gate.
        backends: piece → backend.
        train: whether a call is differentiated.
        down: whether a down projection follows.
        glu: whether PyTorch's own way is its ``glu``.
        opened: what activation and product read and write forward where they are written out and
            run so; their gradients are then counted as one activation's and one product's.
    """
    total = _forward(activation, backends["forward"], train, glu) if opened is None else 2 + opened
    return total + (_backward(activation, backends["backward"], down, glu) if train else 0)


def words(activation: str, backends: Mapping[str, str], *, train: bool, glu: bool = False) -> str:
    """What is fused, direction by direction."""
    forward = _forward_words(activation, backends["forward"], train, glu)
    if not train:
        return forward
    backend = backends["backward"]
    if backend == EAGER:
        backward = "the gradients are operations of their own"
    elif backend in _EPILOGUES:
        backward = "the gradients of both halves are formed in the epilogue of dy Wd"
    else:
        backward = "the gradients of both halves are formed in one pass"
    return f"{forward}; backward {backward}"


def _forward(activation: str, backend: str, train: bool, glu: bool) -> int:
    own = aten_steps.moved(activation)[0]
    if backend == EAGER:
        return 2 + (_GLU[0] if glu else own + _PRODUCT[0])
    if backend in _EPILOGUES:
        return 3 if train else 1  # training keeps both pre-activations
    if backend == "onednn" and not train:
        return 3 + (0 if _in_epilogue(activation) else own)
    return 2 + _PRODUCT[0]


def _backward(activation: str, backend: str, down: bool, glu: bool) -> int:
    given = 1 if down else 0  # dy Wd, and what the gate lets through for the down weight
    if backend == EAGER:
        own = aten_steps.moved(activation)[1]
        return given + (_GLU[1] if glu else own + _PRODUCT[1])
    return 5 if backend in _EPILOGUES else 5 + 2 * given


def _forward_words(activation: str, backend: str, train: bool, glu: bool) -> str:
    named = activation != "none"
    if backend == EAGER:
        if glu:
            return "glu is one pass already"
        return "nothing is fused" if named else "nothing is fused, nor is there more than a product"
    both = f"{activation} and the product of the halves" if named else "the product of the halves"
    if backend in _EPILOGUES:
        return f"gate and up are one product with {both} in its epilogue"
    if backend == "onednn" and not train:
        if not named:
            return "the product of the halves is in the up projection's epilogue"
        end = "and the product of the halves in the up projection's"
        if _in_epilogue(activation):
            return f"{activation} is in the epilogue of the gate's product {end}"
        return f"{activation} is a pass of its own {end} epilogue"
    return f"{both} are one pass" if named else f"{both} is one pass"


def _in_epilogue(activation: str) -> bool:
    return activation == "none" or is_post_op(activation)
