"""`quire compare`: its numbers against plain torch, its windows, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from quire import LLM, SamplingParams
from quire.bench import compare
from quire.bench.compare import (
    BUILT_IN_TEXT,
    compare_models,
    compare_rows,
    describe,
    prefix_of,
    read_text,
    split,
)
from quire.cli.main import main
from quire.config import EngineConfig
from quire.engine.client import InProcess
from quire.engine.prompt_logits import prompt_logits
from quire.errors import InvalidParams, ModelError
from quire.text.tokenizers.tokenizer import load_tokenizer
from tests.text.vocabularies import MERGES, byte_level
from tests.tools.gguf_writer import tensor, write_gguf
from tests.tools.tiny_models import COMMON, gguf_arrays, gguf_metadata, tiny_text_gguf, tiny_weights

pytestmark = pytest.mark.cpu

TEXT = "hello world, hello 12 worlds; the quick brown fox says hello again and again. " * 3
KERNELS = ["native", "torch"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_text_gguf(tmp_path_factory.mktemp("a") / "model.gguf"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Other weights, and logits that are padded less, with the same tokenizer."""
    return str(other_gguf(tmp_path_factory.mktemp("b") / "model.gguf", num_padded=3))


def other_gguf(path: Path, num_padded: int = 7, *, is_broken: bool = False, **vocabulary: object) -> Path:
    arrays, metadata = gguf_arrays("llama", tiny_weights("llama", seed=1)), byte_level(**vocabulary)
    size = len(metadata["tokenizer.ggml.tokens"]) + num_padded
    embedding = np.random.default_rng(1).normal(scale=0.05, size=(size, COMMON["hidden_size"]))
    if is_broken:
        embedding[5, 3] = math.nan
    arrays["token_embd.weight"] = embedding.astype(np.float32)
    types = {"tokenizer.ggml.token_type": np.array(metadata["tokenizer.ggml.token_type"], np.int32)}
    everything = {**gguf_metadata("llama"), **metadata, **types}
    return write_gguf(path, everything, {name: tensor(array) for name, array in arrays.items()})


def engine(model: str, **options: object) -> InProcess:
    return InProcess(EngineConfig.of({"model": model, "max_requests": 1, "speculate": "off", **options}), Path(model))


def all_logits(client: InProcess, tokens: list[int]) -> np.ndarray:
    return np.concatenate([rows.copy() for rows in prompt_logits(client.engine, tokens)])


def test_numbers_are_those_of_torch() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(scale=4.0, size=(50, 301)).astype(np.float32)
    b = a + rng.normal(scale=0.3, size=a.shape).astype(np.float32)
    targets = rng.integers(0, 301, 50)
    found = compare_rows(a, b, targets.tolist())
    p, q = (torch.from_numpy(x).double().log_softmax(-1) for x in (a, b))
    expected = functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    np.testing.assert_allclose(found.kl, expected.numpy(), rtol=1e-12)
    index = torch.from_numpy(targets)
    np.testing.assert_allclose(found.nll_a, functional.nll_loss(p, index, reduction="none").numpy(), rtol=1e-12)
    np.testing.assert_allclose(found.nll_b, functional.nll_loss(q, index, reduction="none").numpy(), rtol=1e-12)
    assert found.same_top.tolist() == (p.argmax(-1) == q.argmax(-1)).tolist()
    assert 0 < found.same_top.sum() < 50


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("max_tokens_per_step", [7, 64, 192])
def test_logits_of_a_prompt_are_those_of_its_requests(model: str, kernels: str, max_tokens_per_step: int) -> None:
    """Every row scores its token as `prompt_logprobs` does, in chunks of any size."""
    tokens = load_tokenizer(Path(model)).encode(TEXT)[:100]
    client = engine(model, kernels=kernels, max_tokens_per_step=max_tokens_per_step)
    logits = all_logits(client, tokens)
    assert logits.shape == (99, client.info.config.vocab_size)
    logprobs = torch.from_numpy(logits).double().log_softmax(-1)
    with LLM(model, kernels=kernels) as llm:
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        (out,) = llm.generate([{"prompt_token_ids": tokens}], params)
    expected = [entry[token].logprob for token, entry in zip(tokens[1:], (out.prompt_logprobs or [])[1:], strict=True)]
    np.testing.assert_allclose(logprobs[range(99), tokens[1:]].numpy(), expected, rtol=1e-5, atol=1e-5)


