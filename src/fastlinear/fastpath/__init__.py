"""The C++ fast path: a look-up of prepared calls, and tapes that run without Python."""
