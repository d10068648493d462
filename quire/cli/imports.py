"""Quick imports for commands that run a model in their own process."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from quire.config import one_blas_thread

if TYPE_CHECKING:
    from quire.llm import LLM


def import_llm() -> type[LLM]:
    """Import `LLM` and what it needs. Garbage collection would only scan modules, which all stay alive."""
    gc.disable()
    try:
        import_numpy()
        from quire.llm import LLM
    finally:
        gc.enable()
    return LLM


def import_numpy() -> None:
    """Import numpy without threads of its BLAS library.

    quire multiplies with its own kernels. The library would start a thread for each core, and each spins for a while,
    which takes time from the start.
    """
    with one_blas_thread():
        import numpy  # noqa: F401