def test_an_iterator_that_is_closed_ends_its_request(model: str) -> None:
    client = engine(model, kernels="torch", max_tokens_per_step=8)
    tokens = list(range(40))
    logits = all_logits(client, tokens)
    rows = prompt_logits(client.engine, tokens)
    next(rows)
    rows.close()
    assert not client.engine.has_work
    assert (all_logits(client, tokens) == logits).all()


def test_a_prompt_of_one_token_predicts_nothing(model: str) -> None:
    with pytest.raises(InvalidParams, match="1 tokens; give at least 2"):
        next(prompt_logits(engine(model).engine, [3]))


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_comparison_is_that_of_whole_windows(model: str, other: str, kernels: str) -> None:
    """Against log_softmax and kl_div over all windows at once. The padded logits that only one has are left out."""
    configs = [EngineConfig(model=name, kernels=kernels) for name in (model, other)]
    found = compare_models(*configs, TEXT, window=50, max_tokens=130)
    tokens = load_tokenizer(Path(model)).encode(TEXT, add_special_tokens=False)[:130]
    windows = [tokens[start : start + 50] for start in range(0, 130, 50)]
    targets = torch.tensor([token for window in windows for token in window[1:]])
    logprobs = []
    for name in (model, other):
        client = engine(name, kernels=kernels)
        logits = np.concatenate([all_logits(client, window) for window in windows])[:, : found.vocab_size]
        logprobs.append(torch.from_numpy(logits).double().log_softmax(-1))
    p, q = logprobs
    kl = (p.exp() * (p - q)).sum(-1)
    assert (found.num_tokens, found.num_windows, found.window) == (127, 3, 50)
    assert found.vocab_size == len(byte_level()["tokenizer.ggml.tokens"]) + 3
    assert found.kl.mean == pytest.approx(float(kl.mean()))
    assert found.kl.se == pytest.approx(float(kl.std() / 127**0.5))
    assert found.kl_median == pytest.approx(float(np.median(kl)))
    assert found.kl_p99 == pytest.approx(float(kl.quantile(0.99)))
    assert found.kl_max == pytest.approx(float(kl.max()))
    assert found.top1_agreement.mean == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    nll = [functional.nll_loss(each, targets) for each in (p, q)]
    assert found.perplexity_a == pytest.approx(float(nll[0].exp()))
    assert found.perplexity_b == pytest.approx(float(nll[1].exp()))
    assert found.perplexity_ratio == pytest.approx(float((nll[1] - nll[0]).exp()))
    assert found.kl_max > found.kl_p99 > found.kl_median > 0


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_model_does_not_differ_from_itself(model: str, kernels: str) -> None:
    config = EngineConfig(model=model, kernels=kernels)
    found = compare_models(config, config, TEXT)
    assert (found.kl.mean, found.kl.se, found.kl_max) == (0.0, 0.0, 0.0)
    assert found.top1_agreement.mean == 1.0
    assert found.perplexity_a == found.perplexity_b
    assert found.window == COMMON["max_position_embeddings"]  # the default is longer than this model's context


def test_kl_is_not_symmetric(model: str, other: str) -> None:
    configs = [EngineConfig(model=name) for name in (model, other)]
    forth, back = compare_models(*configs, TEXT), compare_models(*configs[::-1], TEXT)
    assert forth.kl.mean != back.kl.mean
    assert (forth.perplexity_a, forth.perplexity_b) == (back.perplexity_b, back.perplexity_a)


