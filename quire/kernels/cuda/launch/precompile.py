"""Compiles all kernels of a model's steps into Triton's cache: `python -m quire.kernels.cuda.launch.precompile`.

It calls the functions that launch kernels as steps call them, on tensors without memory. A launch compiles its kernel
and does not run it. This needs no GPU and loads no torch. `engine/precompile.py` starts several such processes and
writes the model's sizes to their standard input.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.kernels.cuda.launch import torch_stub

FEW_ROWS = 16
MANY_ROWS = 128  # more than the kernels for few rows support
MAX_ROWS = 512  # of buffers; kernels do not depend on it


@dataclass(frozen=True, slots=True)
class Mixture:
    """The sizes of experts."""

    num_experts: int
    top_k: int
    size: int
    shared_size: int
    activation: str
    limit: float
    scoring: str
    normalize: bool
    factor: float
    num_groups: int
    top_groups: int
    group_scores: int
    has_correction: bool
    bias: bool
    shared_gate: bool


@dataclass(frozen=True, slots=True)
class Latent:
    """The sizes of latent attention."""

    rank: int
    key_dim: int
    value_dim: int
    rotated_dim: int
    query_rank: int


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes and types that kernels are compiled for."""

    capability: tuple[int, int]
    dtype: str
    kv_dtype: str
    block_size: int
    exact: bool
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool
    vocab_size: int
    activation: str
    scale: float
    windows: tuple[int | None, ...]  # the distinct ones
    attention_softcap: float | None
    logit_softcap: float | None
    speculates: bool = False  # steps verify drafts
    rotates: bool = True
    has_slopes: bool = False  # ALiBi
    has_sinks: bool = False
    mixture: Mixture | None = None
    latent: Latent | None = None
    gated: bool = True
    layer_norm: bool = False  # in place of RMSNorm
    norm_bias: bool = False
    codes: tuple[dict[str, Any], ...] = ()  # matrices of codes: `CodesOf`
    plain: bool = True  # whether matrices of layers are dense too


@dataclass(frozen=True, slots=True)
class CodesOf:
    """A matrix of codes: its sizes, what is computed with it, and the fields of its `TileFormat`."""

    num_out: int
    num_in: int
    activation: str | None  # of a gated product
    is_embedding: bool
    codes: str
    bits: int
    group: int
    chunk: int
    scale: str
    zero: int
    has_zeros: bool
    has_minimums: bool
    table: Sequence[float] | None
    supers: int


