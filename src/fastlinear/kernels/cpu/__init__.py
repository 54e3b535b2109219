"""C++ for CPUs."""
