"""Memory of the host: pages that are huge where the system has such."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from quire.kernels.arrays import HUGE_PAGE, NumpyArrays, map_pages

pytestmark = pytest.mark.cpu


class Refusing(mmap.mmap):
    def madvise(self, *arguments: int) -> None:
        raise OSError(22, "Invalid argument")


def check() -> None:
    for size in (1, HUGE_PAGE, HUGE_PAGE + 3):
        pages = map_pages(size, huge=True)
        assert pages.shape == (size,)
        assert pages.ctypes.data % HUGE_PAGE == 0
        assert not pages.any()
        pages[...] = 7
    assert NumpyArrays().map_bytes((3, 5)).tolist() == np.zeros((3, 5)).tolist()


def test_pages() -> None:
    check()


def test_a_system_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    check()


def test_a_kernel_that_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", Refusing)
    check()
