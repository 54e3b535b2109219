"""Why a forward cannot be traced, in plain words: what could not be followed, and what to write
instead."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parents[1])
_KNOWN = (  # what the tracer's error says → what the code does, and what to do about it
    (
        ("Proxy object cannot be iterated",),
        "it loops over a tensor or unpacks one{where}; take its parts by index instead, x[:, i]",
    ),
    (
        ("variables cannot be used as inputs to control flow",),
        "it decides by a tensor's values or sizes{where}; decide by what the module keeps, or take "
        "torch.where",
    ),
    (
        ("'len' is not supported",),
        "it asks for a tensor's length{where}; write x.shape[0], or keep the number in the module",
    ),
    (
        ("'Proxy' object cannot be interpreted", "not 'Proxy'"),
        "it makes a number of a tensor's values or sizes{where}; keep the number in the module, or "
        "compute on tensors",
    ),
)
_OF_THE_TRACER = ("Proxy", "proxy", "torch.fx", "symbolic")
_LONGEST = 120


def in_words(error: BaseException) -> str:
    """One sentence without its full stop, of a forward: ``it …``."""
    where = _where(error)
    text = str(error)
    for parts, said in _KNOWN:
        if any(part in text for part in parts):
            return said.format(where=where)
    first = next(iter(text.strip().splitlines()), "")
    told = type(error).__name__
    if first and not any(word in text for word in _OF_THE_TRACER):
        told += f": {first[:_LONGEST]}{'…' if len(first) > _LONGEST else ''}"
    return f"it does what cannot be followed without a run's own values{where} ({told})"


def _where(error: BaseException) -> str:
    """The last line of the model's own code that ran, as far as there is one."""
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith((_TORCH, _OWN, "<"))
    ]
    if not frames:
        return ""
    frame, line = frames[-1]
    name = frame.f_code.co_qualname.rpartition("<locals>.")[2]
    return f" (line {line}, in {name})"
