"""`quire quantize` as a whole, on a tiny model that reads text: every format, both kinds of files, interruptions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quire.bench.compare import compare_models
from quire.config import EngineConfig
from quire.errors import BadModelFile, InvalidParams, UnsupportedModel
from quire.quantize.job import quantize
from quire.quantize.made import Settings
from quire.quantize.target import parse_target
from quire.weights.gguf import GGUFFile
from quire.weights.safetensors import SafetensorsFiles
from tests.quantize.unpack import dense_of
from tests.tools.tiny_models import gguf_arrays, tiny_config, tiny_text_gguf, tiny_weights, write_directory

pytestmark = pytest.mark.cpu

DIRECTORIES = ("gptq", "gptq:8", "gptq:3", "gptq:2", "awq", "int4", "int8", "fp8", "nf4", "f16")
# The mean square of the error that rounding may leave, as a share of the values'.
ERRORS = {"gptq": 0.02, "gptq:3": 0.08, "gptq:2": 0.4, "awq": 0.02, "int4": 0.02, "nf4": 0.015, "fp8": 0.002}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text_gguf(tmp_path_factory.mktemp("source") / "tiny.gguf")


def settings(to: str, **more: object) -> Settings:
    target = parse_target(to)
    window = 64 if target.calibrates else None
    return Settings(target, max_tokens=1024, window=window, **more)  # type: ignore[arg-type]


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


@pytest.mark.parametrize("mix", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k_m", "f16"])
def test_gguf_files_are_loaded_and_answer_alike(source: Path, tmp_path: Path, mix: str) -> None:
    made = quantize(source, settings(f"gguf:{mix}", feedback=mix in ("q4_0", "q8_0", "f16")), tmp_path / "out")
    comparison = compare_models(EngineConfig(model=str(source)), EngineConfig(model=str(made.path)), max_tokens=300)
    assert comparison.kl.mean < {"q8_0": 1e-4, "f16": 1e-4}.get(mix, 0.02)
    assert comparison.kl.mean > 0
    assert not (tmp_path / "out.partial").exists()


def test_every_metadata_entry_is_kept(source: Path, tmp_path: Path) -> None:
    made = quantize(source, settings("gguf:q8_0"), tmp_path / "out")
    with GGUFFile(source) as before, GGUFFile(made.path) as after:
        for key in before.metadata:
            assert after.raw_metadata(key) == before.raw_metadata(key), key
        assert after.metadata["general.file_type"] == 7
        assert set(after.tensors) == set(before.tensors)


@pytest.mark.parametrize("to", DIRECTORIES)
def test_directories_hold_the_matrices(source: Path, tmp_path: Path, to: str) -> None:
    """The values, unpacked by formulas of the test, in the names and the order of rows of Hugging Face."""
    made = quantize(source, settings(to), tmp_path / "out")
    files = SafetensorsFiles(made.directory)
    config = json.loads((made.directory / "config.json").read_text())
    wanted = tiny_weights("llama")
    awq_scaled = ("norm", "_proj")
    for name, weight in wanted.items():
        if name == "model.embed_tokens.weight" or (to == "awq" and any(word in name for word in awq_scaled)):
            continue
        values = dense_of(files, name, config.get("quantization_config"))
        error = float(np.square(values - weight.numpy()).mean() / np.square(weight.numpy()).mean())
        assert error <= (ERRORS.get(to, 1e-4) if name.endswith("_proj.weight") else 1e-6), name
    assert config["model_type"] == "llama"
    assert config.get("quantization_config", {}).get("group_size", made.group) == made.group


def test_awq_changes_norms_and_matrices_so_that_their_products_stay(source: Path, tmp_path: Path) -> None:
    made = quantize(source, settings("awq"), tmp_path / "out")
    files = SafetensorsFiles(made.directory)
    config = json.loads((made.directory / "config.json").read_text())["quantization_config"]
    wanted = {name: weight.numpy() for name, weight in tiny_weights("llama").items()}
    layer = "model.layers.1"
    norm = dense_of(files, f"{layer}.input_layernorm.weight", config)
    assert not np.allclose(norm, wanted[f"{layer}.input_layernorm.weight"], rtol=1e-3)
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        product = dense_of(files, f"{layer}.{part}.weight", config) * norm
        expected = wanted[f"{layer}.{part}.weight"] * wanted[f"{layer}.input_layernorm.weight"]
        assert np.square(product - expected).mean() < 0.02 * np.square(expected).mean(), part


def test_a_directory_becomes_the_same_gguf_file_as_its_source(source: Path, tmp_path: Path) -> None:
    """Rows of queries and keys change their order twice, and the tokenizer its form."""
    directory = quantize(source, settings("f16"), tmp_path / "directory").directory
    halves = quantize(source, settings("gguf:f16"), tmp_path / "halves").path
    again = quantize(directory, settings("gguf:f16"), tmp_path / "again").path
    with GGUFFile(halves) as first, GGUFFile(again) as second:
        assert set(first.tensors) == set(second.tensors)
        for name, info in first.tensors.items():
            values = first.raw(name)
            if len(info.shape) == 1:  # vectors are float16 in the directory
                values = values.view("<f4").astype("<f2").astype("<f4").view(np.uint8)
            assert np.array_equal(values, second.raw(name)), name
    comparison = compare_models(EngineConfig(model=str(halves)), EngineConfig(model=str(again)), max_tokens=300)
    assert comparison.kl.mean < 1e-5


def test_a_directory_answers_as_its_gguf_source(source: Path, tmp_path: Path) -> None:
    directory = quantize(source, settings("f16"), tmp_path / "directory").directory
    comparison = compare_models(EngineConfig(model=str(source)), EngineConfig(model=str(directory)), max_tokens=300)
    assert comparison.kl.mean < 1e-5


class Killed(Exception):
    pass


@pytest.mark.parametrize("to", ["gptq", "gguf:q4_k_m"])
@pytest.mark.parametrize("stop", [0, 1, 2])
def test_a_killed_job_resumes_with_the_same_bytes(source: Path, tmp_path: Path, to: str, stop: int) -> None:
    def kill(done: int, total: int | None) -> None:
        if done == stop:
            raise Killed

    with pytest.raises(Killed):
        quantize(source, settings(to), tmp_path / "resumed", kill)
    assert not (tmp_path / "resumed").exists()
    steps: list[int] = []
    quantize(source, settings(to), tmp_path / "resumed", lambda done, total: steps.append(done))
    assert steps[0] == stop
    quantize(source, settings(to), tmp_path / "whole")
    assert contents(tmp_path / "resumed") == contents(tmp_path / "whole")


def test_what_another_job_left_is_refused(source: Path, tmp_path: Path) -> None:
    def kill(done: int, total: int | None) -> None:
        raise Killed

    with pytest.raises(Killed):
        quantize(source, settings("gptq"), tmp_path / "out", kill)
    with pytest.raises(InvalidParams, match=r"another job: .*to"):
        quantize(source, settings("awq"), tmp_path / "out")


@pytest.mark.parametrize(
    ("to", "more", "message"),
    [
        ("gptq", {"group": 48}, "group_size is 48"),
        ("gptq", {"group": 64}, "96 columns"),
        ("fp8", {"group": 64}, "no groups"),
    ],
)
def test_what_does_not_fit_is_refused_before_work(
    source: Path, tmp_path: Path, to: str, more: dict[str, int], message: str
) -> None:
    with pytest.raises((InvalidParams, UnsupportedModel), match=message):
        quantize(source, settings(to, **more), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unknown_format_and_a_directory_that_exists_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidParams, match="gguf:q4_k_m"):
        parse_target("gguf:q4_x")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidParams, match="exists"):
        quantize(source, settings("fp8"), tmp_path)


def test_a_text_that_is_too_short_is_refused(source: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("Too short.")
    with pytest.raises(InvalidParams, match="at least 256"):
        quantize(source, settings("gptq", text=text), tmp_path / "out")


def test_the_source_is_told_apart(source: Path, tmp_path: Path) -> None:
    made = quantize(source, settings("gguf:q8_0"), tmp_path / "one")
    assert not made.source_was_quantized
    assert quantize(made.path, settings("gguf:q4_0"), tmp_path / "two").source_was_quantized
    assert {part.name for part in made.parts} >= {"model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"}
    assert sum(part.num_values for part in made.parts) + made.dense_values == sum(
        array.size for name, array in gguf_arrays("llama", tiny_weights("llama")).items() if name != "token_embd.weight"
    ) + made_embedding(made.path)


def made_embedding(path: Path) -> int:
    with GGUFFile(path) as file:
        info = file.tensors["token_embd.weight"]
        return info.rows * info.cols


@pytest.mark.parametrize("to", ["gptq", "awq", "int4", "int8", "fp8", "nf4"])
def test_directories_are_loaded_and_can_be_quantized_again(source: Path, tmp_path: Path, to: str) -> None:
    made = quantize(source, settings(to), tmp_path / "out")
    comparison = compare_models(EngineConfig(model=str(source)), EngineConfig(model=str(made.path)), max_tokens=300)
    assert 0 < comparison.kl.mean < 0.02
    again = quantize(made.path, settings("gguf:f16"), tmp_path / "again")
    assert again.source_was_quantized
    same = compare_models(EngineConfig(model=str(made.path)), EngineConfig(model=str(again.path)), max_tokens=300)
    assert same.kl.mean < max(1e-4, comparison.kl.mean / 3)  # products of codes round their inputs to int8


@pytest.mark.parametrize("to", ["int8", "f16"])
def test_values_that_the_scales_cannot_hold_are_refused(tmp_path: Path, to: str) -> None:
    weights = {name: weight * 1e30 if "down_proj" in name else weight for name, weight in tiny_weights("llama").items()}
    source = write_directory(tmp_path / "source", tiny_config("llama"), weights)
    with pytest.raises(UnsupportedModel, match="too large"):
        quantize(source, settings(to), tmp_path / "out")


def test_two_jobs_on_one_directory_are_refused(source: Path, tmp_path: Path) -> None:
    def second(done: int, total: int | None) -> None:
        with pytest.raises(InvalidParams, match="another process"):
            quantize(source, settings("int8"), tmp_path / "out")

    quantize(source, settings("int8"), tmp_path / "out", second)
    assert (tmp_path / "out/model.safetensors").is_file()


@pytest.mark.parametrize("file", ["job.json", "step-00000.safetensors", "hidden-00000.npy"])
def test_damage_in_what_was_kept_is_told(source: Path, tmp_path: Path, file: str) -> None:
    def kill(done: int, total: int | None) -> None:
        if done == 1:
            raise Killed

    with pytest.raises(Killed):
        quantize(source, settings("gptq"), tmp_path / "out", kill)
    kept = tmp_path / "out.partial" / file
    kept.write_bytes(kept.read_bytes()[:-40])
    with pytest.raises((InvalidParams, BadModelFile), match=file):
        quantize(source, settings("gptq"), tmp_path / "out")


@pytest.mark.parametrize(
    ("to", "more", "message"),
    [
        ("int8", {"text": Path("none.txt")}, "text is given"),
        ("gptq", {"feedback": False}, "no-feedback"),
        ("gguf:q8_0", {"feedback": False}, "no-feedback"),
    ],
)
def test_what_would_have_no_effect_is_refused(
    source: Path, tmp_path: Path, to: str, more: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidParams, match=message):
        quantize(source, settings(to, **more), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_old_names_section_of_the_configuration_is_not_copied(source: Path, tmp_path: Path) -> None:
    directory = quantize(source, settings("int8"), tmp_path / "codes").directory
    config = json.loads((directory / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (directory / "config.json").write_text(json.dumps(config))
    made = quantize(directory, settings("f16"), tmp_path / "dense").directory
    assert not [key for key in json.loads((made / "config.json").read_text()) if key.endswith("n_config")]
