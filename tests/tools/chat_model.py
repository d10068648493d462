"""A tiny model with a chat template, and a run of `quire train-draft` on it that takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.train.settings import Scale, Settings
from tests.tools.tiny_models import tiny_text_gguf

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCALE = Scale(
    tokens=1500, epochs=2, answer_tokens=24, text_tokens=96, pass_tokens=96, round_questions=16, round_tokens=900,
    batch_dialogues=4, anchor_share=0.5, held_out=8, layers=1,
)  # fmt: skip


def chat_model(path: Path, num_layers: int = 4, template: str | None = TEMPLATE) -> Path:
    """Its distributions are sharp, so what it says can be learned."""
    more = {} if template is None else {"tokenizer.chat_template": template}
    return tiny_text_gguf(path, embedding_scale=0.2, changes={"num_hidden_layers": num_layers}, **more)


def engine_config(model: Path, **changes: Any) -> EngineConfig:
    return EngineConfig.of({"model": str(model), "threads": 1, "max_requests": 8, **changes})


def settings(kind: str, **changes: Any) -> Settings:
    return Settings(**{"kind": kind, "vocabulary": 64, **changes})
