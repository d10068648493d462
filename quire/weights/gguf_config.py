"""ModelConfig from the metadata of a GGUF file.

The metadata is not complete: some values follow from the architecture, from the set of tensors and from their shapes.
`config.py` reads the file.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from quire.models.config import ModelConfig, Rope
from quire.weights.fields import Fields, check_heads, default_head_dim
from quire.weights.gguf_experts import (
    read_deepseek,
    read_gpt_oss,
    read_granitemoe,
    read_mixtral,
    read_olmoe,
    read_qwen2moe,
    read_qwen3moe,
)
from quire.weights.gguf_families import GGUF_FAMILIES
from quire.weights.gguf_gemma4 import read_gemma4
from quire.weights.rope import rope_from_gguf
from quire.weights.sampling import sampling_from_gguf

MAX_LAYERS = 4096
GEMMA3_PATTERN = 6  # every sixth layer has full attention
GEMMA3_27B_LAYERS = 62
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

Shapes = Mapping[str, tuple[int, ...]]


def config_from_gguf(
    metadata: Mapping[str, Any],
    shapes: Shapes,
    divisors: Sequence[float] | None = None,
    *,
    where: str = "the GGUF file",
) -> ModelConfig:
    """From metadata and the tensors' shapes; `divisors` are the values of rope_freqs.weight, if the file has it."""
    general = Fields(metadata, where)
    architecture = general.text("general.architecture")
    read = ARCHITECTURES.get(architecture)
    if read is None:
        raise general.unsupported(
            f"architecture {architecture!r} is not supported; quire has {', '.join(ARCHITECTURES)}."
        )
    if general.count("split.count", 1, least=0) > 1:
        raise general.unsupported(
            f"this is one of {metadata['split.count']} files of a split model. Merge them into one file first."
        )
    fields = Fields(metadata, where, f"{architecture}.")
    if architecture not in EXPERT_ARCHITECTURES and fields.count("expert_count", 0, least=0):
        raise fields.unsupported(
            f"it is a mixture of {fields.get('expert_count')} experts, which quire does not support in architecture "
            f"{architecture!r}."
        )
    sampling = sampling_from_gguf(metadata, where)
    return replace(read(fields, shapes, divisors), eos_token_ids=eos_token_ids(general), sampling=sampling)


def read_llama(fields: Fields, shapes: Shapes, divisors: Sequence[float] | None) -> ModelConfig:
    """Converters permute this architecture's queries and keys so that neighbouring dimensions rotate together."""
    if fields.count("expert_count", 0, least=0):
        return read_mixtral(fields, shapes, plain_config(fields, shapes, "mixtral", divisors, interleaved=True))
    config = plain_config(fields, shapes, "llama", divisors, interleaved=True)
    return replace(config, windows=(read_window(fields),) * config.num_layers)


def read_qwen2(fields: Fields, shapes: Shapes, divisors: Sequence[float] | None) -> ModelConfig:
    return plain_config(fields, shapes, "qwen2", divisors)


def read_qwen3(fields: Fields, shapes: Shapes, divisors: Sequence[float] | None) -> ModelConfig:
    config = plain_config(fields, shapes, "qwen3", divisors)
    return replace(config, structure=replace(config.structure, qk_norm="head"))


def read_gemma3(fields: Fields, shapes: Shapes, divisors: Sequence[float] | None) -> ModelConfig:
    """GGUF files store norm weights with the 1 added. Only the 27B model's attention scale is not head_dim ** -0.5."""
    config = plain_config(fields, shapes, "gemma3", divisors, theta=1e6)
    large = config.num_layers == GEMMA3_27B_LAYERS
    return replace(
        config,
        local_rope=Rope(dim=config.rope.dim, theta=fields.number("rope.freq_base_swa", 10_000.0)),
        windows=gemma_windows(fields, config.num_layers),
        activation="gelu_tanh",
        attention_scale=(config.hidden_size / config.num_heads) ** -0.5 if large else None,
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        structure=replace(config.structure, qk_norm="head"),
    )


