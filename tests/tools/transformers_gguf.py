"""The default model in transformers, read with the `gguf` package: nothing of quire's own reading is involved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def load_llama(path: Path) -> Any:
    """A LlamaForCausalLM in float32 with the weights of a GGUF file."""
    from gguf import GGUFReader, dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = GGUFReader(path)
    field = {name: value.contents() for name, value in reader.fields.items() if name.startswith("llama.")}
    config = LlamaConfig(
        vocab_size=field["llama.vocab_size"],
        hidden_size=field["llama.embedding_length"],
        intermediate_size=field["llama.feed_forward_length"],
        num_hidden_layers=field["llama.block_count"],
        num_attention_heads=field["llama.attention.head_count"],
        num_key_value_heads=field["llama.attention.head_count_kv"],
        max_position_embeddings=field["llama.context_length"],
        rms_norm_eps=field["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": field["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        kind = tensor.name.split(".")[-2]
        state[_canonical(tensor.name)] = _unpermute(values, heads[kind]) if kind in heads else values
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def _canonical(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{NAMES[kind]}.weight"


def _unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """GGUF stores q and k so that rotated pairs are neighbours; transformers pairs the halves of a head."""
    rows, cols = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, cols).transpose(1, 2).reshape(rows, cols)
