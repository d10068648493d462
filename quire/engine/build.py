"""Build an engine from an EngineConfig. Only this module, `backend.py`, `precompile.py` and the entry points read it.

Weights are loaded, on a GPU the largest step is measured, the cache gets the memory that is left, and the runner and
the scheduler are built with its size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.core.kv_cache import fixed_blocks
from quire.core.pace import Pace
from quire.core.scheduler import Scheduler
from quire.core.swap import SwapCosts
from quire.engine.backend import (
    choose_device,
    choose_dtype,
    choose_itl_target,
    choose_kv_dtype,
    choose_max_requests,
    choose_ops,
    choose_quantize,
    choose_step_tokens,
    describe_ops,
)
from quire.engine.batch import BatchBuffers, BufferShape
from quire.engine.batching import make_policy
from quire.engine.cache import CacheTensors, fingerprint_cache, lay_out, shape_blocks
from quire.engine.costs import time_copies
from quire.engine.engine import Engine, EngineInfo
from quire.engine.faults import LESS_MEMORY, explain_out_of_memory
from quire.engine.memory import (
    GRAPH_BYTES,
    WEIGHTS_REMEDY,
    check_tables,
    check_weights,
    describe,
    find_memory_budget,
    note_cache_scales,
    size_cache,
    size_swap,
)
from quire.engine.runner import ModelRunner, Runner, StepListener
from quire.engine.speculation import (
    build_controller,
    load_draft_model,
    names_exit,
    names_heads,
    speculates,
)
from quire.kernels import Kernels
from quire.kernels.arrays import ITEM_BYTES
from quire.kernels.paging import LayerCache
from quire.models.config import ModelConfig
from quire.models.decoder import Decoder
from quire.speculative.proposer import ModelProposer
from quire.weights.config import read_config
from quire.weights.loader import (
    LoadedModel,
    build_model,
    build_random_model,
    count_weights,
    has_tiles,
    opened,
    shorten,
    survey,
    weight_bytes,
)

if TYPE_CHECKING:
    from quire.engine.draft_heads import DraftHeads
    from quire.engine.precompile import Precompilation
    from quire.engine.ranks import RankGroup
    from quire.engine.self_speculation import Exit
    from quire.kernels.cpu.split import SplitModel
    from quire.weights.eagle import LoadedEagle


def build_engine(
    config: EngineConfig,
    path: Path,
    progress: Callable[[int, int], None] | None = None,
    precompilation: Precompilation | None = None,
) -> Engine:
    """Load the model at `path` and build an engine for it."""
    if config.tensor_parallel_size == 1:
        return _build(config, path, progress, precompilation)
    from quire.engine.ranks import RankGroup

    group = RankGroup()
    try:
        engine = _build(config, path, progress, precompilation, group)
    except BaseException:
        group.close()
        raise
    engine.add_ranks(group)
    return engine


def _build(
    config: EngineConfig,
    path: Path,
    progress: Callable[[int, int], None] | None,
    precompilation: Precompilation | None,
    group: RankGroup | None = None,
) -> Engine:
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    libraries = None
    if device == "cuda":
        from quire.engine.profile_run import ProfileRun, read_libraries

        libraries = read_libraries(device, dtype)
    with explain_out_of_memory("the weights", WEIGHTS_REMEDY, device):
        loaded, ops = load(config, path, dtype, device, progress, group)
    model = loaded.config
    kv_dtype = choose_kv_dtype(config.kv_dtype, dtype, ops)
    max_requests = choose_max_requests(config, device)
    step_tokens = choose_step_tokens(config.max_tokens_per_step, max_requests, ops)
    draft = load_draft_model(config, loaded, path, ops, dtype)
    heads: DraftHeads | None = None
    if names_heads(config):
        from quire.engine.draft_heads import DraftHeads

        heads = DraftHeads(config, loaded, path, ops, dtype, max_requests)
    found_exit: Exit | None = None
    if names_exit(config):
        from quire.engine.self_speculation import load_exit

        found_exit = load_exit(config, loaded, ops)
    num_layers = len(loaded.model.cache_specs())
    head_specs = heads.specs if heads else []
    specs = loaded.model.cache_specs() + head_specs + (draft.model.cache_specs() if draft else [])
    layout = lay_out(specs, shape_blocks(specs, ops, kv_dtype, config.block_size))
    others = group.wait_loaded(layout) if group is not None else []  # of the memory that is free now, they take no more
    total_weights = loaded.weight_bytes + sum(other.weight_bytes for other in others)
    if precompilation is not None:
        if ops.fused is None:
            precompilation.cancel()  # torch's ops need no Triton kernels
        else:
            precompilation.wait()
    step_bytes = kept_bytes = 0  # nothing is reserved on a CPU
    if libraries is not None:
        profile_run = ProfileRun(loaded.model, ops, layout, step_tokens, max_requests, model.max_len, config.block_size)
        step_bytes = profile_run.measure(libraries)
        kept_bytes = heads.count_bytes(step_tokens, ITEM_BYTES[dtype]) if heads else 0
    budget = find_memory_budget(device, step_bytes, kept_bytes)
    size = size_cache(
        block_bytes=layout.block_bytes + sum(other.block_bytes for other in others),
        block_size=config.block_size,
        windows=layout.windows,
        num_fixed=fixed_blocks(model.max_len, config.block_size, layout.num_encoder_groups, layout.num_state_groups),
        max_tokens_per_step=step_tokens,
        num_blocks=config.num_blocks,
        kv_memory=config.kv_memory,
        max_len=model.max_len,
        max_len_wanted=config.max_len,
        max_requests=max_requests,
        budget=budget,
    )
    ops_text = describe_ops(ops, dtype, () if group is None else group.threads)
    kv_dtypes = " and ".join(dict.fromkeys(spec.dtype or kv_dtype for spec in specs))
    summary = describe(
        config.model, model.family, ops_text, total_weights, budget.reserved_bytes, size, kv_dtypes, max_requests
    )  # fmt: skip
    summary += note_cache_scales(loaded.unused, kv_dtype, native=ops.native is not None)
    is_exact = ops.exact or ops.native is not None
    fingerprint = fingerprint_cache(model, total_weights, layout, size.block_size, ops_text)
    info = EngineInfo(
        config.model, model, size.max_len, max_requests, total_weights, size, device, summary, ops_text, is_exact,
        fingerprint,
    )  # fmt: skip
    num_host_blocks = size_swap(config.swap_memory, size.block_bytes, device)
    with explain_out_of_memory("the cache", f"End other programs on the GPU, or {LESS_MEMORY}.", device):
        if group is None:
            num_import_blocks = size.num_blocks
            cache = CacheTensors(layout, size, ops.arrays, num_host_blocks + num_import_blocks, ops.move_kv)
        else:
            num_import_blocks = 0
            group.build(size.num_blocks, num_host_blocks, step_tokens)
            cache = group.cache(layout, size, ops.arrays, num_host_blocks, ops.move_kv)
        arrays = ops.arrays if group is None else group.arrays()
        shape = BufferShape(
            step_tokens, max_requests, size.max_len, layout.windows, config.block_size, model.vocab_size, arrays,
            layout.num_fixed_groups,
        )  # fmt: skip
        num_target_and_heads = num_layers + len(head_specs)
        layers, head_layers = cache.layers[:num_layers], cache.layers[num_layers:num_target_and_heads]
        draft_layers = cache.layers[num_target_and_heads:]
        cache.layers = layers
        taps = heads.taps if heads and ops.native is not None else ()  # a GPU's runner keeps them itself
        split_model: SplitModel | None = None
        if found_exit is not None and ops.native is not None:
            from quire.kernels.cpu.split import SplitModel

            split_model = SplitModel(loaded.model, layers, ops.native, step_tokens, found_exit.layer, taps)
        decoder: Any = split_model or ops.record(loaded.model, layers, step_tokens, taps)
        listeners: list[StepListener] = [*heads.listeners] if heads else []
        drafter = heads.gpu_drafter(head_layers) if heads and ops.fused is not None else None
        runner = build_runner(
            decoder, cache, ops, shape, model, dtype, step_bytes + GRAPH_BYTES, listeners,
            speculates=speculates(config, ops), drafter=drafter,
        )  # fmt: skip
        runner.prepare()
        if group is not None:
            group.go()
        costs = SwapCosts(copy_s=time_copies(cache, ops.arrays) if num_host_blocks else None)
    scheduler = Scheduler(
        size.num_blocks,
        size.block_size,
        step_tokens,
        max_requests,
        make_policy(config, max_requests),
        windows=layout.windows,
        num_encoder_groups=layout.num_encoder_groups,
        num_state_groups=layout.num_state_groups,
        prefix_cache=config.prefix_cache,
        num_host_blocks=num_host_blocks,
        num_import_blocks=num_import_blocks,
        costs=costs,
        pace=Pace(choose_itl_target(config.itl_target_ms, device), ops.row_unit),
    )
    models: list[ModelProposer] = []
    if heads is not None:
        models, eagles = heads.build(layers, head_layers, scheduler, size.max_len)
        if isinstance(runner, ModelRunner):
            runner.listeners += eagles
    if draft is not None:
        from quire.engine.draft_model import DraftModel

        recorded = ops.record(draft.model, draft_layers, step_tokens)
        buffers = BatchBuffers(shape)
        models.append(
            DraftModel(
                recorded, draft_layers, buffers, ops, step_tokens, lambda: scheduler.kv.pool, scheduler.reserve
            )
        )  # fmt: skip
    if found_exit is not None and split_model is not None and isinstance(runner, ModelRunner):
        from quire.engine.self_speculation import build_split

        buffers = BatchBuffers(shape)
        runner.split, self_draft = build_split(
            found_exit, loaded.model, split_model, buffers, ops, max_requests, scheduler.reserve
        )  # fmt: skip
        models += [self_draft] if self_draft is not None else []
    controller = build_controller(config, ops, step_tokens, model.vocab_size, models)
    has_exit = found_exit is not None and found_exit.exits
    return Engine(scheduler, runner, info, controller, has_exit=has_exit)


def load(
    config: EngineConfig,
    path: Path,
    dtype: str,
    device: str,
    progress: Callable[[int, int], None] | None,
    group: RankGroup | None = None,
) -> tuple[LoadedModel, Kernels]:
    """The model, and the ops that it runs on. With a group, the other ranks load theirs at the same time."""
    if config.weights == "random":
        model = shorten(read_config(path), config.max_len, path)
        ops = choose_ops(config, model, dtype, device)
        # Before the ranks start: counting builds the model, which would allocate pages that only rank 0 has.
        check_weights(count_weights(model, ops) * ITEM_BYTES[dtype], device)
        check_tables(model, device)
        if group is not None:
            ops = group.start(config, path, model, ops, choose_kv_dtype(config.kv_dtype, dtype, ops))
        rounding = None if config.quantize == "none" else config.quantize
        return build_random_model(model, dtype=dtype, ops=ops, quantize=rounding), ops
    with opened(path) as (described, checkpoint):
        model = shorten(described, config.max_len, path)
        ops = choose_ops(config, model, dtype, device)
        stored = survey(model, checkpoint, ops)
        tiled = has_tiles(ops, dtype)
        quantize = choose_quantize(config.quantize, stored, tiled=tiled)
        if group is not None:
            ops = group.start(config, path, model, ops, choose_kv_dtype(config.kv_dtype, dtype, ops))
        check_weights(weight_bytes(stored, dtype, tiled=tiled, quantize=quantize), device)
        check_tables(model, device)
        return build_model(model, checkpoint, dtype=dtype, ops=ops, quantize=quantize, progress=progress), ops


def build_runner(
    decoder: Decoder,
    cache: CacheTensors,
    ops: Kernels,
    shape: BufferShape,
    model: ModelConfig,
    dtype: str,
    graph_bytes: int,
    listeners: Sequence[StepListener] = (),
    *,
    speculates: bool = False,
    drafter: tuple[LoadedEagle, LayerCache] | None = None,
) -> Runner:
    """`drafter`: an EAGLE head and its layer of the cache, which a GPU's runner runs."""
    if ops.native is not None:
        return ModelRunner(decoder, cache, BatchBuffers(shape), ops, listeners)
    if ops.fused is None:
        from quire.engine.torch_runner import TorchRunner

        return TorchRunner(decoder, cache, BatchBuffers(shape), ops)
    from quire.engine.gpu_batch import AttentionShape, GpuBuffers  # these load Triton
    from quire.engine.gpu_drafter import build_drafter
    from quire.engine.gpu_runner import GpuRunner
    from quire.kernels.cuda.attention import varlen_items
    from quire.kernels.torch_arrays import torch_type

    is_plain = model.structure.slopes is None and model.attention_softcap is None and not model.attention_sinks
    uses_items = not ops.exact and varlen_items.suits(torch_type(dtype), cache.layers[0], is_plain=is_plain)
    num_queries_per_kv = model.num_heads // model.num_kv_heads
    attention = AttentionShape(
        num_queries_per_kv, model.num_kv_heads, model.windows[-1], uses_items, ops.exact, model.latent is not None
    )
    buffers = GpuBuffers(shape, attention)
    gpu_drafter = None
    if drafter is not None:
        gpu_drafter = build_drafter(*drafter, decoder.head, buffers, ops, torch_type(dtype))
    return GpuRunner(decoder, cache, buffers, ops, graph_bytes, speculates=speculates, drafter=gpu_drafter)
