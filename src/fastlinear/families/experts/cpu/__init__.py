"""Backends in C++ for CPUs."""
