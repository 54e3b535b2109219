"""Text of others (names of modules, classes and files, plans) made safe to show."""

from __future__ import annotations

import re
from typing import Any

# Controls but for tab and newline, what changes the direction or is not seen, line separators of
# other kinds, and halves of surrogate pairs, which no file can be given.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def plain(text: str) -> str:
    r"""The text with every such character written as its escape.

    >>> plain("a\x1b[31m b\u202e")
    'a\\x1b[31m b\\u202e'
    """
    return _UNSAFE.sub(_escape, text)


def one_line(text: str) -> str:
    """``plain`` without tabs and newlines."""
    return plain(text).replace("\n", "\\n").replace("\t", "\\t")


def plain_data(data: Any) -> Any:
    """JSON-ready data with ``plain`` texts and keys."""
    if isinstance(data, str):
        return plain(data)
    if isinstance(data, dict):
        return {plain(k) if isinstance(k, str) else k: plain_data(v) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(map(plain_data, data))
    return data


def _escape(found: re.Match[str]) -> str:
    return found.group().encode("unicode_escape").decode()
