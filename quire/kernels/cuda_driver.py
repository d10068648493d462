"""What the CUDA driver says about GPUs, without torch."""

from __future__ import annotations

MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


def find_capability() -> tuple[int, int] | None:
    """The first GPU's compute capability, from the CUDA driver. None if there is no GPU."""
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    driver.cuDeviceGetAttribute(ctypes.byref(major), MAJOR, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), MINOR, device)
    return major.value, minor.value
