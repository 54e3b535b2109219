"""More of the CUDA driver for kernels of large clusters, on top of cuda_driver."""

from __future__ import annotations

from fastlinear.native import cuda_driver as driver

_NON_PORTABLE_CLUSTER = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
PORTABLE_CLUSTER = 8
"""Blocks of the largest cluster that every device with clusters accepts."""


def allow_cluster(kernel: driver.Kernel, cluster: int) -> None:
    """Let ``kernel`` be launched in clusters of ``cluster`` blocks, 16 at most.

    Raises:
        DriverError: the driver refuses.
    """
    if cluster > PORTABLE_CLUSTER:
        driver._check(
            driver._driver().cuKernelSetAttribute(
                _NON_PORTABLE_CLUSTER, 1, kernel.handle, kernel.device
            ),
            "cuKernelSetAttribute(non-portable cluster)",
        )
