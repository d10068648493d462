"""`quire quantize` on families that are no Llama: what it makes answers alike, or it is refused before work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quire.errors import UnsupportedModel
from quire.quantize.awq import scale_layer
from quire.quantize.calibration import Calibration, InputStatistics
from quire.quantize.input_model import InputModel
from quire.quantize.job import native_ops, quantize
from quire.quantize.made import Settings
from quire.quantize.target import parse_target
from quire.weights.loader import opened
from quire.weights.safetensors import SafetensorsFiles
from tests.tools import family_cases, tiny_experts

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


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "granitemoe"])
@pytest.mark.parametrize("to", ["int8", "gguf:q8_0"])
def test_mixtures_are_refused_before_work(tmp_path: Path, name: str, to: str) -> None:
    source = tiny_experts.save(tiny_experts.transformers_model(name), tmp_path / "source")
    with pytest.raises(UnsupportedModel, match="dense models only"):
        quantize(source, Settings(parse_target(to)), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
