"""Tiny models with random weights, and engines around them: real code from the scheduler to the kernels, no files."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from quire.core.policy import Policy
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.core.swap import SwapCosts
from quire.engine.batch import BatchBuffers, BufferShape
from quire.engine.cache import CacheTensors, lay_out, shape_blocks
from quire.engine.memory import CacheSize
from quire.engine.runner import ModelRunner, StepListener
from quire.engine.torch_runner import TorchRunner
from quire.kernels import Kernels, select_torch
from quire.kernels.arrays import Arrays
from quire.kernels.cache_spec import CacheSpec
from quire.kernels.routing import Routing
from quire.models.config import ExpertsConfig, Gemma4Config, LatentConfig, ModelConfig, Rope
from quire.models.decoder import Decoder
from quire.models.registry import MODELS
from quire.models.structure import Structure
from quire.weights.random_tensors import RandomTensors

CPU = "cpu"
LLAMA = ModelConfig(
    family="llama",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_len=512,
    rope=Rope(8),
    windows=(None,) * 3,
)
CLASSIC = replace(
    LLAMA,
    num_kv_heads=4,
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
    activation="gelu_tanh",
    tie_embeddings=True,
    structure=Structure(norm="layer", norm_bias=True, gated=False),
)
FAMILIES = {
    "llama": LLAMA,
    "mistral": replace(LLAMA, family="mistral", windows=(12,) * 3),
    "qwen2": replace(LLAMA, family="qwen2", attention_bias=True),
    "qwen3": replace(LLAMA, family="qwen3", structure=Structure(qk_norm="head")),
    "gemma3": replace(
        LLAMA, family="gemma3", windows=(9, 9, None), local_rope=Rope(8, 1000.0), activation="gelu_tanh",
        tie_embeddings=True, structure=Structure(qk_norm="head"),
    ),
    "bloom": replace(
        CLASSIC, family="bloom", structure=replace(
            CLASSIC.structure, qkv_groups=4, embedding_norm=True, slopes=(0.25, 0.0625, 0.015625, 0.00390625)
        ),
    ),
    "gpt2": replace(
        CLASSIC, family="gpt2", structure=replace(CLASSIC.structure, qkv_groups=1, transposed=True, num_positions=512)
    ),
}  # fmt: skip


# One of each kind of layer that the families above lack.
MIXTURE = ExpertsConfig(
    Routing(6, 3, normalize=False), intermediate_size=32, layers=(True, False, True), shared_size=64, shared_gate=True
)
CLAMPED = replace(
    MIXTURE, routing=Routing(5, 2), shared_size=0, shared_gate=False, router_bias=True, bias=True,
    activation="clamped_silu", limit=2.0,
)  # fmt: skip
GROUPED = replace(
    MIXTURE,
    routing=Routing(8, 3, "sigmoid", factor=2.5, num_groups=4, top_groups=2, group_scores=2),
    shared_gate=False,
    has_correction=True,
)
SMALL = replace(LLAMA, hidden_size=64, intermediate_size=96, head_dim=16, rope=Rope(16))
MIXTURES = {
    "experts": replace(SMALL, family="qwen2_moe", experts=MIXTURE),
    "sinks": replace(
        SMALL, family="gpt_oss", windows=(9, None, 9), experts=CLAMPED, attention_sinks=True, attention_bias=True,
        output_bias=True,
    ),
    "latent": replace(
        SMALL, family="deepseek", head_dim=80, num_kv_heads=1, rope=Rope(16, interleaved=True), attention_scale=0.2,
        experts=GROUPED, latent=LatentConfig(rank=64, rotated_dim=16, key_dim=32, value_dim=32, query_rank=32),
    ),
    "gemma4": replace(
        SMALL, family="gemma4", num_layers=4, windows=(9, None, 9, None), rope=Rope(32, 1000.0),
        local_rope=Rope(16, 100.0), activation="gelu_tanh", attention_scale=1.0, structure=Structure(qk_norm="head"),
        experts=ExpertsConfig(Routing(6, 2), intermediate_size=32, layers=(True,) * 4, activation="gelu_tanh"),
        gemma4=Gemma4Config(32, 1, keys_are_values=True, num_sharing=2, sharing_size=160, per_layer_size=32,
            per_layer_vocab=97),
    ),
}  # fmt: skip


def tiny_model(config: ModelConfig, seed: int = 0) -> Decoder:
    return MODELS[config.family](config, RandomTensors(seed, torch.float32, CPU), select_torch(CPU))


class TinyEngine:
    """A scheduler and a runner on a tiny model, without clients or text."""

    def __init__(
        self,
        config: ModelConfig = LLAMA,
        *,
        model: Decoder | None = None,
        num_blocks: int = 512,
        block_size: int = 4,
        max_tokens: int = 64,
        max_requests: int = 32,
        policy: Policy | None = None,
        prefix_cache: bool = True,
        ops: Kernels | None = None,
        kv_dtype: str = "float32",
        num_host_blocks: int = 0,
        more_specs: Sequence[CacheSpec] = (),
        tap_layers: Sequence[int] = (),
        listeners: Sequence[StepListener] = (),
        make_cache: Callable[..., CacheTensors] = CacheTensors,
        batch_arrays: Arrays | None = None,
    ) -> None:
        """With `num_host_blocks`, whoever has to make room goes to the host, as far as that has room.

        `more_specs` are kept in the same blocks, in `more_layers`: for a draft model or a head. `make_cache` and
        `batch_arrays` are those of several ranks.
        """
        ops, model = ops or select_torch(CPU), model or tiny_model(config)
        specs = [*model.cache_specs(), *more_specs]
        layout = lay_out(specs, shape_blocks(specs, ops, kv_dtype, block_size))
        self.scheduler = Scheduler(
            num_blocks,
            block_size,
            max_tokens,
            max_requests,
            policy,
            windows=layout.windows,
            num_encoder_groups=layout.num_encoder_groups,
            num_state_groups=layout.num_state_groups,
            prefix_cache=prefix_cache,
            num_host_blocks=num_host_blocks,
            costs=SwapCosts(copy_s=0.0, compute_s=1.0),
        )
        size = CacheSize(num_blocks, block_size, 0, config.max_len, 1)
        cache = make_cache(layout, size, ops.arrays, num_host_blocks, ops.move_kv)
        vocab_size = config.vocab_size
        shape = BufferShape(
            max_tokens, max_requests, config.max_len, layout.windows, block_size, vocab_size,
            batch_arrays or ops.arrays, layout.num_fixed_groups,
        )  # fmt: skip
        self.more_layers = cache.layers[len(model.layers) :]
        del cache.layers[len(model.layers) :]
        self.layers = cache.layers
        recorded = ops.record(model, cache.layers, max_tokens, tap_layers)
        buffers = BatchBuffers(shape)
        self.runner = (ModelRunner if ops.native else TorchRunner)(recorded, cache, buffers, ops, listeners)

    def step(self) -> None:
        if plan := self.scheduler.schedule():
            self.scheduler.commit(plan, self.runner.launch(plan).wait())

    def answer_preempted(self, requests: Sequence[Request], seed: int) -> list[list[int]]:
        """The same, with requests thrown out at random moments."""
        rng = random.Random(seed)
        for request in requests:
            self.scheduler.add(request)
        while self.scheduler.has_work:
            self.step()
            if self.scheduler.running and rng.random() < 0.3:
                self.scheduler._preempt(rng.choice(self.scheduler.running))
        return [request.tokens[request.num_prompt :] for request in requests]

    def answer(self, requests: Sequence[Request]) -> list[list[int]]:
        """Run requests to their end; what each answered."""
        for request in requests:
            self.scheduler.add(request)
        while self.scheduler.has_work:
            self.step()
        return [request.tokens[request.num_prompt :] for request in requests]
