"""Engines on the C++ kernels: several in a process, in threads, after a fork, on any number of threads; and what is
said at load where the kernels do not fit, are not there or are not wanted."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.async_client import AsyncClient
from quire.engine.client import start_engine
from quire.engine.engine import Engine
from quire.errors import InvalidParams, UnsupportedModel
from quire.kernels.cpu import native
from quire.quant.ggml_types import GGMLType
from tests.tools.native import ISAS
from tests.tools.tiny_models import tiny_config, tiny_directory, tiny_gguf, tiny_weights, write_directory

pytestmark = pytest.mark.cpu

PROMPTS = [[3, 14, 15, 92, 65], [35, 8], list(range(40))]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("gemma"), "gemma3")


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of 8 dimensions."""
    weights = tiny_weights("llama")
    for name, weight in weights.items():
        if any(part in name for part in ("q_proj", "k_proj", "v_proj")):
            weights[name] = weight[: len(weight) // 2].contiguous()
        if "o_proj" in name:
            weights[name] = weight[:, : weight.shape[1] // 2].contiguous()
    return write_directory(tmp_path_factory.mktemp("narrow"), tiny_config("llama") | {"head_dim": 8}, weights)


def build(path: Path, **options: Any) -> Engine:
    return start_engine(EngineConfig(**({"kernels": "native", "num_blocks": 64} | options)), path)


def requests(prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Request]:
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    return [Request(str(number), prompt, params, max_tokens=10) for number, prompt in enumerate(prompts)]


def answer(engine: Engine) -> list[list[int]]:
    asked = requests()
    for request in asked:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return [request.tokens[request.num_prompt :] for request in asked]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_answers_alike(llama: Path, threads: int) -> None:
    engine = build(llama, threads=threads)
    assert f"own kernels ({ISAS[0]}) on {threads} thread" in engine.info.summary
    assert "bfloat16 cache" in engine.info.summary
    assert answer(engine) == answer(build(llama))


def test_torch_and_own_kernels_answer_alike(llama: Path, gemma: Path) -> None:
    """In float32 there is nothing to lose: on tiny models the likeliest token is far enough from the next."""
    for path in (llama, gemma):
        plain = build(path, kernels="torch")
        assert "torch in float32 on cpu" in plain.info.summary
        assert answer(build(path, kv_dtype="float32")) == answer(plain)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "fp8"])
def test_caches_of_every_type(llama: Path, kind: str) -> None:
    engine = build(llama, kv_dtype=kind)
    assert f"{kind} cache" in engine.info.summary
    assert all(len(tokens) == 10 for tokens in answer(engine))


def test_smaller_caches_are_smaller(llama: Path) -> None:
    sizes = [build(llama, kv_dtype=kind).info.cache.block_bytes for kind in ("float32", "bfloat16", "int8", "fp8")]
    assert sizes[0] == 2 * sizes[1]
    assert sizes[2] < 0.7 * sizes[1]
    assert sizes[3] == sizes[2]


@pytest.mark.parametrize(("quantize", "bits"), [("int8", 8.5), ("int4", 5.0)])
def test_quantize_rounds_plain_weights(llama: Path, quantize: str, bits: float) -> None:
    engine, plain = build(llama, quantize=quantize), build(llama)
    assert engine.info.weight_bytes < plain.info.weight_bytes * (bits + 2.5) / 32
    assert all(len(tokens) == 10 for tokens in answer(engine))


def test_quantized_files_stay_as_they_are(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "model.gguf", "llama", GGMLType.Q8_0)
    engine = build(path)
    assert answer(engine) == answer(build(path, threads=1))
    assert engine.info.weight_bytes < 1.2 * path.stat().st_size


def test_two_engines_take_turns(llama: Path, gemma: Path) -> None:
    expected = [answer(build(path)) for path in (llama, llama, gemma)]
    engines = [build(path) for path in (llama, llama, gemma)]
    asked = [requests() for _ in engines]
    for engine, own in zip(engines, asked, strict=True):
        for request in own:
            engine.add(request)
    while any(engine.has_work for engine in engines):
        for engine in engines:
            if engine.has_work:
                engine.step()
    assert [[request.tokens[request.num_prompt :] for request in own] for own in asked] == expected


def test_two_engines_in_two_threads_at_once(llama: Path, gemma: Path) -> None:
    expected = [answer(build(path)) for path in (llama, gemma)]
    engines = [build(llama, prefix_cache=False), build(gemma, prefix_cache=False)]

    def repeat(engine: Engine) -> list[list[list[int]]]:
        return [answer(engine) for _ in range(5)]

    with ThreadPoolExecutor(2) as threads:
        for found, own in zip(threads.map(repeat, engines), expected, strict=True):
            assert found == [own] * 5


def test_an_engine_in_a_thread(llama: Path) -> None:
    expected = answer(build(llama))
    client = AsyncClient(EngineConfig(kernels="native", num_blocks=64), llama)

    async def ask(request: Request) -> list[int]:
        return [token async for updates in client.submit([request]) for update in updates for token in update.tokens]

    async def ask_all() -> list[list[int]]:
        return await asyncio.gather(*map(ask, requests()))

    assert asyncio.run(ask_all()) == expected
    client.close()


