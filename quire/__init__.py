"""quire: an LLM inference and serving engine.

    from quire import LLM, SamplingParams

Names are loaded when they are first used, so `import quire` alone is quick and loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.beam_search import BeamSearchParams
    from quire.config import EngineConfig
    from quire.core.outputs import CompletionOutput, Logprob, RequestOutput
    from quire.core.params import SamplingParams, StructuredOutputs
    from quire.errors import QuireError
    from quire.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "Logprob",
    "QuireError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
]

_HOMES = {
    "LLM": "quire.llm",
    "AsyncLLM": "quire.async_llm",
    "BeamSearchParams": "quire.beam_search",
    "CompletionOutput": "quire.core.outputs",
    "EngineConfig": "quire.config",
    "Logprob": "quire.core.outputs",
    "QuireError": "quire.errors",
    "RequestOutput": "quire.core.outputs",
    "SamplingParams": "quire.core.params",
    "StructuredOutputs": "quire.core.params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
