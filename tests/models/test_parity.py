"""Each family against transformers: tiny random models in float32, in one piece, in chunks and token by token."""

from __future__ import annotations

import pytest
import torch

from tests.models.pair import Case, Pair, draw_tokens, run

pytestmark = pytest.mark.cpu

TOKENS = 45
TOLERANCE = 2e-4
LLAMA = ("LlamaConfig", "LlamaForCausalLM")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
YARN_OPTIONS = {"attention_factor": 1.3, "truncate": False, "beta_fast": 8}
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
GEMMA_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
CASES = {
    "llama2": Case(*LLAMA, {"num_key_value_heads": 6}),
    "llama2-linear": Case(*LLAMA, {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.5}}),
    "llama2-biases": Case(*LLAMA, {"attention_bias": True, "mlp_bias": True}),
    "llama3": Case(*LLAMA, {"head_dim": 16, "rope_parameters": LLAMA3_ROPE}),
    "yarn": Case(*LLAMA, {"rope_parameters": YARN}),
    "yarn-factor": Case(*LLAMA, {"rope_parameters": YARN | YARN_OPTIONS}),
    "smollm2": Case(*LLAMA, {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "mistral": Case("MistralConfig", "MistralForCausalLM", {"sliding_window": 7}),
    "mistral-no-window": Case("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "qwen2": Case("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen2-window": Case(
        "Qwen2Config", "Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    ),
    "qwen3": Case("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 24}),
    "gemma3": Case(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "layer_types": GEMMA_LAYERS,
            "rope_parameters": GEMMA_ROPES,
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
}


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(CASES[request.param])


SCHEDULES = {
    "one chunk": [[(0, TOKENS)]],
    "chunks": [[(0, 5)], [(0, 1)], [(0, 16)], [(0, 3)], [(0, TOKENS - 25)]],
    "token by token": [[(0, 1)]] * TOKENS,
    "mixed rows": [[(0, 8), (1, 1)], [(1, 12), (0, 1)], [(0, 1), (1, 1)], [(1, 31), (0, 20)], [(0, 15)]],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@torch.inference_mode()
def test_logits_are_those_of_transformers(pair: Pair, schedule: str) -> None:
    steps = SCHEDULES[schedule]
    tokens = {
        sequence: draw_tokens(TOKENS, sequence) for sequence in {sequence for rows in steps for sequence, _ in rows}
    }
    for sequence, logits in run(pair.ours, pair.config, tokens, steps).items():
        torch.testing.assert_close(logits, pair.expected(tokens[sequence]), atol=TOLERANCE, rtol=0)


def test_every_tensor_is_asked_for(pair: Pair) -> None:
    tied = {"lm_head.weight"} if pair.config.tie_embeddings else set()
    assert pair.source.left_over == tied
