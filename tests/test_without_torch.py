"""The CPU path without torch: every module of it is imported and used where `import torch` fails, and with it what only
its extra installs.

A folder with a `torch.py` that raises stands in front of the real one, for this process's children too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.running import Running
from tests.test_imports import MODULES
from tests.tools.tiny_models import tiny_text_gguf

NEEDS_TORCH = {
    "engine.gpu_batch", "engine.gpu_drafter", "engine.gpu_graphs", "engine.gpu_runner", "engine.gpu_sampler",
    "engine.profile_run", "engine.torch_runner", "kernels.cpu.ops", "kernels.philox", "kernels.reference",
    "kernels.reference_experts", "kernels.reference_latent", "kernels.reference_sampling", "kernels.torch_arrays",
    "quant.code_blocks", "quant.dense", "quant.gguf_blocks", "quant.unpack",
    "train.dialogues", "train.evaluation", "train.features", "train.files", "train.heads.block", "train.heads.eagle",
    "train.heads.exit", "train.heads.head", "train.heads.medusa", "train.loop", "train.report", "train.run",
    "train.target", "train.vocabulary", "weights.dense_source",
    "quant.gguf_codes", "quant.mxfp4_codes", "quant.tile_packing", "quant.tile_rounding", "quant.tiled",
    "weights.random_tensors", "weights.random_tiles", "weights.tiled_source",
}  # fmt: skip

USE = """
from quire import LLM, BeamSearchParams, SamplingParams
from quire.core.structured import StructuredOutputs

with LLM(max_len=512, kv_memory=0.5, swap_memory=0.1) as llm:
    greedy, drawn = SamplingParams(temperature=0.0, max_tokens=8), SamplingParams(seed=1, top_p=0.9, max_tokens=8, n=2)
    heavy = SamplingParams(
        temperature=0.0, max_tokens=8, logprobs=3, prompt_logprobs=2, repetition_penalty=1.2, logit_bias={5: 1.0},
        bad_words=["zebra"], min_tokens=2,
    )
    outputs = llm.generate(["The capital of France is"] * 3, [greedy, drawn, heavy])
    assert "Paris" in outputs[0].outputs[0].text, outputs[0].outputs[0].text
    assert len(outputs[1].outputs) == 2
    assert outputs[2].outputs[0].logprobs and outputs[2].prompt_logprobs
    assert len(llm.beam_search(["One two"], BeamSearchParams(beam_width=3, max_tokens=5))[0].sequences) == 3
    bound = SamplingParams(temperature=0.0, max_tokens=8, structured_outputs=StructuredOutputs(regex="[0-9]{3}"))
    assert len(str(int(llm.generate(["A number: 7"], bound)[0].outputs[0].text))) <= 3
    assert llm.chat([{"role": "user", "content": "Hi"}], greedy)[0].outputs[0].text
    assert len(llm.score(["one two three"])[0].logprobs) > 0
"""


@pytest.fixture
def no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop is an extra too, and safetensors is in that of torch."""
    for name in ("torch", "safetensors", "uvloop"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{name}'\", name='{name}')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))


def run(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], input=text, capture_output=True, text=True, timeout=300)


@pytest.mark.cpu
def test_modules_of_the_cpu_path_load_no_torch(no_torch) -> None:
    names = [f"quire.{name}" for name in MODULES if name not in NEEDS_TORCH and not name.startswith("kernels.cuda")]
    names = [name for name in names if not name.endswith(("__main__", "."))]
    done = run("-c", "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)", *names)
    assert done.returncode == 0, done.stderr


@pytest.mark.cpu
@pytest.mark.parametrize("name", sorted(NEEDS_TORCH))
def test_the_others_do(no_torch, name: str) -> None:
    done = run("-c", f"import quire.{name}")
    assert re.search("No module named '(torch|safetensors)'", done.stderr), done.stderr


@pytest.mark.model
def test_the_offline_api(no_torch, default_model: Path) -> None:
    done = run("-c", USE)
    assert done.returncode == 0, done.stderr


@pytest.mark.model
@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "-p", "Hello", "--json"),
        ("chat",),
        ("bench", "offline"),
        ("compare", "smollm2:135m", "smollm2:135m"),
    ],
)
def test_commands(no_torch, default_model: Path, arguments: tuple[str, ...]) -> None:
    few = ("--max-tokens", "5")
    more = {"generate": few, "chat": few, "compare": few}.get(
        arguments[0], ("--batch", "2", "--prompt-tokens", "16", "--output-tokens", "4", "--repeats", "1", "--json")
    )
    done = run("-m", "quire", *arguments, *more, text="Hello\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.cpu
def test_quantize_from_and_to_safetensors(no_torch, tmp_path: Path) -> None:
    source, dense, awq = tiny_text_gguf(tmp_path / "tiny.gguf"), tmp_path / "dense", tmp_path / "awq"
    few = ("--report-tokens", "200")
    for arguments in (
        ("quantize", source, "--to", "f16", "-o", dense, *few),
        ("quantize", dense, "--to", "awq", "-o", awq, *few, "--max-tokens", "1024", "--window", "64"),
        ("generate", awq, "-p", "hello", "--max-tokens", "3", "--json"),
    ):
        done = run("-m", "quire", *map(str, arguments))
        assert done.returncode == 0, done.stderr
    assert (awq / "model.safetensors").is_file()
    assert done.stdout


@pytest.mark.server
def test_a_server(no_torch, default_model: Path) -> None:
    with Running() as server, server.client() as client:
        body = {
            "messages": [{"role": "user", "content": "Give me a number."}], "max_tokens": 40, "temperature": 0,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {
                "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}},
        }  # fmt: skip
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert isinstance(json.loads(answer.json()["choices"][0]["message"]["content"])["n"], int)


@pytest.mark.model
@pytest.mark.parametrize("option", ['kernels="torch"', 'device="cuda"'])
def test_what_needs_torch_says_so(no_torch, default_model: Path, option: str) -> None:
    """torch is there and cannot be imported. The error says how to install it, and the log why it was not used."""
    script = f"""
import logging
from quire import LLM
logging.basicConfig()
try:
    LLM({option})
except Exception as error:
    print(error)
"""
    done = run("-c", script)
    assert "is not installed. Install it with: pip install 'quire[torch]'" in done.stdout, done.stderr
    assert "torch is there, but it cannot be imported: No module named 'torch'" in done.stderr
