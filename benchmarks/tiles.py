"""Products of few rows with matrices of codes on one GPU, in Llama-3-8B's shapes: tiles of programs, formats, layers.

    python benchmarks/tiles.py [--only tiles,formats,many,layers] [--compile-only]

Kernels are compiled first, by processes that need no GPU. Each figure is the time of one product in a captured chain of
16, whose weights are cold. All results are compared with float64. tiles: int4 with zeros, by the tile of a program.
formats: each format, with the tiles that `choose_tile` takes. many: more than 64 rows, from codes and through the
workspace. layers: 32 layers with their norms, without attention, beside bf16.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from quire.quant.tile_format import TILE_FORMATS, TileFormat, rounded_tile_format

MATRICES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
FORMATS = ("int4", "int8", "fp8", "nf4", "Q4_0", "Q8_0", "Q4_K", "Q6_K")
LAYERS, NUM_ROWS = 16, (1, 16, 64)
PARTS = "tiles,formats,many,layers"
MAX_ERROR = 8e-3  # of bf16 results


class Variant(NamedTuple):
    matrix: str
    rows: int
    outputs: int
    warps: int
    stages: int
    splits: int
    unroll: int
    prefetches: bool

    @property
    def tile(self) -> Any:
        from quire.kernels.cuda.gemm.tiled import Tile

        return Tile(self.outputs, self.warps, self.stages, self.splits, self.unroll, self.prefetches)


def variants() -> Iterator[Variant]:
    for matrix in MATRICES:
        splits = (1, 2, 4, 8) if matrix == "gate_up" else (4, 8)
        for split, stages, unroll, prefetches in itertools.product(splits, (3, 4), (1, 2), (False, True)):
            yield Variant(matrix, 16, 64, 4, stages, split, unroll, prefetches)
        splits = (1,) if matrix == "gate_up" else (2, 4)
        for split, (outputs, warps), unroll in itertools.product(splits, ((64, 4), (128, 8)), (1, 2)):
            yield Variant(matrix, 64, outputs, warps, 3, split, unroll, True)


def format_of(name: str, cols: int) -> TileFormat:
    found = next((tiles for kind, tiles in TILE_FORMATS.items() if kind.name == name), None)
    found = found or rounded_tile_format(name, cols)
    assert found is not None, name
    return found


def activation_of(matrix: str) -> str | None:
    return "silu" if matrix == "gate_up" else None


def compile_share(index: int, count: int) -> None:
    """In a process of its own, without torch."""
    from dataclasses import asdict

    from quire.kernels.cuda.launch import precompile, torch_stub

    torch_stub.install((9, 0))
    from triton.backends.nvidia.driver import CudaLauncher

    from quire.kernels.cuda.gemm.tiled import multiply
    from quire.kernels.cuda.gemm.tiled_dispatch import few_row_product

    precompile.compile_only((9, 0), CudaLauncher)

    def stubs(name: str, matrix: str, rows: int) -> tuple[Any, Any]:
        num_out, num_in = MATRICES[matrix]
        fields = asdict(format_of(name, num_in))
        codes = precompile.CodesOf(num_out=num_out, num_in=num_in, activation=None, is_embedding=False, **fields)
        x = torch_stub.empty(rows, num_in, dtype=torch_stub.DTYPES["bfloat16"])
        return x, precompile.stub_tiles(codes)

    def compile_variant(each: Variant) -> None:
        multiply(*stubs("int4", each.matrix, each.rows), each.tile, activation_of(each.matrix))

    def compile_format(name: str, matrix: str, rows: int) -> None:
        few_row_product(*stubs(name, matrix, rows), activation_of(matrix))

    tasks: list[Callable[[], None]] = [lambda each=each: compile_variant(each) for each in variants()]
    for each in itertools.product(FORMATS, MATRICES, (16, 64)):
        tasks.append(lambda each=each: compile_format(*each))
    for task in tasks[index::count]:
        task()


def compile_all() -> None:
    begin_s, count = time.monotonic(), max(1, (os.cpu_count() or 1) - 1)
    children = [subprocess.Popen([sys.executable, __file__, "--share", f"{index},{count}"]) for index in range(count)]
    failed = sum(child.wait() != 0 for child in children)
    print(f"compiled in {time.monotonic() - begin_s:.0f} s, {failed} of {count} processes failed", flush=True)


class Bench:
    def __init__(self) -> None:
        import torch

        self.torch = torch
        self._weights: dict[tuple[str, str], list[Any]] = {}
        self._expected: dict[tuple[str, str, int], tuple[Any, Any]] = {}

    def weights(self, name: str, matrix: str) -> list[Any]:
        """Random codes."""
        from quire.quant.tile_packing import TileRows
        from quire.quant.tiled import Tiled

        torch, (rows, cols) = self.torch, MATRICES[matrix]
        key = name, matrix
        if key not in self._weights:
            format, made = format_of(name, cols), []
            groups = rows, format.num_groups(cols)
            supers = rows, -(-groups[1] // format.supers) if format.supers else 0

            def numbers(shape: tuple[int, int], scale: float) -> Any:
                if format.supers and shape == groups:
                    return torch.randint(1, 64, shape, device="cuda").to(torch.int8)
                return (torch.rand(shape, device="cuda") + 0.5) * scale

            for _ in range(LAYERS):
                weight = Tiled(format, (rows, cols), "cuda", torch.bfloat16)
                codes = torch.randint(0, 1 << format.bits, (rows, cols), dtype=torch.uint8, device="cuda")
                if format.codes == "e4m3":
                    codes = torch.randn(rows, cols, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
                zeros = torch.randint(6, 10, groups, dtype=torch.uint8, device="cuda")
                weight.put(
                    0,
                    TileRows(
                        codes,
                        numbers(groups, 0.01),
                        zeros if format.has_zeros else None,
                        numbers(groups, -0.08) if format.has_minimums else None,
                        numbers(supers, 1e-4) if format.supers else None,
                        numbers(supers, -8e-4) if format.supers and format.has_minimums else None,
                    ),
                )
                made.append(weight)
            self._weights[key] = made
        return self._weights[key]

    def expected(self, name: str, matrix: str, num_rows: int) -> tuple[Any, Any]:
        torch, key = self.torch, (name, matrix, num_rows)
        if key not in self._expected:
            x = torch.randn(num_rows, MATRICES[matrix][1], device="cuda", dtype=torch.bfloat16)
            y = x.double() @ self.weights(name, matrix)[0].dense().double().T
            if activation_of(matrix):
                gate, up = y.bfloat16().double().chunk(2, -1)
                y = torch.nn.functional.silu(gate) * up
            self._expected[key] = x, y
        return self._expected[key]

    def time_ms(self, body: Callable[[], Any]) -> float:
        """Of a replay, the best of four."""
        torch = self.torch
        body()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
        graph.replay()
        times = []
        for _ in range(4):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        return float(min(times))

    def product_us(self, name: str, matrix: str, num_rows: int, product: Callable[[Any, Any], Any]) -> float:
        weights, (x, expected) = self.weights(name, matrix), self.expected(name, matrix, num_rows)
        error = float((product(x, weights[0]).double() - expected).norm() / expected.norm())
        if not error < MAX_ERROR:
            print(f"WRONG: {name} {matrix}, {num_rows} rows: relative error {error}")
        return 1e3 * self.time_ms(lambda: [product(x, weight) for weight in weights]) / LAYERS

    def tiles(self) -> None:
        from quire.kernels.cuda.gemm.tiled import multiply

        found: dict[tuple[str, int], list[tuple[float, Variant]]] = {}
        for each in variants():
            for num_rows in (1, 16) if each.rows == 16 else (64,):
                us = self.product_us(
                    "int4", each.matrix, num_rows,
                    lambda x, weight, each=each: multiply(x, weight.matrix, each.tile, activation_of(each.matrix)),
                )  # fmt: skip
                found.setdefault((each.matrix, num_rows), []).append((us, each))
        for (matrix, num_rows), times in found.items():
            for us, each in sorted(times)[:3]:
                print(f"int4 {matrix} {num_rows} rows: {us:.2f} us, {each.tile}")

    def formats(self) -> None:
        for name, matrix in itertools.product(FORMATS, MATRICES):
            num_bytes, times = self.weights(name, matrix)[0].nbytes, []
            for num_rows in NUM_ROWS:
                us = self.product_us(name, matrix, num_rows, partial(self.multiply, matrix))
                times.append(f"{us:.2f} us ({num_bytes / us / 1e6:.2f} TB/s)")
            print(f"{name} {matrix}, {' / '.join(map(str, NUM_ROWS))} rows: {', '.join(times)}")

    @staticmethod
    def multiply(matrix: str, x: Any, weight: Any) -> Any:
        activation = activation_of(matrix)
        return weight.matmul(x) if activation is None else weight.gated(x, activation)

    def many(self) -> None:
        for matrix, num_rows in itertools.product(("qkv", "gate_up"), (128, 256, 512, 2048)):
            self.many_rows(matrix, num_rows)

    def many_rows(self, matrix: str, num_rows: int) -> None:
        from quire.kernels.cuda.gemm.tiled import Tile, dequantize, multiply

        torch, weight = self.torch, self.weights("int4", matrix)[0]
        dense = torch.empty(weight.shape, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(num_rows, weight.shape[1], device="cuda", dtype=torch.bfloat16)
        ways = {
            "bf16": lambda: torch.mm(x, dense.T),
            "dequantize": lambda: dequantize(weight.matrix, dense),
            "workspace": lambda: weight._dequantized_product(x),
            "codes": lambda: multiply(x, weight.matrix, Tile(64, 4, 3, 1)),
        }
        times = {way: round(1e3 * self.time_ms(body)) for way, body in ways.items()}
        print(f"int4 {matrix} {num_rows} rows, us:", times)

    def layers(self) -> None:
        for num_rows in NUM_ROWS:
            x = self.torch.randn(num_rows, 4096, device="cuda", dtype=self.torch.bfloat16)
            times = {name: self.time_ms(partial(self.run_layers, name, x)) for name in ("bf16", *FORMATS)}
            print(f"32 layers, {num_rows} rows, ms:", {name: round(ms * 32 / LAYERS, 3) for name, ms in times.items()})

    def run_layers(self, name: str, x: Any) -> None:
        from quire.kernels.cuda.norm import rms_norm

        norm = self.plain("norm")[0]
        for layer in range(LAYERS):
            h = rms_norm(x, norm, 1e-5)
            self.product(name, "qkv", layer, h)
            h = rms_norm(self.product(name, "o", layer, h), norm, 1e-5)
            self.product(name, "down", layer, self.product(name, "gate_up", layer, h))

    def product(self, name: str, matrix: str, layer: int, x: Any) -> Any:
        from quire.kernels.cuda.gemm import skinny

        if name != "bf16":
            return self.multiply(matrix, x, self.weights(name, matrix)[layer])
        weight = self.plain(matrix)[layer % 4]
        return skinny.gated_linear(x, weight, "silu") if activation_of(matrix) else skinny.linear(x, weight)

    @cache  # noqa: B019  one object
    def plain(self, matrix: str) -> list[Any]:
        """Four, more than fit into the second cache."""
        shape = MATRICES.get(matrix, (4096,))
        return [self.torch.randn(shape, device="cuda", dtype=self.torch.bfloat16) for _ in range(4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=PARTS)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--share", help=argparse.SUPPRESS)  # a child: which of how many shares it compiles
    options = parser.parse_args()
    if options.share:
        compile_share(*map(int, options.share.split(",")))
        return
    if unknown := set(options.only.split(",")) - set(PARTS.split(",")):
        parser.error(f"--only has {sorted(unknown)[0]!r}; the parts are {PARTS}")
    compile_all()
    if options.compile_only:
        return
    bench = Bench()
    for part in options.only.split(","):
        getattr(bench, part)()


if __name__ == "__main__":
    main()
