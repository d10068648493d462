"""Tiny random models of transformers for every family of `models/transformer.py`, with odd sizes among them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

VOCAB, LENGTH = 97, 64
# The names that most families use, and those of GPT-2.
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
}
GROUPED = {**COMMON, "num_key_value_heads": 2, "tie_word_embeddings": False}
GPT2 = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": LENGTH}
BLOOM = {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 3, "n_head": 4}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 9.0],
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.75,
}
PHI3 = {**GROUPED, "rope_parameters": LONGROPE, "original_max_position_embeddings": 32}
OLMO3_ROPES = {
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.2,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": LENGTH,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@dataclass(frozen=True)
class Case:
    """The names of a configuration and a model in transformers, and the configuration's values."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    head: str = "ForCausalLM"


CASES: dict[str, Case] = {
    "gpt2": Case("GPT2", GPT2, "LMHeadModel"),
    "gpt2-relu": Case("GPT2", {**GPT2, "n_inner": 80, "activation_function": "relu", "n_head": 2}, "LMHeadModel"),
    "gpt2-unscaled": Case("GPT2", {**GPT2, "scale_attn_weights": False}, "LMHeadModel"),
    "gpt2-narrow": Case("GPT2", {**GPT2, "n_embd": 72, "n_head": 3}, "LMHeadModel"),
    "gpt_neox": Case("GPTNeoX", {**COMMON, "rotary_pct": 0.25}),
    "gpt_neox-sequential": Case("GPTNeoX", {**COMMON, "use_parallel_residual": False}),
    "gptj": Case("GPTJ", {**GPT2, "rotary_dim": 8}),
    "falcon-7b": Case(
        "Falcon",
        {**COMMON, "hidden_size": 71 * 16, "num_attention_heads": 71, "num_hidden_layers": 1, "ffn_hidden_size": 64},
    ),
    "falcon-biases": Case("Falcon", {**COMMON, "bias": True, "ffn_hidden_size": 80}),
    "falcon-40b": Case("Falcon", {**COMMON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": Case(
        "Falcon", {**COMMON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}
    ),
    "falcon-alibi": Case(
        "Falcon", {**COMMON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
    ),
    "bloom": Case("Bloom", BLOOM),
    "bloom-odd": Case("Bloom", {**BLOOM, "hidden_size": 96, "n_head": 6}),
    "gpt_bigcode": Case("GPTBigCode", GPT2),
    "gpt_bigcode-heads": Case("GPTBigCode", {**GPT2, "multi_query": False}),
    "starcoder2": Case("Starcoder2", {**GROUPED, "tie_word_embeddings": True}),
    "starcoder2-window": Case("Starcoder2", {**GROUPED, "sliding_window": 9, "use_bias": False}),
    "opt": Case("OPT", {**COMMON, "ffn_dim": 80, "word_embed_proj_dim": 64}),
    "mpt": Case("Mpt", {"vocab_size": VOCAB, "d_model": 96, "n_heads": 6, "n_layers": 3, "max_seq_len": LENGTH}),
    "phi": Case("Phi", {**COMMON, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "phi-narrow": Case(
        "Phi",
        {**COMMON, "hidden_size": 80, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.4}},
    ),
    "phi3": Case("Phi3", {**GROUPED, "sliding_window": 9}),
    "phi3-short": Case("Phi3", {**PHI3, "max_position_embeddings": 32}),
    "phi3-long": Case("Phi3", {**PHI3, "max_position_embeddings": 128}),
    "gemma2": Case(
        "Gemma2",
        {**COMMON, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 16},
    ),
    "gemma2-odd": Case(
        "Gemma2",
        {
            **COMMON,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
        },
    ),
    "glm": Case("Glm", {**GROUPED, "head_dim": 16}),
    "glm4": Case("Glm4", {**GROUPED, "head_dim": 16}),
    "olmo2": Case("Olmo2", GROUPED),
    "olmo3": Case("Olmo3", {**GROUPED, "sliding_window": 9, "num_hidden_layers": 4, "rope_parameters": OLMO3_ROPES}),
    "smollm3": Case("SmolLM3", {**GROUPED, "num_hidden_layers": 4}),
    "granite": Case(
        "Granite",
        {
            **GROUPED,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 8.0,
        },
    ),
    "cohere": Case("Cohere", {**COMMON, "num_key_value_heads": 2, "logit_scale": 0.3}),
    "cohere2": Case("Cohere2", {**COMMON, "num_key_value_heads": 2, "sliding_window": 9, "num_hidden_layers": 4}),
    "ministral": Case(
        "Ministral",
        {
            **GROUPED,
            "head_dim": 16,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral3": Case("Ministral3", {**GROUPED, "head_dim": 16, "rope_parameters": MINISTRAL3_ROPE}),
    "seed_oss": Case("SeedOss", {**GROUPED, "head_dim": 32, "attention_out_bias": True}),
}


@cache
def reference(name: str) -> Any:
    """The model of transformers in float32. Norms are around 1, other weights around 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        case = CASES[name]
        config = getattr(transformers, f"{case.name}Config")(**case.options)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, key, 2)
        # Its eager attention adds ALiBi's bias twice.
        config._attn_implementation = "sdpa" if name == "falcon-alibi" else "eager"
        torch.manual_seed(0)
        model = getattr(transformers, f"{case.name}{case.head}")(config).eval()
    for key, parameter in model.named_parameters():
        one = parameter.dim() == 1 and key.endswith("weight") and case.name != "Gemma2"
        parameter.data.normal_(float(one), 0.2)
    return model


def save(name: str, directory: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference(name).save_pretrained(directory)
    return directory


def expected_logits(name: str, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = reference(name)(tokens[None], use_cache=False).logits[0].float()
    return logits
