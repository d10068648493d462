"""What a model takes in an engine of given options, from its headers: no weights are read and no engine is built.

`quire plan` and `quire advise` call this. `build.py` decides the same things with a model in memory; a test holds the
two against each other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.capacity.memory import longest_request
from quire.capacity.model_size import ExpertSize, ModelSize
from quire.capacity.profile import EngineSizes
from quire.config import EngineConfig
from quire.core.kv_cache import fixed_blocks
from quire.engine.backend import (
    ITL_TARGET_MS,
    STEP_TOKENS,
    choose_itl_target,
    choose_kv_dtype,
    choose_max_requests,
    choose_ops,
    choose_quantize,
    choose_step_tokens,
)
from quire.engine.cache import CacheLayout, lay_out, shape_blocks
from quire.engine.memory import find_memory_budget, size_cache
from quire.engine.ranks import check_ranks
from quire.kernels import Kernels
from quire.kernels.arrays import ITEM_BYTES
from quire.kernels.cache_spec import BlockShape, CacheSpec, KVCacheSpec, cache_shapes
from quire.layers.source import Part
from quire.models.config import ModelConfig
from quire.models.registry import MODELS
from quire.quant.panels import rounded_format
from quire.weights.checkpoint import StoredPart
from quire.weights.config import read_config
from quire.weights.loader import declared_parts, num_values, opened, shorten, survey, weight_bytes
from quire.weights.survey import Survey

EMBEDDINGS = ("model.embed_tokens.weight", "model.embed_positions.weight")
HEAD = "lm_head.weight"
GPU_TYPES = ("bfloat16", "float16")
STATUS = Path("/proc/self/status")
PROCESS_BYTES = 42 << 20  # where the system does not say what this process takes
ALLOCATED_BYTES = 4 << 20  # by an engine while it is built and runs its first step: objects, tapes, scratch memory


@dataclass(frozen=True, slots=True)
class HeldPart:
    """One part of a model as an engine holds it."""

    part: Part
    num_values: int
    num_bytes: int


def measure_on_cpu(config: EngineConfig, path: Path) -> tuple[ModelSize, EngineSizes]:
    """The sizes of an engine on this machine's CPU."""
    described = shorten(read_config(path), config.max_len, path)
    ops = choose_ops(config, described, cpu_dtype(config), "cpu")
    if config.tensor_parallel_size > 1:
        check_ranks(config, described, ops)
    kv_dtype = choose_kv_dtype(config.kv_dtype, cpu_dtype(config), ops)
    held = hold_random(config, described, ops) if config.weights == "random" else hold_on_cpu(config, path, ops)
    specs = cache_specs(described, ops)
    layout = lay_out(specs, shape_blocks(specs, ops, kv_dtype, config.block_size))
    size = model_size(config, described, held, layout, ITEM_BYTES["float32"])
    return size, cpu_sizes(config, size, layout, ops)


def cpu_dtype(config: EngineConfig) -> str:
    return "float32" if config.dtype == "auto" else config.dtype


def cpu_sizes(config: EngineConfig, size: ModelSize, layout: CacheLayout, ops: Kernels) -> EngineSizes:
    """As `build_engine` chooses them, with the memory that is free once the weights are loaded."""
    max_requests = choose_max_requests(config, "cpu")
    step_tokens = choose_step_tokens(config.max_tokens_per_step, max_requests, ops)
    budget = find_memory_budget("cpu", 0).without(size.weight_bytes + size.table_bytes)
    cache = size_cache(
        block_bytes=layout.block_bytes,
        block_size=config.block_size,
        windows=layout.windows,
        num_fixed=size.num_fixed_blocks,
        max_tokens_per_step=step_tokens,
        num_blocks=config.num_blocks,
        kv_memory=config.kv_memory,
        max_len=size.max_len,
        max_len_wanted=config.max_len,
        max_requests=max_requests,
        budget=budget,
    )
    return EngineSizes(
        cache.num_blocks,
        config.block_size,
        step_tokens,
        max_requests,
        cache.max_len,
        layout.windows,
        config.prefix_cache,
        choose_itl_target(config.itl_target_ms, "cpu"),
        num_encoder_groups=layout.num_encoder_groups,
        num_state_groups=layout.num_state_groups,
    )


