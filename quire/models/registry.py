"""Which class builds which family: `ModelConfig.family` is a key of `MODELS`."""

from __future__ import annotations

from quire.models.gemma3 import Gemma3
from quire.models.llama import Llama
from quire.models.mistral import Mistral
from quire.models.qwen2 import Qwen2
from quire.models.qwen3 import Qwen3

MODELS: dict[str, type[Llama] | type[Gemma3]] = {
    "gemma3": Gemma3,
    "llama": Llama,
    "mistral": Mistral,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
}
