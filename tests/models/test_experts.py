"""Families with experts against transformers: tiny random models in a Hugging Face directory and in a GGUF file."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.client import InProcess, start_engine
from quire.engine.prompt_logits import prompt_logits
from quire.errors import BadModelFile, UnsupportedModel, WeightMismatch
from quire.kernels import select_native, select_torch
from quire.quant.ggml_types import GGMLType
from quire.weights.json_config import config_from_json
from quire.weights.loader import LoadedModel, load_model
from quire.weights.schemes.read import read_scheme
from tests.models.pair import draw_tokens, run
from tests.tools.expert_models import EXPERT_MODELS, expected_logits, save, transformers_model
from tests.tools.native import native_of
from tests.tools.tiny_experts import GGUF, save_gguf
from tests.weights.schemes.packed import METHODS

pytestmark = pytest.mark.cpu

TOKENS = draw_tokens(33)
TOLERANCE = 2e-4
SCHEDULES = {
    "one chunk": [[(0, 33)]],
    "chunks": [[(0, 9)], [(0, 1)], [(0, 16)], [(0, 1)], [(0, 6)]],
    "mixed rows": [[(0, 8), (1, 1)], [(1, 12), (0, 1)], [(0, 1), (1, 1)], [(1, 19), (0, 20)], [(0, 3)]],
}


def logits_of(loaded: LoadedModel, schedule: str = "chunks") -> Tensor:
    steps = SCHEDULES[schedule]
    tokens = dict.fromkeys({sequence for rows in steps for sequence, _ in rows}, TOKENS)
    with torch.inference_mode():
        logits = run(loaded.model, loaded.config, tokens, steps)
    return torch.cat([logits[sequence] for sequence in sorted(logits)])


def load(path: Path) -> LoadedModel:
    return load_model(path, dtype="float32", ops=select_torch("cpu"))


@pytest.fixture(scope="module", params=EXPERT_MODELS)
def family(request: pytest.FixtureRequest) -> tuple[str, Any, Tensor]:
    model = transformers_model(request.param)
    return request.param, model, expected_logits(model, TOKENS)


def test_safetensors_give_the_logits_of_transformers(family: tuple[str, Any, Tensor], tmp_path: Path) -> None:
    _, model, expected = family
    loaded = load(save(model, tmp_path))
    assert loaded.unused == ()
    for schedule in SCHEDULES:
        logits = logits_of(loaded, schedule)
        for part in logits.split(len(TOKENS)):
            torch.testing.assert_close(part, expected, atol=TOLERANCE, rtol=0)


def test_gguf_gives_the_logits_of_transformers(family: tuple[str, Any, Tensor], tmp_path: Path) -> None:
    name, model, expected = family
    if name not in GGUF:
        assert name in ("dense layers", "deepseek_v2 groups", "tight gpt_oss")  # llama.cpp does not have these
        return
    logits = logits_of(load(save_gguf(model, name, tmp_path / "model.gguf")))
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_quantized_blocks_stay_packed(tmp_path: Path) -> None:
    path = save_gguf(transformers_model("mixtral"), "mixtral", tmp_path / "model.gguf", GGMLType.Q8_0)
    packed = load_model(path, dtype="float32", ops=select_torch("cpu"), packed=True)
    plain = load(path)
    assert packed.weight_bytes < 0.4 * plain.weight_bytes
    torch.testing.assert_close(logits_of(packed), logits_of(plain), atol=TOLERANCE, rtol=0)


def mxfp4_directory(model: Any, directory: Path) -> tuple[Path, Any]:
    """The directory with its experts in MXFP4, and the model with the values that these codes have."""
    save(model, directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        rows = tensors.pop(name).transpose(1, 2).contiguous()  # [experts, out, in]
        blocks = gguf.quantize(rows.numpy(), gguf.GGMLQuantizationType.MXFP4).reshape(*rows.shape[:2], -1, 17)
        low, high = blocks[..., 1:] & 15, blocks[..., 1:] >> 4
        codes = np.concatenate((low, high), axis=-1)
        packed = codes[..., 0::2] | codes[..., 1::2] << 4  # neighbours share a byte here
        tensors |= {
            f"{name}_blocks": torch.from_numpy(packed),
            f"{name}_scales": torch.from_numpy(blocks[..., 0].copy()),
        }
        values = gguf.dequantize(blocks.reshape(*rows.shape[:2], -1), gguf.GGMLQuantizationType.MXFP4)
        model.get_parameter(name).data.copy_(torch.from_numpy(values).transpose(1, 2))
    save_file(tensors, file)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (directory / "config.json").write_text(json.dumps(config))
    return directory, model


def test_mxfp4_experts_in_both_formats(tmp_path: Path) -> None:
    directory, model = mxfp4_directory(transformers_model("gpt_oss"), tmp_path / "hf")
    expected = expected_logits(model, TOKENS)
    torch.testing.assert_close(logits_of(load(directory)), expected, atol=TOLERANCE, rtol=0)
    path = save_gguf(model, "gpt_oss", tmp_path / "model.gguf", only_experts=GGMLType.MXFP4)
    torch.testing.assert_close(logits_of(load(path)), expected, atol=TOLERANCE, rtol=0)
    packed = load_model(path, dtype="float32", ops=select_torch("cpu"), packed=True)
    torch.testing.assert_close(logits_of(packed), expected, atol=TOLERANCE, rtol=0)


def test_mxfp4_experts_stay_codes_on_the_cpu_kernels(tmp_path: Path) -> None:
    """5 bits a weight with the panels' float32 scales, out of a directory and out of a GGUF file."""
    directory, model = mxfp4_directory(transformers_model("gpt_oss"), tmp_path / "hf")
    path = save_gguf(model, "gpt_oss", tmp_path / "model.gguf", only_experts=GGMLType.MXFP4)
    for each, kind in ((directory, "mxfp4-g32"), (path, "mxfp4x2-g32")):
        loaded = load_model(each, dtype="float32", ops=select_native(native_of()))
        experts = loaded.model.layers[1].mlp.weights
        for weight in (experts.gate_up, experts.down):
            assert [panels.format for panels in weight.panels] == [kind]
            assert weight.nbytes * 8 <= 5 * weight.shape[0] * weight.shape[1] * 1.05
    expected = expected_logits(model, TOKENS)
    errors = (native_logits(directory) - expected[:-1]).norm(dim=1) / expected[:-1].norm(dim=1)
    assert errors.median() < 0.05  # rounded activations may choose another expert for a token