FORK = """
import os, signal, sys
from pathlib import Path
import torch
from tests.kernels.native.test_engine_native import answer, build

def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            os._exit(0 if work() else 1)
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0

path = Path(sys.argv[1])
in_child(lambda: answer(build(path)))                      # after import
engine = build(path, prefix_cache=False)
expected = answer(engine)
in_child(lambda: answer(engine) == expected)               # the engine that has run, in the child
in_child(lambda: answer(build(path)) == expected)          # one that the child makes
assert answer(engine) == expected                          # and the parent's goes on
print("done")
"""


def test_fork_after_import_and_after_a_run(llama: Path) -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", FORK, str(llama)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root, check=False)
    assert (child.returncode, child.stdout) == (0, "done\n"), child.stderr


def test_heads_that_do_not_fit_are_refused_at_load(narrow: Path) -> None:
    with pytest.raises(UnsupportedModel, match="multiple of 16 dimensions, at most 512, and this model's have 8"):
        build(narrow)


def test_heads_that_do_not_fit_are_left_to_torch(narrow: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="quire.engine"):
        engine = build(narrow, kernels="auto")
    assert "this model's have 8; torch's are used" in caplog.text
    assert "torch in float32 on cpu" in engine.info.summary
    assert all(len(tokens) == 10 for tokens in answer(engine))


def test_other_dtypes_are_refused_or_left_to_torch(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UnsupportedModel, match=r"kernels is 'native', but .* float32, not in bfloat16"):
        build(llama, dtype="bfloat16")
    with caplog.at_level(logging.WARNING, logger="quire.engine"):
        engine = build(llama, kernels="auto", dtype="bfloat16")
    assert "not in bfloat16; torch's are used" in caplog.text
    assert "torch in bfloat16 on cpu" in engine.info.summary


def test_kernels_that_are_missing_are_said_to_be(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = answer(build(llama, kernels="torch"))
    monkeypatch.setattr(native, "load", lambda: native.Missing("they were not built."))
    with caplog.at_level(logging.WARNING, logger="quire.engine"):
        engine = build(llama, kernels="auto")
    assert "they were not built." in caplog.text
    assert answer(engine) == expected
    with pytest.raises(UnsupportedModel, match="kernels is 'native', but they were not built"):
        build(llama)


def test_an_extension_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError("wrong ELF class")

    monkeypatch.setattr(native, "import_module", fail)
    missing = native.load()
    assert isinstance(missing, native.Missing)
    assert "wrong ELF class" in missing.reason or "compiler" in missing.reason


def test_an_older_cpu_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kernels import isa

    cpu = isa.prepare()
    assert native.usable(cpu, []) == []
    assert [isa for isa in native.NEEDS if native.usable(cpu, [isa])] == ISAS
    monkeypatch.setattr(native, "usable", lambda cpu, built: [])
    found = native.find(cpu)
    assert isinstance(found, native.Missing)
    assert ("NEON" if "neon" in ISAS else "AVX2") in found.reason


def test_quantize_without_own_kernels_is_refused(llama: Path) -> None:
    with pytest.raises(InvalidParams, match="quantize is 'int8', which needs quire's own kernels"):
        build(llama, kernels="torch", quantize="int8")


@pytest.mark.parametrize("name", ["fp8", "nf4"])
def test_rounding_that_only_gpus_have_is_refused_on_a_cpu(llama: Path, name: str) -> None:
    with pytest.raises(InvalidParams, match=f"quantize is '{name}', which needs a GPU; on a CPU use"):
        build(llama, quantize=name)


def test_quantize_of_a_quantized_file_is_refused(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "model.gguf", "llama", GGMLType.Q8_0)
    with pytest.raises(InvalidParams, match="quantize is 'int4', but the model's matrices are quantized already"):
        build(path, quantize="int4")


@pytest.mark.parametrize(
    ("kernels", "kind", "reason"),
    [
        ("torch", "int8", "needs quire's own CPU kernels"),
        ("torch", "fp8", "needs quire's own kernels"),
        ("native", "float16", "quire's own CPU kernels lack"),
    ],
)
def test_a_cache_that_the_kernels_lack_is_refused(llama: Path, kernels: str, kind: str, reason: str) -> None:
    with pytest.raises(InvalidParams, match=f"kv_dtype is '{kind}', which {reason}"):
        build(llama, kernels=kernels, kv_dtype=kind)


def test_exact_needs_own_kernels(llama: Path) -> None:
    assert answer(build(llama, exact=True)) == answer(build(llama))
    with pytest.raises(InvalidParams, match="exact needs quire's own kernels"):
        build(llama, kernels="torch", exact=True)


def test_torch_keeps_a_half_precision_cache_too(llama: Path) -> None:
    engine = build(llama, kernels="torch", kv_dtype="bfloat16")
    assert engine.runner.cache.layers[0].k.dtype == torch.bfloat16
    assert all(len(tokens) == 10 for tokens in answer(engine))


@pytest.mark.parametrize(("field", "value"), [("kernels", "cuda"), ("quantize", "int2"), ("kv_dtype", "int4")])
def test_wrong_options_are_refused(field: str, value: str) -> None:
    with pytest.raises(InvalidParams, match=f"{field} is '{value}'"):
        EngineConfig(**{field: value})


def test_torch_is_left_one_thread_beside_own_kernels(llama: Path) -> None:
    build(llama, threads=5)
    assert torch.get_num_threads() == 1
    build(llama, kernels="torch", threads=2)
    assert torch.get_num_threads() == 2
