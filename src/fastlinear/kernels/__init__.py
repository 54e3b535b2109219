"""Kernels and launches that several families share.

What backends in each language run from besides their family's folder, for ``Backend.sources``:
"""

CPP_SOURCES = ("kernels/cpu", "activations/cpp.h", "native/cpp_build.py")
CUDA_SOURCES = ("kernels/cuda", "activations/cuda.h", "native/cuda_driver.py")
TRITON_SOURCES = ("kernels/triton", "kernels/row_tiles.py", "activations/triton.py")
