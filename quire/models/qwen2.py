"""Qwen2 and Qwen2.5: a Llama with biases on queries, keys and values. `ModelConfig.attention_bias` says so."""

from __future__ import annotations

from quire.models.llama import Llama


class Qwen2(Llama):
    """A Llama with biases."""
