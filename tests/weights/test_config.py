"""Configurations of real models, as they are published, and what must be read from them."""

import contextlib
from array import array

import numpy as np
import pytest

from quire.errors import BadModelFile, UnsupportedModel
from quire.models.config import Rope, RopeScaling
from quire.weights.config import config_from_gguf
from quire.weights.json_config import config_from_json

pytestmark = pytest.mark.cpu

LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
MISTRAL_7B_V01 = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN2_5_05B = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
SMOLLM2_GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 64,
    "tokenizer.ggml.eos_token_id": 2,
}
SMOLLM2_SHAPES = {"token_embd.weight": (49152, 576), "blk.0.attn_q.weight": (576, 576)}
GEMMA3_GGUF = {
    "general.architecture": "gemma3",
    "gemma3.block_count": 18,
    "gemma3.context_length": 32768,
    "gemma3.embedding_length": 640,
    "gemma3.feed_forward_length": 2048,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 1,
    "gemma3.attention.key_length": 256,
    "gemma3.attention.value_length": 256,
    "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma3.attention.sliding_window": 512,
    "gemma3.rope.freq_base": 1000000.0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.eot_token_id": 106,
}
GEMMA3_SHAPES = {"token_embd.weight": (262144, 640)}


def renamed(metadata, architecture):
    """The same metadata under another architecture."""
    old = metadata["general.architecture"]
    moved = {key.replace(f"{old}.", f"{architecture}.", 1): value for key, value in metadata.items()}
    return moved | {"general.architecture": architecture}


def test_llama_3_1():
    config = config_from_json(LLAMA_3_1_8B)
    assert config.family == "llama"
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (4096, 14336, 32)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert (config.vocab_size, config.max_len, config.norm_eps) == (128256, 131072, 1e-5)
    scaling = RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    assert config.rope == Rope(128, 500000.0, scaling=scaling)
    assert config.windows == (None,) * 32
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert not config.tie_embeddings
    assert not config.attention_bias
    assert config.scale == 128**-0.5


def test_mistral_sees_a_window():
    config = config_from_json(MISTRAL_7B_V01)
    assert config.family == "mistral"
    assert config.windows == (4096,) * 32
    assert config.rope == Rope(128)
    assert config_from_json(MISTRAL_7B_V01 | {"sliding_window": None}).windows == (None,) * 32


def test_qwen2_has_biases_and_no_window_unless_it_is_switched_on():
    config = config_from_json(QWEN2_5_05B)
    assert config.family == "qwen2"
    assert (config.attention_bias, config.output_bias, config.tie_embeddings) == (True, False, True)
    assert config.windows == (None,) * 24
    assert config.head_dim == 64
    switched = config_from_json(QWEN2_5_05B | {"use_sliding_window": True, "sliding_window": 4096})
    assert switched.windows == (None,) * 21 + (4096,) * 3
    typed = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 12}
    assert config_from_json(QWEN2_5_05B | typed).windows == (32768, None) * 12


def test_qwen3():
    config = config_from_json(QWEN3_06B)
    assert config.family == "qwen3"
    assert (config.head_dim, config.num_heads, config.hidden_size) == (128, 16, 1024)
    assert config.rope == Rope(128, 1000000.0)
    assert not config.attention_bias
    assert config.tie_embeddings


def test_gemma3_alternates_windows_and_ropes():
    config = config_from_json(GEMMA_3_1B)
    assert config.family == "gemma3"
    assert config.windows == ((512,) * 5 + (None,)) * 4 + (512,) * 2
    assert (config.rope, config.local_rope) == (Rope(256, 1000000.0), Rope(256, 10000.0))
    assert (config.norm_offset, config.tie_embeddings, config.activation) == (True, True, "gelu_tanh")
    assert config.scale == 256**-0.5
    assert config_from_json(GEMMA_3_1B | {"query_pre_attn_scalar": 168}).scale == 168**-0.5


def test_multimodal_gemma3_leaves_its_defaults_out():
    config = config_from_json(GEMMA_3_4B)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_len) == (262208, 131072)
    assert config.rope == Rope(256, 1000000.0, scaling=RopeScaling("linear", 8.0))
    assert config.local_rope == Rope(256, 10000.0)
    assert config.eos_token_ids == (1, 106)


