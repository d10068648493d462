"""The parameter counts of hub aliases are those of the models' published configurations."""

from __future__ import annotations

import pytest

from quire.store.aliases import ALIASES, HubModel
from quire.store.hub import split_name
from quire.weights.json_config import config_from_json
from quire.weights.loader import count_weights
from tests.tools.tiny_models import cpu_ops

pytestmark = pytest.mark.cpu

KEYS = (
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "tie_word_embeddings",
)  # fmt: skip
CONFIGS = {
    "smollm2:360m": ("llama", 49_152, 960, 32, 15, 5, 64, 2560, True),
    "smollm2:1.7b": ("llama", 49_152, 2048, 24, 32, 32, 64, 8192, True),
    "qwen3:0.6b": ("qwen3", 151_936, 1024, 28, 16, 8, 128, 3072, True),
    "qwen3:1.7b": ("qwen3", 151_936, 2048, 28, 16, 8, 128, 6144, True),
    "qwen3:4b": ("qwen3", 151_936, 2560, 36, 32, 8, 128, 9728, True),
    "qwen2.5:0.5b": ("qwen2", 151_936, 896, 24, 14, 2, 64, 4864, True),
    "qwen2.5:1.5b": ("qwen2", 151_936, 1536, 28, 12, 2, 128, 8960, True),
    "llama3.2:1b": ("llama", 128_256, 2048, 16, 32, 8, 64, 8192, True),
    "llama3.2:3b": ("llama", 128_256, 3072, 28, 24, 8, 128, 8192, True),
    "gemma3:270m": ("gemma3_text", 262_144, 640, 18, 4, 1, 256, 2048, True),
    "gemma3:1b": ("gemma3_text", 262_144, 1152, 26, 4, 1, 256, 6912, True),
    "mistral:7b": ("mistral", 32_768, 4096, 32, 32, 8, 128, 14_336, False),
}


def test_every_hub_alias_is_checked_here():
    assert {name for name, model in ALIASES.items() if isinstance(model, HubModel)} == CONFIGS.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_parameter_count(name):
    model = ALIASES[name]
    config = dict(zip(KEYS, CONFIGS[name], strict=True)) | {"max_position_embeddings": 2048}
    assert isinstance(model, HubModel)
    assert split_name(model.repository) == (model.repository, None)
    assert model.num_params == count_weights(config_from_json(config), cpu_ops())
    assert model.num_duplicate_params in (0, config["vocab_size"] * config["hidden_size"])