class KernelCalls:
    """Calls every op as steps do. Make it after the stub of torch is installed."""

    def __init__(self, model: Model) -> None:
        from quire.kernels.cuda import exact, ops

        self.model = model
        self.ops: Any = exact if model.exact else ops
        self.dtype = torch_stub.DTYPES[model.dtype]

    def tasks(self) -> Iterator[Callable[[], None]]:
        """Each task compiles one kernel or a few. The longest come first."""
        for window in self.model.windows:
            yield partial(self.attend_to_prompts, window)
        yield partial(self.draw, self.dtype, self.model.logit_softcap)
        yield partial(self.draw, torch_stub.DTYPES["float32"], None)
        for window in self.model.windows:
            yield partial(self.attend_to_singles, window, 1)
        for window in self.model.windows:
            yield partial(self.attend_to_singles, window, MANY_ROWS)
        if self.model.speculates:
            for window in self.model.windows:
                yield partial(self.attend_to_drafts, window)
            yield self.accept
            yield self.draft
        for codes in self.model.codes:
            for rows in (MANY_ROWS, 64, 32, FEW_ROWS):
                yield partial(self.multiply_codes, CodesOf(**codes), rows)
            yield partial(self.dequantize, CodesOf(**codes))
        for rows in (64, 32, FEW_ROWS, 1, MANY_ROWS):
            yield partial(self.multiply, rows)
        if self.model.mixture is not None:
            for rows in (8192, 1024, MANY_ROWS, 64, 32, FEW_ROWS, 2, 1):
                yield partial(self.mix, rows, self.model.mixture)
        yield self.normalize
        yield self.serve

    def attend_to_prompts(self, window: int | None) -> None:
        """Without `rope_store`, which `attend_to_singles` compiles for many rows: this task takes the longest."""
        from quire.kernels.cuda.attention import varlen_items
        from quire.kernels.cuda.attention.dispatch import Work
        from quire.kernels.cuda.attention.prefill import Tiles

        if self.model.latent is not None:
            self.attend_to_latents(MANY_ROWS, Work(False, True, tiles=Tiles(numbers(1 + 2 * FEW_ROWS))))
            return
        items, tiles = numbers(1 + FEW_ROWS * varlen_items.ITEM_FIELDS), Tiles(numbers(1 + 2 * FEW_ROWS))
        q, _, _ = self._heads(MANY_ROWS)
        cache, paging = self._cache(FEW_ROWS, MANY_ROWS, Work(False, True, items={window: items}, tiles=tiles))
        self.ops.attention(q, cache, paging, **self._scoring(window))

    def attend_to_singles(self, window: int | None, rows: int) -> None:
        from quire.kernels.cuda.attention.dispatch import Work
        from quire.kernels.cuda.attention.split_kv import FIELDS

        model = self.model
        if model.latent is not None:
            self.attend_to_latents(rows, Work(True, False, splits={None: numbers(rows, FIELDS)}))
            return
        q, k, v = self._heads(rows)
        cache, paging = self._cache(rows, rows, Work(True, False, splits={window: numbers(rows, FIELDS)}))
        if not model.rotates:
            self.ops.store_kv(k, v, cache, longs(rows))
            self.ops.attention(q, cache, paging, **self._scoring(window))
            return
        self.ops.fused.rope_attention(
            q, k, v, longs(rows), torch_stub.empty(1, model.rotary_dim), model.interleaved, cache, paging,
            scale=model.scale, window=window, softcap=model.attention_softcap, sinks=self._sinks(),
        )  # fmt: skip

    def attend_to_latents(self, rows: int, work: Any) -> None:
        """With the ops before and behind."""
        from quire.kernels.paging import LayerCache

        model, latent = self.model, self.model.latent
        assert latent is not None
        key, paging = self._cache(FEW_ROWS, rows, work)
        cache = LayerCache(key.k, key.k.narrow(3, latent.rank), 0, model.block_size)
        query_dim, dim = latent.key_dim + latent.rotated_dim, latent.rank + latent.rotated_dim
        q = torch_stub.empty(rows, model.num_heads, query_dim, dtype=self.dtype)
        kv = torch_stub.empty(rows, 1, dim, dtype=self.dtype)
        table = torch_stub.empty(1, latent.rotated_dim)
        q = self.ops.fused.rope_store_latent(
            q, kv, self._rows(latent.rank), 1e-5, longs(rows), table, model.interleaved, cache, longs(rows)
        )
        absorb = StoredWeight(self._rows(model.num_heads * latent.rank, latent.key_dim))
        values = StoredWeight(self._rows(model.num_heads * latent.value_dim, latent.rank))
        q = self.ops.head_linear(q, absorb)
        self.ops.head_linear(self.ops.attention(q, cache, paging, scale=model.scale), values)

    def attend_to_drafts(self, window: int | None) -> None:
        from quire.kernels.cuda.attention import varlen_items
        from quire.kernels.cuda.attention.dispatch import Work
        from quire.kernels.cuda.attention.scoring import Scoring
        from quire.kernels.cuda.attention.split_kv import FIELDS
        from quire.kernels.cuda.attention.verify import MANY_TOKENS, MAX_QUERIES, QUERIES, is_fastest

        model = self.model
        if model.latent is not None:
            for has_trees in (False, True):
                work = Work(True, False, splits={None: numbers(FEW_ROWS, FIELDS)}, max_queries=QUERIES[-1])
                work.masks = longs(FEW_ROWS) if has_trees and not model.exact else None
                self.attend_to_latents(FEW_ROWS, work)
            return
        group, options = model.num_heads // model.num_kv_heads, self._scoring(window)
        scoring = Scoring(model.scale, window, options["slopes"], model.attention_softcap, options["sinks"])

        def attend(tokens: int, queries: int, *, has_trees: bool) -> None:
            work = Work(True, False, splits={window: numbers(FEW_ROWS, FIELDS)}, max_queries=queries)
            work.masks = longs(tokens) if has_trees and not model.exact else None
            (q, _, _), (cache, paging) = self._heads(tokens), self._cache(FEW_ROWS, tokens, work)
            paging.paths = numbers(tokens, MAX_QUERIES) if model.exact else None
            has_varlen = varlen_items.suits(q.dtype, cache, is_plain=scoring.is_plain)  # type: ignore[arg-type]
            if has_trees or not has_varlen or is_fastest(queries, group, tokens):
                self.ops.attention(q, cache, paging, **options)

        if not model.exact:
            for tokens, queries in ((FEW_ROWS, QUERIES[0]), *((MANY_TOKENS, queries) for queries in QUERIES)):
                attend(tokens, queries, has_trees=False)
        for tokens in (FEW_ROWS, MANY_TOKENS):
            attend(tokens, MAX_QUERIES, has_trees=True)

    def accept(self) -> None:
        from quire.kernels.cache_spec import KVCacheSpec
        from quire.kernels.cuda.move import TokenMover
        from quire.kernels.cuda.sampling.accept import FIELDS, MAX_NODES, accept_drafts
        from quire.kernels.paging import LayerCache

        model, rows = self.model, numbers(FEW_ROWS, FIELDS)
        counts, paths = numbers(MAX_ROWS), numbers(MAX_ROWS, MAX_NODES)
        tops: Any = torch_stub.empty(MANY_ROWS)
        samples, entries = longs(MANY_ROWS), numbers(MANY_ROWS)
        accept_drafts(
            rows, numbers(MANY_ROWS), longs(MANY_ROWS), samples, tops, entries, longs(MAX_ROWS), counts, paths
        )
        shape, _, cache_dtype = self.ops.cache_shapes(
            KVCacheSpec(model.num_kv_heads, model.head_dim), model.kv_dtype, model.block_size
        )
        kept: Any = torch_stub.empty(2, *shape, dtype=torch_stub.DTYPES[cache_dtype])
        move = TokenMover([LayerCache(kept, kept, 0, model.block_size)], 1, "meta")  # type: ignore[arg-type]
        move(rows, counts, paths, numbers(FEW_ROWS + 1), numbers(FEW_ROWS), [numbers(FEW_ROWS, 16)])

    def draft(self) -> None:
        """The kernels around a head that drafts on the device."""
        from quire.kernels.cuda.attention.split_kv import FIELDS as SPLIT_FIELDS
        from quire.kernels.cuda.drafting import Kept, Places, fill_drafts, keep_states, place_drafts
        from quire.kernels.cuda.sampling.accept import FIELDS, MAX_NODES

        rows, depth = FEW_ROWS, 4
        indices, entries, wide = longs(rows), longs(rows), longs(depth, rows)
        places = Places(indices, entries, wide, wide, numbers(depth, rows), numbers(depth, 4 * rows, SPLIT_FIELDS))
        starts, lengths, table = numbers(rows + 1), numbers(rows), numbers(rows, 16)
        place_drafts(
            numbers(rows, FIELDS),
            numbers(rows),
            starts,
            lengths,
            numbers(rows),
            table,
            self.model.block_size,
            1,
            places,
        )
        fill_drafts(longs(4 * rows), starts, numbers(rows), longs(depth + 1, MAX_ROWS), rows)
        states: Any = self._rows(MAX_ROWS, 3 * self.model.hidden_size)
        kept = Kept(states, longs(MAX_ROWS), longs(MAX_ROWS), longs(MAX_ROWS))
        for listed in (numbers(rows, FIELDS), None):
            keep_states(
                kept, 0, listed, rows, depth, numbers(rows), numbers(MAX_ROWS, MAX_NODES), longs(rows), longs(rows),
                longs(rows), numbers(rows), longs(MAX_ROWS), states,
            )  # fmt: skip

    def _scoring(self, window: int | None) -> dict[str, Any]:
        model = self.model
        slopes = torch_stub.empty(model.num_heads, dtype=torch_stub.DTYPES["float32"]) if model.has_slopes else None
        return {
            "scale": model.scale,
            "window": window,
            "slopes": slopes,
            "softcap": model.attention_softcap,
            "sinks": self._sinks(),
        }

    def _sinks(self) -> Any:
        return self._rows(self.model.num_heads) if self.model.has_sinks else None

    def _cache(self, rows: int, tokens: int, work: Any) -> tuple[Any, Any]:
        """A layer's cache, and the paging of a step."""
        from quire.kernels.cache_spec import KVCacheSpec
        from quire.kernels.paging import LayerCache, Paging

        model = self.model
        spec = KVCacheSpec(model.num_kv_heads, model.head_dim)
        shape, _, cache_dtype = self.ops.cache_shapes(spec, model.kv_dtype, model.block_size)
        cache_tensor: Any = torch_stub.empty(2, *shape, dtype=torch_stub.DTYPES[cache_dtype])
        cache = LayerCache(cache_tensor, cache_tensor, 0, model.block_size)
        tables, slots = [numbers(rows, 16)], [longs(tokens)]
        return cache, Paging(numbers(rows + 1), numbers(rows), tables, slots, model.block_size, [], [], work=work)

    def _heads(self, tokens: int) -> list[torch_stub.Tensor]:
        """Queries, keys and values: slices of one projection output."""
        model = self.model
        counts = model.num_heads, model.num_kv_heads, model.num_kv_heads
        joined = torch_stub.empty(tokens, sum(counts), model.head_dim, dtype=self.dtype)
        return [joined.narrow(1, count) for count in counts]

    def multiply(self, rows: int) -> None:
        model, width = self.model, self.model.num_heads * self.model.head_dim
        qkv_size = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        of_layers = [(qkv_size, model.hidden_size), (model.hidden_size, width)]
        if model.latent is not None:
            of_layers = latent_projections(model, model.latent)
        if model.mixture is not None:
            of_layers.append((model.mixture.num_experts, model.hidden_size))
        of_layers.append((model.hidden_size, model.intermediate_size))
        for num_out, num_in in (*(of_layers if model.plain else ()), (model.vocab_size, model.hidden_size)):
            self.ops.linear(self._rows(rows, num_in), self._rows(num_out, num_in))
        if not model.plain:
            return
        if not model.gated:
            up = self._rows(model.intermediate_size, model.hidden_size)
            self.ops.activate(self.ops.linear(self._rows(rows, model.hidden_size), up), model.activation)
            return
        gate_up = self._rows(2 * model.intermediate_size, model.hidden_size)
        self.ops.fused.gated_linear(self._rows(rows, model.hidden_size), gate_up, model.activation.partition("_")[0])

    def mix(self, rows: int, mixture: Mixture) -> None:
        """Experts, for this many tokens."""
        from quire.kernels.routing import ExpertWeights, Routing

        x, hidden_size = self._rows(rows, self.model.hidden_size), self.model.hidden_size
        routing = Routing(
            mixture.num_experts, mixture.top_k, mixture.scoring, mixture.normalize, mixture.factor,  # type: ignore[arg-type]
            mixture.num_groups, mixture.top_groups, mixture.group_scores,
        )  # fmt: skip
        correction = self._rows(mixture.num_experts) if mixture.has_correction else None
        routes = self.ops.route(self._rows(rows, mixture.num_experts), correction, routing)
        inner, outer = mixture.num_experts * 2 * mixture.size, mixture.num_experts * hidden_size
        weights = ExpertWeights(
            mixture.num_experts, StoredWeight(self._rows(inner, hidden_size)),
            StoredWeight(self._rows(outer, mixture.size)), mixture.activation,  # type: ignore[arg-type]
            self._rows(inner) if mixture.bias else None, self._rows(outer) if mixture.bias else None,
            mixture.limit,
        )  # fmt: skip
        shared = gate = None
        if mixture.shared_size:
            matrix = self._rows(2 * mixture.shared_size, hidden_size)
            inner_x = self.ops.fused.gated_linear(x, matrix, "silu")
            shared = self.ops.linear(inner_x, self._rows(hidden_size, mixture.shared_size))
            gate = self.ops.linear(x, self._rows(1, hidden_size)) if mixture.shared_gate else None
        self.ops.experts(x, routes, weights, shared, gate)

    def multiply_codes(self, codes: CodesOf, rows: int) -> None:
        from quire.kernels.cuda.gemm.tiled_dispatch import few_row_product

        matrix, x, exact = stub_tiles(codes), self._rows(rows, codes.num_in), self.model.exact
        few_row_product(x, matrix, None if exact else codes.activation, exact=exact)  # type: ignore[arg-type]

    def dequantize(self, codes: CodesOf) -> None:
        from quire.kernels.cuda.gemm.tiled import dequantize

        out: Any = self._rows(FEW_ROWS, codes.num_in)
        if codes.is_embedding:
            dequantize(stub_tiles(codes), out, index=longs(FEW_ROWS))
        if not self.model.exact:
            dequantize(stub_tiles(codes), out)

    def normalize(self) -> None:
        model = self.model
        x, weight = self._rows(FEW_ROWS, model.hidden_size), self._rows(model.hidden_size)
        if model.layer_norm:
            bias = self._rows(model.hidden_size) if model.norm_bias else None
            self.ops.layer_norm(x, weight, bias, 1e-5)
            self.ops.layer_norm(x, weight, bias, 1e-5, x)
            return
        self.ops.rms_norm(x, weight, 1e-5)
        self.ops.rms_norm(x, weight, 1e-5, x)
        self.ops.rms_norm(self._heads(FEW_ROWS)[0], self._rows(model.head_dim), 1e-5)

    def serve(self) -> None:
        """The kernels before and after the layers."""
        from quire.kernels.cuda.launch.upload import compile_upload
        from quire.kernels.cuda.sampling.argmax import Argmax
        from quire.kernels.cuda.sampling.last_tokens import fill_last_tokens
        from quire.kernels.cuda.sampling.logits_processors import apply_token_bitmask, penalize
        from quire.kernels.cuda.sampling.logprobs import logprobs

        compile_upload(longs(FEW_ROWS, 8))
        fill_last_tokens(longs(FEW_ROWS), numbers(FEW_ROWS + 1), numbers(FEW_ROWS), longs(FEW_ROWS), FEW_ROWS)
        find: Any = Argmax(MAX_ROWS, "meta")  # type: ignore[arg-type]
        logits = self._rows(FEW_ROWS, self.model.vocab_size)
        find(logits, numbers(FEW_ROWS), longs(MAX_ROWS), torch_stub.empty(MAX_ROWS), longs(MAX_ROWS))
        counts, wide = numbers(FEW_ROWS, self.model.vocab_size), torch_stub.empty(FEW_ROWS, self.model.vocab_size)
        penalize(wide, counts, longs(FEW_ROWS, 2), torch_stub.empty(FEW_ROWS, 3))  # type: ignore[arg-type]
        bits: Any = torch_stub.empty(FEW_ROWS, -(-self.model.vocab_size // 8), dtype=torch_stub.DTYPES["uint8"])
        apply_token_bitmask(wide, longs(FEW_ROWS), bits)  # type: ignore[arg-type]
        logprobs(logits, longs(FEW_ROWS), longs(FEW_ROWS), 1, self.model.logit_softcap)  # type: ignore[arg-type]

    def draw(self, dtype: torch_stub.DType, softcap: float | None) -> None:
        from quire.kernels.cuda.sampling.sample import SamplingInputs, TokenSampler
        from quire.kernels.sampling import NUM_SETTINGS

        size = self.model.vocab_size
        settings: Any = torch_stub.empty(MAX_ROWS, NUM_SETTINGS, dtype=torch_stub.DTYPES["float64"])
        rows = numbers(FEW_ROWS)
        inputs = SamplingInputs(rows, rows, longs(MAX_ROWS), settings, longs(MAX_ROWS), has_top_k=True, has_top_p=True)
        sample: Any = TokenSampler(MAX_ROWS, size, softcap, "meta")  # type: ignore[arg-type]
        sample(torch_stub.empty(FEW_ROWS, size, dtype=dtype), inputs, longs(MAX_ROWS), torch_stub.empty(MAX_ROWS))

    def _rows(self, *shape: int) -> torch_stub.Tensor:
        return torch_stub.empty(*shape, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A dense `Weight`."""

    data: torch_stub.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape


def latent_projections(model: Model, latent: Latent) -> list[tuple[int, int]]:
    queries, size = model.num_heads * (latent.key_dim + latent.rotated_dim), model.hidden_size
    output, dim = (size, model.num_heads * latent.value_dim), latent.rank + latent.rotated_dim
    if not latent.query_rank:
        return [output, (queries + dim, size)]
    return [output, (latent.query_rank + dim, size), (queries, latent.query_rank)]


def stub_tiles(codes: CodesOf) -> Any:
    """A matrix of codes without memory."""
    from quire.kernels.cuda.gemm.tiled import TILE_OUTPUTS, TiledMatrix

    tiles, chunks = -(-codes.num_out // TILE_OUTPUTS), -(-codes.num_in // codes.chunk)

    def plane(is_there: bool, dtype: str) -> Any:
        shape = -(-codes.num_in // codes.group), tiles * TILE_OUTPUTS
        return torch_stub.empty(*shape, dtype=torch_stub.DTYPES[dtype]) if is_there else None

    scale = "int8" if codes.supers else {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}[codes.scale]
    has_supers, words = codes.supers > 0, TILE_OUTPUTS * codes.chunk * codes.bits // 32
    return TiledMatrix(
        codes=numbers(tiles, chunks, words),
        scales=plane(True, scale),
        zeros=plane(codes.has_zeros, "uint8"),
        minimums=plane(codes.has_minimums, scale),
        super_scales=plane(has_supers, "float16"),
        super_minimums=plane(has_supers and codes.has_minimums, "float16"),
        levels=None if codes.codes == "uint" else torch_stub.empty(16),  # type: ignore[arg-type]
        num_out=codes.num_out,
        num_in=codes.num_in,
        kind=codes.codes,
        bits=codes.bits,
        chunk=codes.chunk,
        group=codes.group,
        zero=codes.zero,
        supers=codes.supers,
        table=None if codes.table is None else tuple(codes.table),
    )


def numbers(*shape: int) -> Any:
    return torch_stub.empty(*shape, dtype=torch_stub.DTYPES["int32"])


def longs(*shape: int) -> Any:
    return torch_stub.empty(*shape, dtype=torch_stub.DTYPES["int64"])


class Driver:
    """The methods of a Triton driver that compilation needs."""

    def __init__(self, capability: tuple[int, int]) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def compile_only(capability: tuple[int, int], build_launcher: Callable[..., object]) -> None:
    """Make launches compile their kernel and its launcher, and not run it."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(Driver(capability))
    run, seen = JITFunction.run, set()

    def compile_kernel(self: Any, *args: Any, grid: object, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if id(kernel) not in seen:
            seen.add(id(kernel))
            build_launcher(kernel.src, kernel.metadata)
        return kernel

    JITFunction.run = compile_kernel


def share(tasks: list[Callable[[], None]], index: int, count: int) -> list[Callable[[], None]]:
    """The tasks of process `index` of `count`: dealt in alternating order, so that long and short ones balance."""
    order = [*range(count), *reversed(range(count))]
    return [task for nth, task in enumerate(tasks) if order[nth % len(order)] == index]


def read_model(given: dict[str, Any]) -> Model:
    """From JSON."""
    mixture, latent = given["mixture"], given["latent"]
    return Model(
        **given
        | {
            "capability": tuple(given["capability"]),
            "windows": tuple(given["windows"]),
            "mixture": mixture and Mixture(**mixture),
            "latent": latent and Latent(**latent),
        }
    )


def main() -> None:
    index, count = int(sys.argv[1]), int(sys.argv[2])
    model = read_model(json.loads(sys.stdin.buffer.read()))
    torch_stub.install(model.capability)
    from triton.backends.nvidia.driver import CudaLauncher

    compile_only(model.capability, CudaLauncher)
    for task in share(list(KernelCalls(model).tasks()), index, count):
        task()


if __name__ == "__main__":
    main()
