"""The command line. Each command parses its arguments and calls one function of the library.

Exit codes: 0 done, 2 usage or bad input, 3 numerics failed, 4 nothing profitable, 5 unsupported
environment, 130 interrupted, 1 anything unforeseen.
"""

from fastlinear.cli.app import app, main

__all__ = ["app", "main"]
