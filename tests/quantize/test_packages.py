"""Other packages load what `quire quantize` writes, where they are installed: transformers, compressed-tensors,
bitsandbytes and the tools of llama.cpp."""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire.config import EngineConfig
from quire.engine.client import InProcess
from quire.engine.prompt_logits import prompt_logits
from quire.quantize.job import quantize
from quire.quantize.made import Settings
from quire.quantize.target import parse_target
from quire.weights.safetensors import SafetensorsFiles
from tests.quantize.unpack import dense_of
from tests.tools.tiny_models import tiny_text_gguf

pytestmark = pytest.mark.cpu

TEXT = "The quick brown fox, 12 times: jumps over the lazy dog?\n"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text_gguf(tmp_path_factory.mktemp("source") / "tiny.gguf")


def make(source: Path, to: str, directory: Path) -> Path:
    target = parse_target(to)
    window = 64 if target.calibrates else None
    return quantize(source, Settings(target, max_tokens=512, window=window), directory).path


def logits_of(directory: Path, ids: list[int]) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([ids])).logits[0].numpy()
    return logits


def test_transformers_loads_a_directory(source: Path, tmp_path: Path) -> None:
    directory = make(source, "f16", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with closing(InProcess(EngineConfig(model=str(source), max_len=128), source)) as client:
        ids = tokenizer(TEXT)["input_ids"]
        rows = np.concatenate(list(prompt_logits(client.engine, ids)))
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT
    np.testing.assert_allclose(logits_of(directory, ids)[:-1], rows, atol=0.02)


@pytest.mark.parametrize("to", ["int4", "int8", "fp8"])
def test_compressed_tensors_loads_the_values_that_were_written(source: Path, tmp_path: Path, to: str) -> None:
    """Logits of the quantized directory, and of a dense one with the values that the test unpacks."""
    pytest.importorskip("compressed_tensors")
    directory = make(source, to, tmp_path / "out")
    ids = AutoTokenizer.from_pretrained(directory)(TEXT)["input_ids"]
    atol = 0.2 if to == "fp8" else 0.02  # the inputs of float8 products are rounded too
    np.testing.assert_allclose(logits_of(directory, ids), logits_of(dense_copy(directory), ids), atol=atol)


def test_bitsandbytes_unpacks_the_values_that_were_written(source: Path, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    directory = make(source, "nf4", tmp_path / "out")
    files, name = SafetensorsFiles(directory), "model.layers.1.mlp.gate_proj.weight"  # its rows are whole blocks
    stored = {key: torch.from_numpy(files.read(key).copy()) for key in files.tensors if key.startswith(f"{name}.")}
    state = functional.QuantState.from_dict(stored, device=torch.device("cpu"))
    values = functional.dequantize_4bit(torch.from_numpy(files.read(name).copy()), state).float().numpy()
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    np.testing.assert_allclose(values, dense_of(files, name, config), rtol=2e-3, atol=1e-7)  # the first are float16


def dense_copy(directory: Path) -> Path:
    from safetensors.numpy import save_file

    config, copy = json.loads((directory / "config.json").read_text()), directory.with_name("dense")
    shutil.copytree(directory, copy)
    quantized, files = config.pop("quantization_config"), SafetensorsFiles(directory)
    names = {name for name in files.tensors if name.endswith("weight")}
    names |= {name.removesuffix("_packed") for name in files.tensors if name.endswith("weight_packed")}
    save_file(
        {name: np.ascontiguousarray(dense_of(files, name, quantized)) for name in names}, copy / "model.safetensors"
    )
    (copy / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    return copy


@pytest.mark.parametrize("mix", ["q4_k_m", "q5_0", "q8_0"])
def test_llama_cpp_loads_a_file(tmp_path: Path, mix: str) -> None:
    tool = shutil.which("llama-perplexity")
    if tool is None:
        pytest.skip("llama-perplexity is not installed")
    unpadded = tiny_text_gguf(tmp_path / "tiny.gguf", num_padded=0)  # llama.cpp loads no padded vocabularies
    model, text = make(unpadded, f"gguf:{mix}", tmp_path / "out"), tmp_path / "text.txt"
    text.write_text(TEXT * 40)
    words = [tool, "-m", str(model), "-f", str(text), "-c", "64", "--chunks", "2", "-t", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "PPL" in done.stdout + done.stderr
