"""Every kernel of a step compiles for a GPU, on a machine that has none and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from quire.config import EngineConfig
from quire.engine import precompile as parent
from quire.engine.build import build_engine
from quire.engine.precompile_codes import find_codes
from quire.kernels.cuda.launch.precompile import CodesOf, Model, share
from quire.weights import tiles
from quire.weights.config import read_config
from quire.weights.json_config import config_from_json
from tests.weights.schemes.packed import quantized_model

pytestmark = pytest.mark.cpu

SHAPES = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "eos_token_id": 1, "bos_token_id": 0,
}  # fmt: skip
# A child, but for the C modules that launch kernels: linking those takes a driver.
CHILD = """
import json, sys
from quire.kernels.cuda.launch import precompile
from quire.kernels.cuda.launch import torch_stub
model = precompile.read_model(json.loads(sys.argv[1]))
torch_stub.install(model.capability)
compiled = []
precompile.compile_only(model.capability, lambda source, metadata: compiled.append(metadata.name))
for task in precompile.KernelCalls(model).tasks():
    if getattr(task, "func", task).__name__ not in sys.argv[2:]:
        task()
print(json.dumps(compiled))
"""


# ALiBi, LayerNorms, and an MLP without a gate.
BLOOM = {"model_type": "bloom", "hidden_size": 256, "n_layer": 2, "n_head": 4, "vocab_size": 512}


def compile_all(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shapes: dict[str, object] = SHAPES,
    skipped: Sequence[str] = (),
    **options: object,
) -> list[str]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    config = EngineConfig(device="cuda", **options)  # type: ignore[arg-type]
    fields = parent.describe(config, config_from_json(shapes, {}, where="here"), (9, 0))
    child = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(fields), *skipped], capture_output=True, check=False, text=True
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout)


def test_kernels_of_a_classic_compile_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile_all(tmp_path, monkeypatch, BLOOM, ["draw", "serve"])
    assert {"_norm", "_activate", "_store", "_prefill", "_decode"} <= set(compiled)
    assert not {"_rope_store", "_varlen"} & set(compiled)


# Sinks and experts, in layers with and without a window; latents, shared experts, groups of experts.
GPT_OSS = SHAPES | {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2,
    "sliding_window": 32,
}  # fmt: skip
DEEPSEEK = SHAPES | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 4,
    "kv_lora_rank": 128, "q_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": 128,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("shapes", "wanted", "absent"),
    [
        (GPT_OSS, {"_route", "_experts", "_add_outputs", "_sort_pairs", "_one_gate_up", "_prefill"}, {"_varlen"}),
        (DEEPSEEK, {"_route", "_experts", "_one_down", "_latent", "_head_linear", "_rope_store_latent"}, {"_decode"}),
    ],
)  # fmt: skip
def test_kernels_of_experts_compile_for_hopper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shapes: dict[str, object], wanted: set[str], absent: set[str]
) -> None:
    compiled = compile_all(tmp_path, monkeypatch, shapes, ["draw", "serve", "multiply"])
    assert wanted <= {*compiled}
    assert not absent & {*compiled}


def test_all_kernels_compile_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile_all(tmp_path, monkeypatch)
    assert {
        "_varlen",
        "_decode",
        "_skinny",
        "_gemv",
        "_norm",
        "_rope_store",
        "_pick",
        "_argmax",
        "_upload",
        "_fill_last_tokens",
    } <= {*compiled}
    assert compiled.count("_decode") == 2
    assert not {"_verify", "_accept"} & {*compiled}, "nothing speculates"


def test_kernels_of_drafts_compile_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile_all(tmp_path, monkeypatch, speculate="suffix")
    assert {"_accept", "_move", "_place", "_fill", "_keep"} <= {*compiled}
    assert compiled.count("_verify") == 4, (
        "of chains for few tokens, and for many in rows of up to 8; of trees likewise"
    )


def test_exact_kernels_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile_all(tmp_path, monkeypatch, exact=True)
    assert {"_prefill", "_single", "_skinny", "_accept"} <= {*compiled}
    assert compiled.count("_single") == 2, "of trees too"
    assert not {"_varlen", "_decode", "_verify"} & {*compiled}


@pytest.mark.parametrize("exact", [False, True])
def test_kernels_of_codes_compile_for_hopper(exact: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = ["draw", "serve", "attend_to_prompts", "attend_to_singles", "normalize", "multiply", "accept", "draft"]
    options = {"weights": "random", "quantize": "int4", "exact": exact}
    compiled = compile_all(tmp_path, monkeypatch, SHAPES, others, **options)
    assert compiled.count("_tiled") >= 6
    assert ("_dequantize" in compiled) != exact


@pytest.mark.parametrize("method", ["awq", "gptq 4 order", "fp8 channel"])
def test_matrices_of_codes_are_found_in_headers(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "is_fast", lambda format: True)  # the files have groups of 32
    path, plain = quantized_model(tmp_path, method)
    model = read_config(path)
    codes, has_plain = find_codes(EngineConfig(), model, path)
    # Parts that are no whole tiles of 64 rows stay apart: gate and up of 96.
    sizes = {(each["num_out"], each["num_in"]) for each in codes}
    assert sizes == {(32, 64), (64, 64), (96, 64), (64, 96)}
    assert not has_plain
    assert all(each.keys() == CodesOf.__dataclass_fields__.keys() for each in codes)
    assert find_codes(EngineConfig(), model, plain) == ([], True)
    assert find_codes(EngineConfig(quantize="int8"), model, plain)[1] is False


def test_what_a_child_is_told_describes_the_model() -> None:
    config = EngineConfig(device="cuda", kv_dtype="fp8", block_size=32)
    fields = parent.describe(config, config_from_json(SHAPES, {}, where="here"), (8, 0))
    model = Model(**fields)  # type: ignore[arg-type]
    assert asdict(model).keys() == fields.keys()
    assert (model.dtype, model.kv_dtype, model.block_size, model.num_kv_heads) == ("bfloat16", "fp8", 32, 2)
    assert parent.describe(config, config_from_json(SHAPES, {}, where="here"), (7, 5))["dtype"] == "float16"


def test_children_share_all_tasks() -> None:
    tasks = [lambda: None for _ in range(12)]
    shares = [share(tasks, index, 8) for index in range(8)]
    assert sorted(map(id, (task for one in shares for task in one))) == sorted(map(id, tasks))
    assert shares[0] == tasks[:1]


def test_without_a_gpu_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "find_capability", lambda: None)
    monkeypatch.setattr(parent, "start_child", lambda *_: pytest.fail("a child was started"))
    parent.precompile(EngineConfig(), tmp_path).wait()
    parent.precompile(EngineConfig(device="cpu"), tmp_path).wait()


def test_children_end_with_an_engine_that_cannot_be_built() -> None:
    child = sleeping_child()
    precompilation = parent.Precompilation([child])
    precompilation.cancel()
    assert child.returncode is not None
    precompilation.cancel()


def sleeping_child() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def test_children_that_hang_share_one_deadline(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(parent, "TIMEOUT_S", 0.2)
    children = [sleeping_child() for _ in range(3)]
    parent.Precompilation(children).wait()
    assert all(child.returncode is not None for child in children), "ended and reaped"
    assert caplog.text.count("took more than 0.2 s") == 1


def test_a_system_without_room_for_children_starts_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(model: bytes, index: int, count: int) -> subprocess.Popen[bytes]:
        if index == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(sleeping_child())
        return started[-1]

    (tmp_path / "config.json").write_text(json.dumps(SHAPES))
    monkeypatch.setattr(parent, "find_capability", lambda: (9, 0))
    monkeypatch.setattr(parent, "usable_cores", lambda: 16)
    monkeypatch.setattr(parent, "start_child", start)
    precompilation = parent.precompile(EngineConfig(), tmp_path)
    assert len(started) == 2
    assert all(child.returncode is not None for child in started)
    assert "not compiled ahead, so the start takes longer" in caplog.text
    precompilation.wait()
    precompilation.cancel()


def test_an_engine_on_a_cpu_waits_for_no_compiler(default_model: Path) -> None:
    child = sleeping_child()
    build_engine(EngineConfig(device="cpu", kv_memory=0.1), default_model, None, parent.Precompilation([child]))
    assert child.returncode is not None


def test_a_child_that_fails_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "raise SystemExit('no room')"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    parent.Precompilation([child]).wait()
    assert "Compiling kernels ahead failed, so the start takes longer: no room" in caplog.text