@pytest.mark.parametrize("original", [LLAMA_3_1_8B, MISTRAL_7B_V01, QWEN2_5_05B, QWEN3_06B, GEMMA_3_1B, SMOLLM2_135M])
def test_what_transformers_writes_reads_the_same(original):
    """transformers writes rope_parameters, a rope for each kind of layer, layer types and dtype names of its own."""
    transformers = pytest.importorskip("transformers")
    written = transformers.AutoConfig.for_model(**original).to_dict()
    assert "rope_parameters" in written
    assert "rope_theta" not in written
    assert config_from_json(written) == config_from_json(original)


def test_smollm2_is_the_same_model_in_both_formats():
    config = config_from_json(SMOLLM2_135M)
    packed = config_from_gguf(SMOLLM2_GGUF, SMOLLM2_SHAPES)
    assert packed.rope == Rope(64, 100000.0, interleaved=True)
    assert config.rope == Rope(64, 100000.0)
    ours = {name: getattr(packed, name) for name in packed.__slots__ if name != "rope"}
    assert ours == {name: getattr(config, name) for name in config.__slots__ if name != "rope"}


def test_gemma3_gguf():
    config = config_from_gguf(GEMMA3_GGUF, GEMMA3_SHAPES)
    assert config.windows == ((512,) * 5 + (None,)) * 3
    assert (config.rope, config.local_rope) == (Rope(256, 1000000.0), Rope(256, 10000.0))
    assert (config.norm_offset, config.tie_embeddings, config.activation) == (False, True, "gelu_tanh")
    assert config.scale == 256**-0.5
    assert config.eos_token_ids == (1, 106)
    large = {"gemma3.block_count": 62, "gemma3.embedding_length": 5376, "gemma3.attention.head_count": 32}
    large |= {"gemma3.attention.head_count_kv": 16, "gemma3.attention.key_length": 128}
    large |= {"gemma3.attention.value_length": 128}
    assert config_from_gguf(GEMMA3_GGUF | large, GEMMA3_SHAPES).scale == 168**-0.5


def test_gemma3_gguf_patterns():
    key = "gemma3.attention.sliding_window_pattern"
    assert config_from_gguf(GEMMA3_GGUF | {key: 3}, GEMMA3_SHAPES).windows == (512, 512, None) * 6
    flags = [True, False] * 9
    assert config_from_gguf(GEMMA3_GGUF | {key: flags}, GEMMA3_SHAPES).windows == (512, None) * 9
    with pytest.raises(BadModelFile, match="4 entries for 18 layers"):
        config_from_gguf(GEMMA3_GGUF | {key: flags[:4]}, GEMMA3_SHAPES)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_gguf(architecture):
    shapes = SMOLLM2_SHAPES | {"blk.0.attn_q.bias": (576,), "output.weight": (49152, 576)}
    config = config_from_gguf(renamed(SMOLLM2_GGUF, architecture), shapes)
    assert config.family == architecture
    assert (config.attention_bias, config.output_bias, config.tie_embeddings) == (True, False, False)
    assert not config.rope.interleaved


def test_gguf_llama3_scaling_comes_as_divisors():
    divisors = [1.0 + index / 8 for index in range(32)]
    config = config_from_gguf(SMOLLM2_GGUF, SMOLLM2_SHAPES, divisors)
    assert config.rope == Rope(64, 100000.0, interleaved=True, divisors=tuple(divisors))
    for wrong in (divisors[:-1], [0.0] * 32, [float("nan")] * 32, [float("inf")] * 32):
        with pytest.raises(BadModelFile, match=r"rope_freqs\.weight"):
            config_from_gguf(SMOLLM2_GGUF, SMOLLM2_SHAPES, wrong)