def plain_config(
    fields: Fields,
    shapes: Shapes,
    family: str,
    divisors: Sequence[float] | None,
    *,
    theta: float = 10_000.0,
    interleaved: bool = False,
    eps_key: str = "attention.layer_norm_rms_epsilon",
) -> ModelConfig:
    """The values that all architectures share. `theta` is the default of rope.freq_base."""
    num_heads, hidden_size = fields.count("attention.head_count"), fields.count("embedding_length")
    num_layers, max_len = fields.count("block_count", most=MAX_LAYERS), fields.count("context_length")
    head_dim = fields.count("attention.key_length", default_head_dim(hidden_size, num_heads))
    if fields.count("attention.value_length", head_dim) != head_dim:
        raise fields.unsupported("its values and keys have different head sizes, which quire does not support.")
    return ModelConfig(
        family=family,
        vocab_size=vocab_size(fields, shapes),
        hidden_size=hidden_size,
        intermediate_size=fields.count("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=check_heads(fields, num_heads, fields.count("attention.head_count_kv", num_heads)),
        head_dim=head_dim,
        max_len=max_len,
        rope=rope_from_gguf(
            fields, head_dim=head_dim, max_len=max_len, theta=theta, interleaved=interleaved, divisors=divisors
        ),
        windows=(None,) * num_layers,
        norm_eps=fields.number(eps_key),
        tie_embeddings="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes or "blk.0.attn_qkv.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_down.bias" in shapes,
    )


ARCHITECTURES: dict[str, Callable[[Fields, Shapes, Sequence[float] | None], ModelConfig]] = {
    "llama": read_llama,
    "qwen2": read_qwen2,
    "qwen3": read_qwen3,
    "gemma3": read_gemma3,
    "gemma4": lambda fields, shapes, divisors: read_gemma4(plain_config, gemma_windows, fields, shapes, divisors),
    **{architecture: partial(read, plain_config) for architecture, read in GGUF_FAMILIES.items()},
    "qwen2moe": lambda fields, shapes, divisors: read_qwen2moe(
        fields, shapes, plain_config(fields, shapes, "qwen2_moe", divisors)
    ),
    "qwen3moe": lambda fields, shapes, divisors: read_qwen3moe(
        fields, shapes, plain_config(fields, shapes, "qwen3_moe", divisors)
    ),
    "olmoe": lambda fields, shapes, divisors: read_olmoe(
        fields, shapes, plain_config(fields, shapes, "olmoe", divisors)
    ),
    "deepseek2": lambda fields, shapes, divisors: read_deepseek(
        fields, shapes, lambda own: plain_config(own, shapes, "deepseek", divisors, interleaved=True)
    ),
    "gpt-oss": lambda fields, shapes, divisors: read_gpt_oss(
        fields, shapes, plain_config(fields, shapes, "gpt_oss", divisors)
    ),
    "granitemoe": lambda fields, shapes, divisors: read_granitemoe(
        fields, shapes, plain_config(fields, shapes, "granitemoe", divisors, interleaved=True)
    ),
}
EXPERT_ARCHITECTURES = ("llama", "qwen2moe", "qwen3moe", "olmoe", "gpt-oss", "deepseek2", "granitemoe", "gemma4")


def vocab_size(fields: Fields, shapes: Shapes) -> int:
    """The number of rows of the embedding, which every file has."""
    shape = shapes.get("token_embd.weight")
    if shape is None or len(shape) != 2:
        raise fields.bad("it has no token_embd.weight of two dimensions")
    return shape[0]


def read_window(fields: Fields) -> int | None:
    return fields.count("attention.sliding_window", 0, least=0) or None


def gemma_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """The pattern is a period, or a bool for each layer that is true if the layer has a window."""
    window, pattern = read_window(fields), fields.get("attention.sliding_window_pattern")
    is_list = isinstance(pattern, list) and all(type(local) is bool for local in pattern)
    if not is_list and not isinstance(pattern, array):
        period = fields.count("attention.sliding_window_pattern", GEMMA3_PATTERN)
        return tuple(window if (index + 1) % period else None for index in range(num_layers))
    if len(pattern) != num_layers:
        raise fields.bad(f"attention.sliding_window_pattern has {len(pattern)} entries for {num_layers} layers")
    return tuple(window if local else None for local in pattern)


def eos_token_ids(general: Fields) -> tuple[int, ...]:
    """The tokens that end an answer: end of sequence, of turn and of message."""
    tokens = [token for key in EOS_KEYS for token in general.token_ids(f"tokenizer.ggml.{key}")]
    return tuple(dict.fromkeys(tokens))
