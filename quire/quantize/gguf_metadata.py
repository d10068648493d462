"""The metadata of a GGUF file for a model that comes from a Hugging Face directory.

What is written is read again: a tokenizer that would split the text that comes with quire differently is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quire.bench.compare import BUILT_IN_TEXT
from quire.errors import UnsupportedModel
from quire.layers.rotary import plain_frequencies, stretch_llama3
from quire.models.config import ModelConfig, Rope
from quire.quantize.gguf_writer import entry
from quire.quantize.tensors import Tensor, dense_tensor
from quire.text.tokenizers.gguf import TokenType
from quire.text.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from quire.text.tokenizers.tokenizer import Tokenizer, load_tokenizer

HARD_TEXT = (
    "\n\nIt's  12345 tokens, isn't it?\tÜber-größe: 你好世界 123,456.78 --- x_1+=2;\r\n   } // “quotes” 👍🏽 DON'T "
    "we'll\n"
)
LAST_MERGE = 1e6  # the score of a token that no merge makes: below that of any other


def made_metadata(config: ModelConfig, path: Path, architecture: str) -> dict[str, bytes]:
    """Entries by key."""
    sizes = {f"{architecture}.{key}": value for key, value in sizes_of(config, architecture).items()}
    vocabulary = made_vocabulary(path, config.vocab_size)
    return {
        key: entry(value)
        for key, value in {
            "general.architecture": architecture,
            "general.name": path.name,
            **sizes,
            **vocabulary,
        }.items()
    }


def sizes_of(config: ModelConfig, architecture: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_len,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope.theta,
        "rope.dimension_count": config.rope.dim,
        "vocab_size": config.vocab_size,
    }
    return found | scaling_of(config.rope) | windows_of(config, architecture)


def scaling_of(rope: Rope) -> dict[str, Any]:
    scaling = rope.scaling
    if scaling is None or scaling.kind == "llama3":  # the table of `rope_tensors`
        return {}
    if scaling.kind not in ("linear", "yarn"):
        raise UnsupportedModel(
            f"quire does not write rope scaling {scaling.kind!r} into a GGUF file. Choose a format of a directory."
        )
    found = {"rope.scaling.type": scaling.kind, "rope.scaling.factor": scaling.factor}
    if scaling.kind == "yarn":
        if scaling.attention_factor is not None or not scaling.truncate:
            raise UnsupportedModel(
                "The model's yarn scaling has an attention factor or no rounding, for which GGUF files have no place. "
                "Choose a format of a directory."
            )
        found["rope.scaling.original_context_length"] = scaling.original_max_len
        found |= {"rope.scaling.yarn_beta_fast": scaling.beta_fast, "rope.scaling.yarn_beta_slow": scaling.beta_slow}
    return found


def rope_tensors(rope: Rope) -> dict[str, Tensor]:
    """rope_freqs.weight: GGUF files have llama3's scaling as a divisor for each frequency."""
    scaling = rope.scaling
    if scaling is None or scaling.kind != "llama3":
        return {}
    plain = plain_frequencies(rope.dim, rope.theta)
    stretched = stretch_llama3(
        plain, factor=scaling.factor, original_max_len=scaling.original_max_len,
        low_freq_factor=scaling.low_freq_factor, high_freq_factor=scaling.high_freq_factor,
    )  # fmt: skip
    return {"rope_freqs.weight": dense_tensor((plain / stretched).astype(np.float32), "F32")}


def windows_of(config: ModelConfig, architecture: str) -> dict[str, Any]:
    windows = sorted({window for window in config.windows if window is not None})
    if not windows:
        return {}
    found: dict[str, Any] = {"attention.sliding_window": windows[0]}
    if architecture == "gemma3":
        found["attention.sliding_window_pattern"] = [window is not None for window in config.windows]
        if config.local_rope is not None:
            found["rope.freq_base_swa"] = config.local_rope.theta
    elif None in config.windows or architecture != "llama":
        raise UnsupportedModel(
            f"Some layers have a sliding window, for which a GGUF file of {architecture!r} has no place. Choose a "
            "format of a directory."
        )
    return found