def test_a_smaller_type_of_the_cache_differs_more(model: str) -> None:
    precise = EngineConfig(model=model, kernels="native", kv_dtype="float32")
    bfloat16, int8 = (
        compare_models(precise, EngineConfig(model=model, kernels="native", kv_dtype=dtype), TEXT)
        for dtype in ("bfloat16", "int8")
    )
    assert 0 < bfloat16.kl.mean < int8.kl.mean


def test_options_without_effect_are_not_used(model: str) -> None:
    waits = EngineConfig(model=model, batching="static", batch_size=8, num_blocks=1, speculate="draft:nothing")
    assert compare_models(waits, EngineConfig(model=model), TEXT, max_tokens=20).kl.mean == 0.0
    assert describe(waits) == model


def test_a_configuration_is_described_by_its_flags() -> None:
    config = EngineConfig(model="m", kv_dtype="int8", exact=True, threads=2, prefix_cache=False)
    assert describe(config) == "m --kv-dtype int8 --exact --threads 2"


def test_every_window_begins_with_the_bos_token_if_texts_do() -> None:
    assert split([5, 6, 7, 8, 9], 3, [1]) == [[1, 5, 6], [1, 7, 8], [1, 9]]
    assert split([5, 6, 7, 8, 9], 2, []) == [[5, 6], [7, 8]]
    assert split([5, 6], 512, []) == [[5, 6]]
    for tokens in ([], [5]):
        with pytest.raises(InvalidParams, match=f"The text has {len(tokens)} tokens; give at least 2"):
            split(tokens, 4, [])


@pytest.mark.parametrize("adds_bos", [True, False])
def test_the_bos_token_is_that_of_the_tokenizer(tmp_path: Path, adds_bos: bool) -> None:
    tokenizer = load_tokenizer(tiny_text_gguf(tmp_path / "m.gguf", **{"tokenizer.ggml.add_bos_token": adds_bos}))
    assert prefix_of(tokenizer) == ([tokenizer.bos_token_id] if adds_bos else [])


def test_another_vocabulary_is_refused(model: str, tmp_path: Path) -> None:
    tokens = byte_level()["tokenizer.ggml.tokens"]
    swapped = [*tokens[:-1], "<hr>"]
    path = str(other_gguf(tmp_path / "model.gguf", tokens=swapped))
    with pytest.raises(InvalidParams, match=f"token {len(tokens) - 1} is '<br>' in the first and '<hr>' in the second"):
        compare_models(EngineConfig(model=model), EngineConfig(model=path), TEXT)


def test_another_tokenizer_of_the_same_vocabulary_is_refused(model: str, tmp_path: Path) -> None:
    path = str(other_gguf(tmp_path / "model.gguf", merges=MERGES[:3]))
    with pytest.raises(InvalidParams, match="split the text into different tokens"):
        compare_models(EngineConfig(model=model), EngineConfig(model=path), TEXT)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_model_without_numbers_is_named(model: str, tmp_path: Path, kernels: str, swapped: bool) -> None:
    path = str(other_gguf(tmp_path / "model.gguf", is_broken=True))
    configs = [EngineConfig(model=name, kernels=kernels) for name in (model, path)]
    with pytest.raises(ModelError, match=f"The logits of {path} are not numbers"):
        compare_models(*(configs[::-1] if swapped else configs), TEXT)


@pytest.mark.parametrize(("window", "words"), [(1, "window is 1; give from 2 to 128"), (129, "window is 129")])
def test_a_window_is_within_the_context(model: str, window: int, words: str) -> None:
    with pytest.raises(InvalidParams, match=words):
        compare_models(EngineConfig(model=model), EngineConfig(model=model), TEXT, window=window)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"hello\xff\xfe", "no UTF-8 text: see its byte 5"),
        (b"hello\0there", "no UTF-8 text: see its byte 5"),
        (None, "cannot be read: No such file"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, data: bytes | None, words: str) -> None:
    path = tmp_path / "text"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(InvalidParams, match=words):
        read_text(path, 100)
    with pytest.raises(InvalidParams, match="cannot be read: Is a directory"):
        read_text(tmp_path, 100)


