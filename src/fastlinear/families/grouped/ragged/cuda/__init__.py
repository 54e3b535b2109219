"""Backend in CUDA C++, for Hopper."""
