"""Names of a model's parts as the code that reaches them, for advice that can be pasted."""

from __future__ import annotations

import keyword

from torch import nn

_BY_PLACE = (nn.Sequential, nn.ModuleList, nn.ParameterList)
_BY_KEY = (nn.ModuleDict, nn.ParameterDict)


def in_code(model: nn.Module, name: str, root: str = "model") -> str:
    """The expression that is the module, parameter or buffer of that name.

    >>> in_code(nn.Sequential(nn.Linear(2, 2)), "0.weight")
    'model[0].weight'

    Args:
        model: what the name is looked up in.
        name: as ``named_modules`` and ``named_parameters`` have it; ``""`` is the model.
        root: what the model is called.
    """
    text, holder = root, model
    for part in name.split(".") if name else ():
        text += _step(holder, part)
        holder = getattr(holder, part)
    return text


def _step(holder: nn.Module, part: str) -> str:
    """From what holds it to a part: by place, by key, or by its name."""
    if isinstance(holder, _BY_PLACE) and part.isdecimal():
        place = int(part)
        if place < len(holder) and holder[place] is getattr(holder, part):
            return f"[{place}]"
    if isinstance(holder, _BY_KEY) and part in holder:
        return f"[{part!r}]"
    if part.isidentifier() and not keyword.iskeyword(part):
        return f".{part}"
    kind = "submodule" if part in holder._modules else "parameter"
    kind = "buffer" if part in holder._buffers else kind
    return f".get_{kind}({part!r})"


def in_code_together(model: nn.Module, names: tuple[str, ...], most: int = 8) -> str:
    """Modules as code: the list whose members they are, all of them and in its order; the same
    part of each of its members; or each by itself."""
    for depth in range(names[0].count(".") + 1 if names else 0):
        home, _, rest = _apart(names[0], depth)
        holder = model.get_submodule(home)
        keys = [_apart(name, depth)[1] for name in names]
        if not isinstance(holder, nn.Sequential | nn.ModuleList) or keys != [*holder._modules]:
            continue
        if any(
            _apart(name, depth) != (home, key, rest) for name, key in zip(names, keys, strict=True)
        ):
            continue
        held = in_code(model, home)
        if not rest:
            return held
        ways = {in_code(member, rest, "m") for member in holder}
        if len(ways) == 1:
            return f"[{ways.pop()} for m in {held}]"
    listed = ", ".join(in_code(model, name) for name in names[:most])
    return f"[{listed}{', ...' if len(names) > most else ''}]"


def _apart(name: str, depth: int) -> tuple[str, str, str]:
    """What holds a name's part at that depth, the part, and what follows it."""
    parts = name.split(".")
    return (
        ".".join(parts[:depth]),
        parts[depth] if depth < len(parts) else "",
        ".".join(parts[depth + 1 :]),
    )