def measure_on_gpu(config: EngineConfig, path: Path) -> tuple[ModelSize, CacheLayout]:
    """The sizes of a model in 16 bits on a GPU with quire's own kernels, which need not be here."""
    described = shorten(read_config(path), config.max_len, path)
    dtype = config.dtype if config.dtype in GPU_TYPES else "bfloat16"
    kv_dtype = dtype if config.kv_dtype == "auto" else config.kv_dtype
    ops = choose_ops(EngineConfig(device="cpu"), described, "float32", "cpu")  # only to list the model's parts
    held = hold_on_gpu(config, path, dtype, ops)
    specs = cache_specs(described, ops)
    layout = lay_out(specs, [gpu_block(spec, kv_dtype, config.block_size) for spec in specs])
    return model_size(config, described, held, layout, ITEM_BYTES[dtype]), layout


def gpu_sizes(config: EngineConfig, size: ModelSize, layout: CacheLayout, num_blocks: int) -> EngineSizes:
    max_requests = choose_max_requests(config, "cuda")
    step_tokens = config.max_tokens_per_step or max(STEP_TOKENS["cuda"], max_requests)
    longest = longest_request(size, num_blocks, step_tokens)
    target_ms = ITL_TARGET_MS["cuda"] if config.itl_target_ms is None else config.itl_target_ms
    return EngineSizes(
        num_blocks,
        config.block_size,
        step_tokens,
        max_requests,
        max(1, longest),
        layout.windows,
        config.prefix_cache,
        target_ms / 1000 or None,
        row_unit=128,
        depth=2,
        num_encoder_groups=layout.num_encoder_groups,
        num_state_groups=layout.num_state_groups,
    )


def cache_specs(described: ModelConfig, ops: Kernels) -> list[CacheSpec]:
    """What each layer caches, from a model without weights."""
    return list(MODELS[described.family](described, Survey(), ops).cache_specs())


def gpu_block(spec: CacheSpec, kv_dtype: str, block_size: int) -> BlockShape:
    if not isinstance(spec, KVCacheSpec):
        return BlockShape(spec.shape, None, spec.dtype)
    return cache_shapes(spec, "float8_e4m3fn" if kv_dtype == "fp8" else kv_dtype, block_size)


def hold_on_cpu(config: EngineConfig, path: Path, ops: Kernels) -> list[HeldPart]:
    """The parts as they are held for quire's own CPU kernels, or for torch's."""
    with opened(path) as (described, checkpoint):
        stored = survey(described, checkpoint, ops)
        quantize = choose_quantize(config.quantize, stored)
        if ops.native is None:
            return [
                HeldPart(one.part, num_values(one.part, one.cols), weight_bytes([one], "float32")) for one in stored
            ]
        return [hold_panels(one, quantize, ops) for one in stored]


def hold_panels(stored: StoredPart, quantize: str | None, ops: Kernels) -> HeldPart:
    part, cols = stored.part, stored.cols
    if cols is None:
        return HeldPart(part, 0, part.rows * ITEM_BYTES["float32"])
    assert ops.native is not None
    width = part.width(cols)
    format = rounded_format(stored.panel_format, part.name, width, quantize)
    return HeldPart(part, part.rows * width, ops.native.module.Panels(format, part.rows, width).nbytes)


def hold_random(config: EngineConfig, described: ModelConfig, ops: Kernels) -> list[HeldPart]:
    """Random weights are float32, rounded as `quantize` says."""
    quantize = None if config.quantize == "none" else config.quantize
    held = []
    for part, cols in declared_parts(described, ops):
        values = num_values(part, cols)
        num_bytes = values * ITEM_BYTES["float32"]
        if cols is not None and ops.native is not None:
            width = part.width(cols)
            format = rounded_format("f32", part.name, width, quantize)
            num_bytes = ops.native.module.Panels(format, part.rows, width).nbytes
        held.append(HeldPart(part, 0 if cols is None else values, num_bytes))
    return held