def made_vocabulary(path: Path, vocab_size: int) -> dict[str, Any]:
    tokenizer = load_tokenizer(path)
    document = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    model = document["model"]
    if model.get("type") != "BPE":
        raise UnsupportedModel(
            f"The tokenizer is of the type {model.get('type')}, and quire writes BPE tokenizers into GGUF files only. "
            "Choose a format of a directory."
        )
    tokens, types = tokens_of(document, vocab_size)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    common = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        **named_tokens(path, tokenizer),
    }
    if model.get("byte_fallback"):
        kinds = [
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores_of(tokens, merges), **spaces}
            for spaces in SPACES
        ]
    else:
        kinds = [
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name, "tokenizer.ggml.merges": merges}
            for name in matching_pre_tokenizers(tokenizer)
        ]
    for kind in kinds:
        if same_tokens(tokenizer, common | kind):
            return common | kind
    raise UnsupportedModel(
        "None of the tokenizers that a GGUF file can name splits text as this model's does. Choose a format of a "
        "directory."
    )


SPACES: tuple[dict[str, bool], ...] = (
    {"tokenizer.ggml.add_space_prefix": True},
    {"tokenizer.ggml.add_space_prefix": False},
)


def tokens_of(document: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Texts and types of all ids. Ids that no token has are padding."""
    by_id = {token_id: (text, TokenType.NORMAL) for text, token_id in document["model"]["vocab"].items()}
    if document["model"].get("byte_fallback"):
        by_id |= {i: (text, TokenType.BYTE) for i, (text, _) in by_id.items() if is_byte(text)}
    for added in document.get("added_tokens", ()):
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        by_id[added["id"]] = (added["content"], kind)
    count = max(vocab_size, max(by_id) + 1)
    found = [by_id.get(token_id, (f"[PAD{token_id}]", TokenType.UNUSED)) for token_id in range(count)]
    return [text for text, _ in found], [int(kind) for _, kind in found]


def is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def scores_of(tokens: list[str], merges: list[str]) -> list[float]:
    """A token that an earlier merge makes has a higher score."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", "", 1), rank)
    return [-float(ranks.get(token, LAST_MERGE)) for token in tokens]


def named_tokens(path: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    ids |= {
        key: tokenizer.find_token(tokenizer.special_tokens[name])
        for key, name in (("unknown", "unk_token"), ("padding", "pad_token"))
        if name in tokenizer.special_tokens
    }
    found: dict[str, Any] = {f"tokenizer.ggml.{key}_token_id": value for key, value in ids.items() if value is not None}
    encoded = tokenizer.encode("a")
    found["tokenizer.ggml.add_bos_token"] = bool(encoded) and encoded[0] == tokenizer.bos_token_id
    found["tokenizer.ggml.add_eos_token"] = len(encoded) > 1 and encoded[-1] == tokenizer.eos_token_id
    if tokenizer.chat_template is not None:
        found["tokenizer.chat_template"] = tokenizer.chat_template
    return found


def matching_pre_tokenizers(tokenizer: Tokenizer) -> list[str]:
    """Names whose pre-tokenizer splits a text like the model's. Names of one pre-tokenizer are tried once."""
    own = tokenizer.backend.pre_tokenizer
    text = sample_text()
    wanted = own.pre_tokenize_str(text) if own is not None else None
    found, seen = [], set()
    for name, spec in PRE_TOKENIZERS.items():
        if spec not in seen and spec.pre_tokenizer().pre_tokenize_str(text) == wanted:
            seen.add(spec)
            found.append(name)
    return found


def sample_text() -> str:
    return BUILT_IN_TEXT.read_text(encoding="utf-8") + HARD_TEXT


def same_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> bool:
    made = Tokenizer.from_gguf(metadata)
    return all(made.encode(text) == tokenizer.encode(text) for text in (sample_text(), HARD_TEXT, "a"))