def test_gguf_rope_scaling():
    def scaling(**keys):
        named = {f"llama.rope.scaling.{key}": value for key, value in keys.items()}
        return config_from_gguf(SMOLLM2_GGUF | named, SMOLLM2_SHAPES).rope.scaling

    assert scaling() is None
    assert scaling(type="none", factor=4.0) is None
    assert scaling(factor=0.0) is None
    assert scaling(factor=4.0) == RopeScaling("linear", 4.0)
    assert scaling(type="linear", factor=2.0) == RopeScaling("linear", 2.0)
    assert scaling(type="yarn", factor=4.0, original_context_length=2048) == RopeScaling("yarn", 4.0, 2048)
    assert scaling(type="yarn", factor=4.0, attn_factor=0.5).attention_factor == pytest.approx(0.5 * 1.138629436)
    with pytest.raises(UnsupportedModel, match="longrope"):
        scaling(type="longrope", factor=4.0)
    with pytest.raises(UnsupportedModel, match="yarn_log_multiplier"):
        scaling(type="yarn", factor=4.0, yarn_log_multiplier=0.1)


def test_json_yarn():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert config_from_json(QWEN3_06B | {"rope_scaling": yarn}).rope.scaling == RopeScaling("yarn", 4.0, 32768)
    old = {"type": "yarn", "factor": 4.0, "beta_fast": 64, "attention_factor": 1.5, "truncate": False}
    expected = RopeScaling("yarn", 4.0, 40960, beta_fast=64.0, attention_factor=1.5, truncate=False)
    assert config_from_json(QWEN3_06B | {"rope_scaling": old}).rope.scaling == expected
    mscale = yarn | {"mscale": 2.0, "mscale_all_dim": 1.0}
    ratio = config_from_json(QWEN3_06B | {"rope_scaling": mscale}).rope.scaling.attention_factor
    assert ratio == pytest.approx((0.2 * np.log(4) + 1) / (0.1 * np.log(4) + 1))


@pytest.mark.parametrize("kind", ["dynamic", "su", "mrope"])
def test_unknown_rope_type(kind):
    for parameters in ({"rope_scaling": {"type": kind, "factor": 2.0}}, {"rope_parameters": {"rope_type": kind}}):
        with pytest.raises(UnsupportedModel, match=kind):
            config_from_json(SMOLLM2_135M | parameters)


def test_layers_that_rotate_differently_are_refused_where_the_family_cannot():
    ropes = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(UnsupportedModel, match="rope_parameters"):
        config_from_json(QWEN3_06B | {"rope_parameters": ropes})


def test_unknown_families_are_named_with_what_there_is():
    with pytest.raises(UnsupportedModel, match=r"'mamba'.*llama, mistral, qwen2, qwen3"):
        config_from_json(SMOLLM2_135M | {"model_type": "mamba"})
    with pytest.raises(UnsupportedModel, match=r"'mamba'.*llama, qwen2, qwen3, gemma3"):
        config_from_gguf(renamed(SMOLLM2_GGUF, "mamba"), SMOLLM2_SHAPES)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "relu"}, "relu"),
        ({"model_type": "mistral", "layer_types": ["linear_attention"] * 30}, "linear_attention"),
        ({"model_type": "mistral", "layer_types": [["x"]] * 30}, "layer type"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_json_that_quire_cannot_honour(change, words):
    with pytest.raises(UnsupportedModel, match=words):
        config_from_json(SMOLLM2_135M | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"split.count": 3}, "3 files"),
        (
            {"llama.expert_count": 8, "llama.expert_used_count": 2, "llama.expert_gating_func": 9},
            "expert_gating_func 9",
        ),
        ({"llama.attention.head_count_kv": array("i", [3, 1])}, "layer to layer"),
        ({"llama.attention.value_length": 32}, "values"),
    ],
)
def test_gguf_that_quire_cannot_honour(change, words):
    with pytest.raises(UnsupportedModel, match=words):
        config_from_gguf(SMOLLM2_GGUF | change, SMOLLM2_SHAPES)


def test_experts_of_an_architecture_without_them():
    renamed = {key.replace("llama.", "qwen2."): value for key, value in SMOLLM2_GGUF.items()}
    with pytest.raises(UnsupportedModel, match="mixture of 8 experts"):
        config_from_gguf(renamed | {"general.architecture": "qwen2", "qwen2.expert_count": 8}, SMOLLM2_SHAPES)


SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
WRONG = [0, -1, 1.5, "576", True, [1], 2**31, float("nan")]


@pytest.mark.parametrize("key", [*SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings"])
def test_wrong_sizes_are_named(key):
    for wrong in WRONG:
        with pytest.raises(BadModelFile, match=key):
            config_from_json(SMOLLM2_135M | {key: wrong})


@pytest.mark.parametrize("key", [*SIZES, "max_position_embeddings", "model_type"])
def test_missing_keys_are_named(key):
    with pytest.raises(BadModelFile, match=f"{key} is missing"):
        config_from_json({k: v for k, v in SMOLLM2_135M.items() if k != key})


@pytest.mark.parametrize("key", [key for key in SMOLLM2_GGUF if key.startswith("llama.")])
def test_wrong_gguf_numbers_are_named(key):
    wrongs = ["x", -1, float("nan"), [1]] if "rope.freq" in key or "epsilon" in key else WRONG
    for wrong in wrongs:
        with pytest.raises(BadModelFile, match=key):
            config_from_gguf(SMOLLM2_GGUF | {key: wrong}, SMOLLM2_SHAPES)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 5000}, "num_hidden_layers"),
        ({"num_key_value_heads": 2}, "9 attention heads are not a multiple of 2"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "head_dim is missing"),
        ({"head_dim": 63}, "63 of 63 dimensions"),
        ({"partial_rotary_factor": 2.0}, "128 of 64 dimensions"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_scaling": 3}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": 3}}, "rope_type"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}}, "below"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"eos_token_id": [2, -1]}, "eos_token_id"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"model_type": "gemma3"}, "text_config is missing"),
        ({"model_type": "mistral", "layer_types": ["full_attention"]}, "30 layers"),
        (
            {"model_type": "mistral", "layer_types": ["sliding_attention"] * 30, "sliding_window": None},
            "sliding_window is missing",
        ),
    ],
)
def test_json_that_cannot_be_right(change, words):
    with pytest.raises(BadModelFile, match=words):
        config_from_json(SMOLLM2_135M | change)


WEIRD = [None, "", "x", -1, 0, 3, 2**70, 10**400, 1.5, float("inf"), True, [], [1], {}, {"a": 1}, {"a": {"b": 1}}]
ARRAYS = [array("f"), array("i", [1, 2]), [True, False], ["a", "b"], [array("q", [1])]]


@pytest.mark.parametrize("original", [LLAMA_3_1_8B, MISTRAL_7B_V01, QWEN2_5_05B, QWEN3_06B, GEMMA_3_1B])
def test_weird_json_is_read_or_refused(original):
    extra = ("rope_parameters", "layer_types", "partial_rotary_factor", "sliding_window_pattern")
    for key in [*original, *extra]:
        for weird in WEIRD:
            read_or_refuse(config_from_json, original | {key: weird})
    for key in LLAMA_3_1_8B["rope_scaling"]:
        for weird in WEIRD:
            scaling = LLAMA_3_1_8B["rope_scaling"] | {key: weird}
            read_or_refuse(config_from_json, original | {"rope_scaling": scaling})
            read_or_refuse(config_from_json, original | {"rope_parameters": scaling | {"rope_theta": 1.0}})


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_weird_metadata_is_read_or_refused(architecture):
    metadata = renamed(GEMMA3_GGUF, architecture)
    extra = ("attention.sliding_window_pattern", "rope.scaling.type", "rope.scaling.factor", "expert_count")
    for key in [*metadata, *(f"{architecture}.{key}" for key in extra), "split.count"]:
        for weird in WEIRD + ARRAYS:
            read_or_refuse(config_from_gguf, metadata | {key: weird}, GEMMA3_SHAPES)


def read_or_refuse(read, *arguments):
    with contextlib.suppress(BadModelFile, UnsupportedModel):
        read(*arguments)


def test_gguf_without_an_embedding():
    with pytest.raises(BadModelFile, match=r"token_embd\.weight"):
        config_from_gguf(SMOLLM2_GGUF, {})