def hold_on_gpu(config: EngineConfig, path: Path, dtype: str, ops: Kernels) -> list[HeldPart]:
    if config.weights == "random":
        declared = declared_parts(read_config(path), ops)
        return [
            HeldPart(part, 0 if cols is None else num_values(part, cols), num_values(part, cols) * ITEM_BYTES[dtype])
            for part, cols in declared
        ]
    with opened(path) as (described, checkpoint):
        stored = survey(described, checkpoint, ops)
        quantize = choose_quantize(config.quantize, stored, tiled=True)
        return [
            HeldPart(
                one.part,
                0 if one.cols is None else num_values(one.part, one.cols),
                weight_bytes([one], dtype, tiled=True, quantize=quantize),
            )
            for one in stored
        ]


def model_size(
    config: EngineConfig, described: ModelConfig, held: Sequence[HeldPart], layout: CacheLayout, item_bytes: int
) -> ModelSize:
    tied = described.tie_embeddings
    looked_up = [one for one in held if one.part.name in EMBEDDINGS and not tied]
    heads = [one for one in held if one.part.name == (EMBEDDINGS[0] if tied else HEAD)]
    experts = [one for one in held if described.experts is not None and is_expert(one.part, described)]
    total_bytes, total_values = sum(one.num_bytes for one in held), sum(one.num_values for one in held)
    expert_values = sum(one.num_values for one in experts)
    expert_bytes = sum(one.num_bytes for one in experts)
    head_values = sum(one.num_values for one in heads)
    return ModelSize(
        model=config.model,
        weight_bytes=total_bytes,
        read_bytes=total_bytes - expert_bytes - sum(one.num_bytes for one in looked_up),
        num_layers=described.num_layers,
        num_values=total_values - expert_values - head_values - sum(one.num_values for one in looked_up),
        head_values=head_values,
        windows=layout.windows,
        pair_flops=pair_flops(described, layout),
        block_bytes=layout.block_bytes,
        block_size=config.block_size,
        max_len=described.max_len,
        vocab_size=described.vocab_size,
        table_bytes=table_bytes(described),
        row_bytes=row_bytes(described, item_bytes),
        num_fixed_blocks=fixed_blocks(
            described.max_len, config.block_size, layout.num_encoder_groups, layout.num_state_groups
        ),
        experts=None
        if described.experts is None
        else ExpertSize(
            expert_bytes, expert_values, described.experts.routing.num_experts, described.experts.routing.top_k
        ),
    )


def is_expert(part: Part, described: ModelConfig) -> bool:
    """Heads of latent attention are stored as experts are."""
    assert described.experts is not None
    return part.expert is not None and part.expert[1] == described.experts.routing.num_experts


def pair_flops(described: ModelConfig, layout: CacheLayout) -> tuple[float, ...]:
    """2 x heads x (head_dim + value_dim) in each layer of a group that grows."""
    values = described.head_dim if described.latent is None else described.latent.rank
    each = 2.0 * described.num_heads * (described.head_dim + values)
    return tuple(each * sum(layer.group == group for layer in layout.layers) for group in range(len(layout.windows)))


def table_bytes(described: ModelConfig) -> int:
    """Cosines and sines in float32 for every position."""
    ropes = (described.rope, described.local_rope) if described.structure.rotates else ()
    return sum(ITEM_BYTES["float32"] * described.max_len * rope.dim for rope in ropes if rope)


def row_bytes(described: ModelConfig, item_bytes: int) -> int:
    """Activations of a token: q, k and v, the states between the parts of a layer, and the MLP's, which are rounded to
    int8 on a CPU. A formula that holds within a tenth, not the tape's own sum."""
    queries = described.num_heads * described.head_dim
    keys = 2 * described.num_kv_heads * described.head_dim
    wide = described.intermediate_size if described.experts is None else described.experts.intermediate_size
    hidden = described.hidden_size
    return item_bytes * (2 * queries + keys + 8 * hidden) + 13 * (wide + 6 * hidden) // 8


def process_bytes() -> int:
    """What an engine's process takes without a model: what this one takes once the engine's modules are loaded."""
    import quire.engine.build  # noqa: F401  loads what an engine loads

    found = re.search(r"VmRSS:\s+(\d+) kB", STATUS.read_text()) if STATUS.is_file() else None
    return (1024 * int(found[1]) if found else PROCESS_BYTES) + ALLOCATED_BYTES