def change(directory: Path, edit: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


def drop_third(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]


def add_one(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.8.up_proj.weight"] = torch.zeros(32, 64)


def cut_one(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.2.down_proj.weight"] = torch.zeros(64, 16)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop_third, r"1 missing \(model.layers.1.mlp.experts.3.up_proj.weight \[32, 64\]\)"),
        (add_one, r"1 unexpected \(model.layers.1.mlp.experts.8.up_proj.weight \[32, 64\]\)"),
        (cut_one, r"experts.2.down_proj.weight is \[64, 16\] instead of \[64, 32\]"),
    ],
)
def test_wrong_expert_tensors_are_named(edit: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(WeightMismatch, match=message):
        load(change(save(transformers_model("qwen3_moe"), tmp_path), edit))


def test_wrong_stacks_are_named(tmp_path: Path) -> None:
    def cut(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.block_sparse_moe.input_linear.weight"] = torch.zeros(5, 192, 64)

    message = r"block_sparse_moe.input_linear.weight is \[5, 192, 64\] instead of \[6, 192, 64\]"
    with pytest.raises(WeightMismatch, match=message):
        load(change(save(transformers_model("granitemoe"), tmp_path), cut))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("deepseek_v2", {"topk_method": "learned"}, "topk_method 'learned' is not supported"),
        ("deepseek_v3", {"n_group": 3}, "8 experts are not a multiple of 3 groups"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is set"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; this family has softmax"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": None}, "n_group is missing"),
        ("deepseek_v3", {"n_group": 8, "topk_group": 8}, "8 groups of 8 experts have fewer than 2 experts each"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok is 6, and must be a whole number from 1 to 5"),
        ("mixtral", {"hidden_act": "gelu_pytorch_tanh"}, "experts with activation 'gelu_tanh' are not supported"),
    ],
)
def test_unknown_routers_are_refused(family: str, changes: dict[str, Any], message: str) -> None:
    config = transformers_model(family).config.to_dict() | changes
    with pytest.raises((UnsupportedModel, BadModelFile), match=message):
        config_from_json(config)


def test_unknown_gating_in_a_gguf_file(tmp_path: Path) -> None:
    model = transformers_model("qwen3_moe")
    path = save_gguf(model, "qwen3_moe", tmp_path / "model.gguf", more={"qwen3moe.expert_gating_func": 7})
    with pytest.raises(UnsupportedModel, match="expert_gating_func 7 is not supported"):
        load(path)


@pytest.mark.parametrize("name", ["granitemoe", "gpt_oss", "deepseek_v3"])
def test_engines_answer_as_transformers(name: str, tmp_path: Path) -> None:
    """Greedy, on quire's CPU kernels and on torch's ops, from a directory, several requests at once."""
    model = transformers_model(name)
    path = save(model, tmp_path)
    prompts = [TOKENS[:9].tolist(), TOKENS[4:30].tolist(), TOKENS[:1].tolist()]
    expected = [greedy(model, prompt, 6) for prompt in prompts]
    for kernels in ("native", "torch"):
        config = EngineConfig(kernels=kernels, num_blocks=64, kv_dtype="float32", max_len=96)
        engine = start_engine(config, path)
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        requests = [Request(str(index), prompt, params, max_tokens=6) for index, prompt in enumerate(prompts)]
        for request in requests:
            engine.add(request)
        while engine.has_work:
            engine.step()
        assert [request.tokens[request.num_prompt :] for request in requests] == expected, kernels


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(expected_logits(model, torch.tensor(tokens))[-1].argmax()))
    return tokens[len(prompt) :]


def test_only_gpt_oss_has_experts_in_mxfp4() -> None:
    quantized = {"quantization_config": {"quant_method": "mxfp4"}}
    assert read_scheme({"model_type": "gpt_oss", **quantized}) is None
    with pytest.raises(UnsupportedModel, match="'mxfp4' is not supported"):
        read_scheme({"model_type": "qwen3_moe", **quantized})


def order_seed(key: str) -> int:
    """The same for matrices that share an input, as packages that sort by second moments have it."""
    for other in (".w3.", ".up_proj.", ".k_proj.", ".v_proj."):
        key = key.replace(other, {".w3.": ".w1.", ".up_proj.": ".gate_proj."}.get(other, ".q_proj."))
    return 2 + zlib.crc32(key.encode())


def quantized_pair(
    folder: Path, name: str, method: str, ignore: str | None = None, *, shared_order: bool = True
) -> tuple[Path, Path]:
    """A mixture whose experts, attention and dense MLPs a package has quantized one by one, and its values in float32.

    Routers stay plain. `ignore` is what the configuration calls a router.
    """
    make, options, section = METHODS[method]
    source = save(transformers_model(name), folder / "source")
    config = json.loads((source / "config.json").read_text())
    rng, stored, dense = np.random.default_rng(0), {}, {}
    for key, weight in load_file(source / "model.safetensors").items():
        stored[key] = dense[key] = weight
        if weight.ndim == 2 and (".experts." in key or "_proj" in key):
            del stored[key]
            own = options | ({"order": order_seed(key)} if options.get("order") and shared_order else {})
            tensors, values = make(key.removesuffix(".weight"), weight.numpy(), rng, **own)
            stored |= tensors
            dense[key] = torch.from_numpy(np.ascontiguousarray(values))
    more = {} if ignore is None else {"ignore": [*section["ignore"], ignore]}
    contents = {
        "quantized": (stored, config | {"quantization_config": section | more}),
        "plain": (dense, config),
    }
    for kind, (tensors, document) in contents.items():
        (folder / kind).mkdir()
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / kind / "model.safetensors")
        (folder / kind / "config.json").write_text(json.dumps(document))
    return folder / "quantized", folder / "plain"


@pytest.mark.parametrize(
    ("name", "method", "ignore"),
    [
        ("mixtral", "gptq 4 sym", None),
        ("mixtral", "gptq 4 order", None),
        ("mixtral", "fp8 block", None),
        ("mixtral", "w8a8", "re:.*block_sparse_moe.gate"),
        ("qwen3_moe", "awq", None),
        ("qwen3_moe", "w8a8", None),
        ("deepseek_v3", "fp8 block", None),
        ("deepseek_v3", "w8a8", None),
    ],
)
def test_experts_that_are_quantized_one_by_one(tmp_path: Path, name: str, method: str, ignore: str | None) -> None:
    quantized, plain = quantized_pair(tmp_path, name, method, ignore)
    expected = logits_of(load(plain))
    for packed in (False, True):
        loaded = load_model(quantized, dtype="float32", ops=select_torch("cpu"), packed=packed)
        assert (logits_of(loaded) - expected).abs().max() < 1e-5


def native_logits(path: Path) -> Tensor:
    """Of each prompt token, on the C++ kernels."""
    with closing(InProcess(EngineConfig(kernels="native", num_blocks=64, kv_dtype="float32", max_len=96), path)) as own:
        return torch.from_numpy(np.concatenate(list(prompt_logits(own.engine, TOKENS.tolist()))))


@pytest.mark.parametrize(("name", "method"), [("mixtral", "gptq 4 order"), ("qwen3_moe", "gptq 4 order")])
def test_act_order_of_experts_on_the_cpu_kernels(tmp_path: Path, name: str, method: str) -> None:
    """Activations are rounded to int8, which costs some hundredths; inputs in a wrong order would cost everything."""
    quantized, plain = quantized_pair(tmp_path, name, method)
    expected = native_logits(plain)
    assert (native_logits(quantized) - expected).norm() < 0.06 * expected.norm()


def test_gate_and_up_in_different_orders_are_refused(tmp_path: Path) -> None:
    quantized, _ = quantized_pair(tmp_path, "mixtral", "gptq 4 order", shared_order=False)
    with pytest.raises(UnsupportedModel, match="in another order"):
        native_logits(quantized)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_float8_runs_on_the_cpu_kernels(tmp_path: Path, name: str) -> None:
    """Products with experts and heads read floats, as those with plain ones do, so the tokens are the same."""
    answers = []
    for path in quantized_pair(tmp_path, name, "fp8 block"):
        engine = start_engine(EngineConfig(kernels="native", num_blocks=64, kv_dtype="float32", max_len=96), path)
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        request = Request("0", TOKENS.tolist(), params, max_tokens=6)
        engine.add(request)
        while engine.has_work:
            engine.step()
        answers.append(request.tokens[request.num_prompt :])
    assert answers[0] == answers[1]
