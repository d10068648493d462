"""The sampling parameters that a model's files name, and what stands in where they name none."""

from __future__ import annotations

import json

import pytest

from quire.errors import BadModelFile
from quire.models.config import SamplingDefaults
from quire.weights.config import read_config
from quire.weights.sampling import sampling_from_gguf, sampling_from_json
from tests.tools.tiny_models import tiny_directory, tiny_gguf

pytestmark = pytest.mark.cpu

OURS = {"temperature": 0.7, "top_p": 0.95, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, OURS),
        ({"eos_token_id": 2, "do_sample": True, "temperature": None}, OURS),
        ({"temperature": 0.6, "top_p": 0.9}, NEUTRAL | {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": True, "top_k": 64, "top_p": 0.95}, NEUTRAL | {"top_k": 64, "top_p": 0.95}),
        ({"repetition_penalty": 1.05}, OURS | {"repetition_penalty": 1.05}),
        ({"top_k": -1, "min_p": 0.1}, NEUTRAL | {"min_p": 0.1}),
        ({"do_sample": False}, OURS | {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.6}, NEUTRAL | {"temperature": 0.0}),
    ],
    ids=repr,
)
def test_from_a_generation_config(generation, expected) -> None:
    assert sampling_from_json(generation).as_params() == expected


def test_from_gguf_metadata() -> None:
    metadata = {
        "general.sampling.temp": 0.6000000238418579,  # as float32 stores 0.6
        "general.sampling.top_k": 20,
        "general.sampling.penalty_repeat": 1.0499999523162842,
    }
    expected = NEUTRAL | {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    assert sampling_from_gguf(metadata).as_params() == expected
    assert sampling_from_gguf({}).as_params() == OURS


@pytest.mark.parametrize(
    "generation",
    [{"temperature": -1}, {"temperature": "hot"}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": 1.5}, {"top_k": -2},
     {"min_p": 2}, {"repetition_penalty": 0}, {"do_sample": "yes"}, {"temperature": float("nan")}],
    ids=repr,
)  # fmt: skip
def test_a_value_that_cannot_be_is_named(generation) -> None:
    with pytest.raises(BadModelFile, match=next(iter(generation))):
        sampling_from_json(generation)


def test_both_formats_carry_them(tmp_path) -> None:
    directory = tiny_directory(tmp_path / "directory")
    assert read_config(directory).sampling == SamplingDefaults()
    (directory / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "top_k": 5}))
    found = read_config(directory).sampling
    assert found.as_params() == NEUTRAL | {"temperature": 0.3, "top_k": 5}
    assert found.from_model
    assert not read_config(tiny_gguf(tmp_path / "plain.gguf")).sampling.from_model
