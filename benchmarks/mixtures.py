"""The shapes of mixtures of experts for `gpu.py`, uniform routing, and the limit that follows from the experts that a
step touches.

With random weights a router sends many tokens to the same experts, and batches of 16 and more are faster than with a
trained one. Uniform routing replaces the router's choice, not its product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

BYTES_PER_S = 4.2e12  # of one H200
TOKEN_BYTES = 2  # bfloat16
MAX_TOKENS = 16_384
PLAIN: dict[str, Any] = {
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu",
    "eos_token_id": 1, "bos_token_id": 0,
}  # fmt: skip
DEEPSEEK_V2_LITE = PLAIN | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 102_400, "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "first_k_dense_replace": 1, "topk_method": "greedy", "routed_scaling_factor": 1.0,
    "norm_topk_prob": False, "scoring_func": "softmax", "rope_theta": 10_000.0,
}  # fmt: skip
QWEN3_30B_A3B = PLAIN | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "rope_theta": 1_000_000.0,
}  # fmt: skip
MIXTRAL_8X7B = PLAIN | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096,
    "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 32_000, "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1_000_000.0,
}  # fmt: skip
GPT_OSS_20B = PLAIN | {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "vocab_size": 201_088, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
    "rope_theta": 150_000.0, "rms_norm_eps": 1e-5,
}  # fmt: skip


class Rows(NamedTuple):
    """ms a token at batch 1, 16 and 64, and of a prompt of 8,192 tokens."""

    batches: tuple[float, float, float]
    prefill: float | None = None


class Shapes(NamedTuple):
    """A configuration, and its figures: those of vLLM 0.24.0, measured once on one H200, and the goals."""

    config: dict[str, Any]
    vllm: Rows | None
    goal: Rows
    mxfp4: bool = False  # experts

    @property
    def expert_bytes(self) -> float:
        """Of a weight."""
        return 17 / 32 if self.mxfp4 else TOKEN_BYTES


MODELS = {
    "deepseek-v2-lite": Shapes(DEEPSEEK_V2_LITE, Rows((3.297, 8.071, 10.187), 103.4), Rows((1.9, 7.0, 8.9), 80.0)),
    "qwen3-30b-a3b": Shapes(QWEN3_30B_A3B, Rows((4.336, 12.492, 18.183), 152.7), Rows((2.3, 11.0, 16.7), 120.0)),
    "mixtral-8x7b": Shapes(MIXTRAL_8X7B, Rows((7.954, 22.028, 24.622), 405.4), Rows((6.7, 22.0, 24.0), 370.0)),
    "gpt-oss-20b": Shapes(GPT_OSS_20B, None, Rows((1.6, 4.0, 5.0)), mxfp4=True),
}


def use_mxfp4() -> None:
    """Random experts in MXFP4, as gpt-oss has them: before an engine is built."""
    import torch

    from quire.quant.mxfp4_codes import Mxfp4Codes
    from quire.weights.random_tensors import RandomTensors

    make_dense = RandomTensors.matrix

    def make(self: Any, parts: Any, cols: int) -> Any:
        if not parts[0].expert:
            return make_dense(self, parts, cols)
        weight = Mxfp4Codes(sum(part.rows for part in parts), cols, self.device, self.dtype)
        weight.codes.random_(0, 256)
        weight.scales.fill_(round(127 - 0.5 * torch.tensor(float(cols)).log2().item()) - 1)
        self.nbytes += weight.nbytes
        return weight

    RandomTensors.matrix = make  # type: ignore[method-assign]


class UniformRouting:
    """Takes the place of the op `route`: each layer has random logits of its own, the same in each step."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        """Of layers with experts."""
        self.num_layers, self.num_experts = num_layers, num_experts
        self.routing: Any = None
        self._logits: Any = None
        self._next = 0

    @staticmethod
    def of(config: dict[str, Any]) -> UniformRouting:
        count = next(config[key] for key in ("n_routed_experts", "num_experts", "num_local_experts") if key in config)
        return UniformRouting(config["num_hidden_layers"] - config.get("first_k_dense_replace", 0), count)

    def install(self) -> None:
        """Before an engine is built."""
        from quire.kernels.cuda import exact, ops

        self._route = ops.route
        ops.route = exact.route = self  # type: ignore[assignment]

    def __call__(self, logits: Any, bias: Any, routing: Any) -> Any:
        import torch

        if self._logits is None:
            generator, shape = torch.Generator("cuda").manual_seed(1), (self.num_layers, MAX_TOKENS, self.num_experts)
            self._logits = torch.randn(shape, generator=generator, device="cuda")
        self.routing, layer = routing, self._next
        self._next = (layer + 1) % self.num_layers
        return self._route(self._logits[layer, : len(logits)], None, routing)

    def count_touched(self, batch: int) -> float:
        """The mean number of experts of a layer that a decode step of this many rows touches."""
        counts = [
            len(self._route(logits[:batch], None, self.routing)[0].unique()) for logits in self._logits
        ]  # fmt: skip
        return sum(counts) / len(counts)


def limit_ms(shapes: Shapes, model: Any, weight_bytes: int, touched: float, batch: int, context: int) -> float:
    """Weights that are read and the cache, at BYTES_PER_S. `model` is the ModelConfig."""
    experts, width = model.experts, model.hidden_size
    expert_bytes = 3 * width * experts.intermediate_size * shapes.expert_bytes
    num_layers = sum(experts.layers)
    fixed = weight_bytes - num_layers * experts.routing.num_experts * expert_bytes - model.vocab_size * width * 2
    per_token = model.head_dim if model.latent else 2 * model.num_kv_heads * model.head_dim
    seen = sum(min(context, window or context) for window in model.windows)
    cache = batch * seen * per_token * TOKEN_BYTES
    return 1e3 * (fixed + num_layers * touched * expert_bytes + cache) / BYTES_PER_S
