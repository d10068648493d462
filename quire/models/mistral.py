"""Mistral: a Llama whose layers may see a window of the last tokens only. `ModelConfig.windows` says so."""

from __future__ import annotations

from quire.models.llama import Llama


class Mistral(Llama):
    """A Llama with a window."""
