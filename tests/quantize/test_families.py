"""`quire quantize` on families that are no Llama: what it makes answers alike, or it is refused before work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quire.bench.compare import compare_models
from quire.config import EngineConfig
from quire.errors import UnsupportedModel
from quire.layers.source import Part
from quire.quantize.awq import scale_layer
from quire.quantize.calibration import Calibration
from quire.quantize.expert_inputs import ExpertInputs
from quire.quantize.input_model import InputModel
from quire.quantize.job import native_ops, quantize
from quire.quantize.made import Settings
from quire.quantize.statistics import InputStatistics
from quire.quantize.target import parse_target
from quire.text.tokenizers.tokenizer import load_tokenizer
from quire.weights.loader import opened
from quire.weights.safetensors import SafetensorsFiles
from tests.quantize.unpack import dense_of
from tests.text.vocabularies import byte_level
from tests.tools import expert_models, family_cases, tiny_experts
from tests.tools.tiny_models import tiny_text_gguf

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("name", ["gptj", "phi", "starcoder2", "cohere"])
def test_names_and_the_order_of_rows_stay_those_of_the_family(tmp_path: Path, name: str) -> None:
    """A conversion of a directory to float16 has each of its tensors."""
    source = family_cases.save(name, tmp_path / "source")
    made = quantize(source, Settings(parse_target("f16")), tmp_path / "out").directory
    before, after = SafetensorsFiles(source), SafetensorsFiles(made)
    assert set(after.tensors) == {key for key in before.tensors if not key.endswith((".bias_mask", "masked_bias"))}
    for key in after.tensors:
        assert np.allclose(after.read_floats(key), before.read_floats(key), rtol=1e-3, atol=1e-6), key


@pytest.mark.parametrize("name", ["olmo2", "phi", "cohere", "gptj", "starcoder2", "gemma2", "smollm3"])
def test_awqs_scales_do_not_change_what_a_layer_computes(tmp_path: Path, name: str) -> None:
    source = family_cases.save(name, tmp_path / "source")
    with opened(source) as (config, checkpoint):
        model = InputModel(config, checkpoint, native_ops())
        calibration = Calibration(model, [list(range(40))])
        calibration.hidden[:] = np.random.default_rng(0).normal(size=calibration.hidden.shape)
        matrices, before = model.matrices(0), calibration.hidden.copy()
        values = {part.name: model.read(part, matrix.cols) for matrix in matrices for part in matrix.parts}

        def run(keep_needs: str) -> list[InputStatistics]:
            calibration.hidden[:] = before
            for matrix in matrices:
                matrix.load([values[part.name] for part in matrix.parts])
            return calibration.run(0, keep_needs, keep=True)  # type: ignore[arg-type]

        found = run("moments")
        expected = calibration.hidden.copy()
        statistics = {p.name: each for matrix, each in zip(matrices, found, strict=True) for p in matrix.parts}
        for each in {id(each): each for each in found}.values():
            each.magnitudes *= np.geomspace(0.1, 10, len(each.magnitudes))  # far from all alike
        scale_layer(0, config, values, model.vectors(0), statistics, 16)
        run("nothing")
        assert np.allclose(calibration.hidden, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3")
IN_ONE_TENSOR = ("gpt_oss", "granitemoe")  # all experts of a directory's layer


def text_model(name: str, **changes: Any) -> Any:
    return expert_models.transformers_model(name, vocab_size=len(byte_level()["tokenizer.ggml.tokens"]), **changes)


def text_gguf(name: str, path: Path) -> Path:
    vocabulary = byte_level()
    types = np.array(vocabulary["tokenizer.ggml.token_type"], np.int32)
    return tiny_experts.save_gguf(text_model(name), name, path, more=vocabulary | {"tokenizer.ggml.token_type": types})


def text_directory(name: str, directory: Path, **changes: Any) -> Path:
    expert_models.save(text_model(name, **changes), directory)
    tokenizer = load_tokenizer(tiny_text_gguf(directory.parent / "tokenizer.gguf")).backend.to_str()
    (directory / "tokenizer.json").write_text(tokenizer)
    return directory


def few_tokens(to: str) -> Settings:
    target = parse_target(to)
    return Settings(target, max_tokens=1024, window=64 if target.calibrates else None)


def kl_of(source: Path, made: Path) -> float:
    comparison = compare_models(
        EngineConfig(model=str(source), max_len=96), EngineConfig(model=str(made), max_len=96), max_tokens=300
    )
    return comparison.kl.mean


@pytest.mark.parametrize("name", [*MIXTURES, *IN_ONE_TENSOR])
@pytest.mark.parametrize(("to", "limit"), [("gguf:q8_0", 1e-4), ("gguf:q4_0", 0.04)])
def test_mixtures_in_gguf_files(tmp_path: Path, name: str, to: str, limit: float) -> None:
    """The tensors are those of the source by gguf's reader, experts and heads in order, and routers stay float32."""
    source = text_gguf(name, tmp_path / "source.gguf")
    made = quantize(source, few_tokens(to), tmp_path / "out").path
    before, after = ({each.name: each for each in gguf.GGUFReader(path).tensors} for path in (source, made))
    assert set(before) == set(after)
    for key, tensor in after.items():
        values = before[key].data
        found = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(values.shape)
        assert np.square(found - values).mean() <= limit * np.square(values).mean(), key
    types = {key.split(".")[-2]: each.tensor_type.name for key, each in after.items() if key.endswith(".weight")}
    assert types["ffn_gate_inp"] == "F32"
    assert types["ffn_down_exps"] == to.partition(":")[2].upper()
    assert np.isfinite(kl_of(source, made))


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("to", ["int8", "fp8", "nf4"])
def test_mixtures_in_directories(tmp_path: Path, name: str, to: str) -> None:
    """The values of each matrix, unpacked by formulas of the test. Routers are as they were."""
    source = text_directory(name, tmp_path / "source")
    made = quantize(source, few_tokens(to), tmp_path / "out").directory
    before, after = SafetensorsFiles(source), SafetensorsFiles(made)
    section = json.loads((made / "config.json").read_text())["quantization_config"]
    num_quantized = 0
    for key in before.tensors:
        values, found = before.read_floats(key), dense_of(after, key, section)
        error = np.square(found - values).mean() / max(np.square(values).mean(), 1e-30)
        is_quantized = values.ndim == 2 and ("_proj" in key or ".experts." in key)
        num_quantized += is_quantized
        limit = {"nf4": 0.02, "fp8": 0.002, "int8": 1e-4}[to] if is_quantized else 1e-12
        assert (error > 1e-9) == is_quantized, key
        assert error <= limit, key
    assert num_quantized > 40
    routers = [key.removesuffix(".weight") for key in before.tensors if key.endswith("gate.weight")]
    assert set(routers) <= set(section.get("ignore", section.get("llm_int8_skip_modules")))


