"""What the CUDA driver says about GPUs, without torch."""

from __future__ import annotations

from typing import Any

MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


def load_driver() -> Any | None:
    """The CUDA driver, ready to be called. None if there is none, or it finds no GPU."""
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return None if driver.cuInit(0) else driver


def count_devices() -> int:
    """How many GPUs there are."""
    import ctypes

    count = ctypes.c_int()
    driver = load_driver()
    return 0 if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value


def find_capability() -> tuple[int, int] | None:
    """The first GPU's compute capability. None if there is no GPU."""
    import ctypes

    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    driver = load_driver()
    if driver is None or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    driver.cuDeviceGetAttribute(ctypes.byref(major), MAJOR, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), MINOR, device)
    return major.value, minor.value