def test_only_the_beginning_of_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "text"
    for text in ("é" * 1000, "a" + "é" * 1000, "ab€" * 1000):
        path.write_text(text, encoding="utf-8")
        read = read_text(path, 2)
        assert text.startswith(read)
        assert 125 <= len(read.encode()) <= 128


def test_the_built_in_text_is_varied() -> None:
    text = read_text(BUILT_IN_TEXT, 4096)
    assert 5000 < len(text) < 12000
    for part in ("def ", "SELECT", "| city", "Straße", "marché", "barrio", "Question:", '{"order"'):
        assert part in text


def run_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["quire", "compare", *arguments])
    status = 0
    try:
        main()
    except SystemExit as end:
        status = int(end.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


def test_the_command(model: str, tmp_path: Path, capsys, monkeypatch) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    text = ["--text", str(tmp_path / "text.txt"), "--max-tokens", "100", "--window", "40"]
    side = f"{model} --kv-dtype int8"
    status, out, _ = run_command(capsys, monkeypatch, model, side, *text, "--kernels", "native", "--json")
    document = json.loads(out)
    assert status == 0
    assert (document["a"], document["b"]) == (f"{model} --kernels native", f"{model} --kernels native --kv-dtype int8")
    assert (document["num_tokens"], document["num_windows"]) == (97, 3)
    assert document["kl"]["mean"] > 0
    status, out, _ = run_command(capsys, monkeypatch, model, side, *text, "--kernels", "native")
    assert status == 0
    assert "97 tokens compared, in 3 windows of 40" in out
    assert f"{document['kl']['mean']:.6f} ± {document['kl']['se']:.6f}" in out


def test_options_of_a_side_replace_those_of_both(model: str, capsys, monkeypatch) -> None:
    both = ["--kv-dtype", "float32", "--max-tokens", "20"]
    _, out, _ = run_command(capsys, monkeypatch, model, f"{model} --kv-dtype bfloat16", *both, "--json")
    assert json.loads(out)["a"].endswith("--kv-dtype float32")
    assert json.loads(out)["b"].endswith("--kv-dtype bfloat16")


def test_a_path_may_have_spaces(tmp_path: Path, capsys, monkeypatch) -> None:
    folder = tmp_path / "my models"
    folder.mkdir()
    path = str(tiny_text_gguf(folder / "model.gguf"))
    status, out, err = run_command(capsys, monkeypatch, path, f"'{path}' --exact", "--max-tokens", "20", "--json")
    assert status == 0, err
    assert json.loads(out)["kl"]["mean"] == 0.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{model}"], "required: B"),
        (["{model}", "{model}", "--text", "/no/such/file"], "/no/such/file cannot be read"),
        (["{model}", "{model}", "--max-tokens", "1"], "max_tokens is 1; give at least 2"),
        (["{model}", "{model}", "--window", "0"], "window is 0"),
        (["{model}", "{model} --nope"], "quire compare: B: error: unrecognized arguments: --nope"),
        (["{model}", "{model} --max-len 8"], "unrecognized arguments: --max-len 8"),
        (["{model} --kv-dtype int3", "{model}"], "invalid choice: 'int3'"),
        (["{model}", "'unfinished"], "cannot be split into words"),
        (["{model}", " "], "give a model first"),
        (["{model}", "/no/such/model.gguf"], "/no/such/model.gguf"),
    ],
)
def test_what_is_wrong_is_said(model: str, arguments: list[str], words: str, capsys, monkeypatch) -> None:
    given = [argument.replace("{model}", model) for argument in arguments]
    status, out, err = run_command(capsys, monkeypatch, *given)
    assert status in (1, 2)
    assert out == ""
    assert words in err


def test_ctrl_c_ends_it_quietly(model: str, capsys, monkeypatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "compare_rows", interrupt)
    assert run_command(capsys, monkeypatch, model, model) == (130, "", "")