@pytest.mark.parametrize(
    ("name", "to"), [("mixtral", "int4"), ("deepseek_v3", "int4"), ("qwen2_moe", "awq"), ("qwen3_moe", "gptq")]
)
def test_mixtures_with_calibration_in_directories(tmp_path: Path, name: str, to: str) -> None:
    """Every matrix was calibrated, and its outputs have an error below 2%."""
    source = text_directory(name, tmp_path / "source", **({"kv_lora_rank": 64} if name == "deepseek_v3" else {}))
    made = quantize(source, few_tokens(to), tmp_path / "out")
    assert bool(made.rare_experts) == (name in ("deepseek_v3", "qwen3_moe"))  # by their routers' random numbers
    assert all(name.startswith("model.layers.") for name in made.rare_experts)
    assert kl_of(source, made.directory) < 0.3
    assert all(part.of_outputs and part.error < 0.02 for part in made.parts), max(part.error for part in made.parts)


def test_experts_are_calibrated_with_their_own_inputs(tmp_path: Path) -> None:
    """Second moments of two experts differ, and are those of the rows that the router sends to them."""
    source = text_directory("mixtral", tmp_path / "source")
    with opened(source) as (config, checkpoint):
        model = InputModel(config, checkpoint, native_ops())
        calibration = Calibration(model, [list(range(60)) * 20])
        calibration.hidden[:] = np.random.default_rng(0).normal(size=calibration.hidden.shape)
        for matrix in model.matrices(0):
            matrix.load(model.read(part, matrix.cols) for part in matrix.parts)
        inputs = next(each for each in calibration.run(0, "moments", keep=True) if isinstance(each, ExpertInputs))
        found = {expert: inputs.of_input(expert) for expert in range(5)}
        common = sorted(set(found) - inputs.rare)
        assert len(common) >= 2
        assert all(found[expert].num_rows == 1200 for expert in inputs.rare)  # those of all tokens
        assert 128 * len(common) <= sum(found[expert].num_rows for expert in common) <= 2 * 1200
        first, second = (found[expert].moments for expert in common[:2])
        assert first is not None
        assert second is not None
        assert not np.allclose(first, second, rtol=0.01)
        names = (f"model.layers.0.mlp.experts.1.{kind}_proj.weight" for kind in ("gate", "up"))
        gate, up = (model.read(Part(name, 96, expert=(1, 5)), 64) for name in names)
        assert inputs.of_inner(1, gate, up).num_rows == found[1].num_rows


@pytest.mark.parametrize("name", IN_ONE_TENSOR)
def test_experts_in_one_tensor_of_a_directory_are_refused_before_work(tmp_path: Path, name: str) -> None:
    source = expert_models.save(expert_models.transformers_model(name), tmp_path / "source")
    with pytest.raises(UnsupportedModel, match=r"stored together with other|in one tensor"):
        quantize(source, Settings(parse_target("int8")), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_mixture_that_was_interrupted_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = text_gguf("qwen3_moe", tmp_path / "source.gguf")
    whole = quantize(source, few_tokens("gguf:q4_0"), tmp_path / "whole").path.read_bytes()
    steps = []

    def stop_at_two(done: int, total: int | None) -> None:
        steps.append(done)
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(source, few_tokens("gguf:q4_0"), tmp_path / "out", stop_at_two)
    assert quantize(source, few_tokens("gguf:q4_0"), tmp_path / "out").path.read_bytes() == whole
