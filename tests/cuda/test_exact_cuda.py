"""Exact on a GPU: a token gives the same bits whatever is computed beside it, op by op and through the engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda import gpu  # skips this module where there is no GPU
from tests.cuda.gpu import DEVICE, DTYPES, assert_near

from quire.core.params import SamplingParams  # isort: skip
from quire.core.request import Request
from quire.engine.client import InProcess
from quire.kernels import reference
from quire.kernels.cuda import exact
from quire.kernels.paging import LayerCache, Paging
from tests.tools.trees import draw_paths

pytestmark = pytest.mark.cuda

Answer = tuple[list[int], list[Any]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(77, 300), (4096, 4096), (640, 1024)])
def test_a_product_does_not_depend_on_the_rows_beside_it(outputs, inputs, dtype):
    x, weight = (torch.randn(n, inputs, device=DEVICE).to(dtype) for n in (300, outputs))
    whole = exact.linear(x, weight)
    assert_near(whole, x.double() @ weight.double().T, dtype)
    for first, count in [
        (0, 1),
        (299, 1),
        (5, 2),
        (17, 16),
        (100, 17),
        (3, 33),
        (40, 64),
        (30, 65),
        (7, 128),
        (1, 200),
    ]:
        assert torch.equal(exact.linear(x[first : first + count], weight), whole[first : first + count]), (first, count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"), [(32, 8, 128, None), (9, 3, 64, None), (4, 2, 64, 40), (4, 1, 256, None)]
)
def test_attention_does_not_depend_on_chunks(heads, kv_heads, dim, window, dtype):
    length, block_size = 330, 16
    cache = LayerCache(
        *(torch.randn(23, kv_heads, block_size, dim, device=DEVICE).to(dtype) for _ in "kv"), 0, block_size
    )
    q = torch.randn(length, heads, dim, device=DEVICE).to(dtype)
    whole = attend(q, cache, [(0, length)], window)
    plain = LayerCache(*(x.transpose(1, 2).contiguous() for x in (cache.k, cache.v)), 0, block_size)
    paging = page([(0, length)], block_size)
    assert_near(whole, reference.attention(q, plain, paging, scale=dim**-0.5, window=window), dtype)
    for size in (1, 3, 50, 128, 129):
        chunks = [(first, min(size, length - first)) for first in range(0, length, size)]
        assert torch.equal(attend(q, cache, chunks, window), whole), size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"), [(32, 8, 128, None), (9, 3, 64, None), (4, 2, 64, 40), (4, 1, 256, None)]
)
def test_a_node_of_a_tree_gets_the_bits_of_its_path(heads, kv_heads, dim, window, dtype):
    block_size, context, count = 16, 250, 14
    paths = draw_paths([count], 5)
    cache = LayerCache(
        *(torch.randn(23, kv_heads, block_size, dim, device=DEVICE).to(dtype) for _ in "kv"), 0, block_size
    )
    q = torch.randn(count, heads, dim, device=DEVICE).to(dtype)
    paging = replace(page([(context, count)], block_size), paths=paths.to(DEVICE))
    paging.query_starts -= context
    paging.host_query_starts = [0, count]
    got = exact.attention(q, cache, paging, scale=dim**-0.5, window=window)
    for token in range(count):
        path = [node for node in paths[token].tolist() if node >= 0]
        k, v = cache.k.clone(), cache.v.clone()
        for depth, node in enumerate(path):
            source, target = context + node, context + depth
            for new, old in ((k, cache.k), (v, cache.v)):
                new[1 + target // 16, :, target % 16] = old[1 + source // 16, :, source % 16]
        chain = page([(context, len(path))], block_size)
        chain.query_starts -= context
        chain.host_query_starts = [0, len(path)]
        alone = exact.attention(q[path], LayerCache(k, v, 0, block_size), chain, scale=dim**-0.5, window=window)
        assert torch.equal(got[token], alone[-1]), path


def attend(q: torch.Tensor, cache: LayerCache, chunks: list[tuple[int, int]], window: int | None) -> torch.Tensor:
    """Each chunk (first, count) of one sequence as a row of its own, all in one step."""
    return exact.attention(q, cache, page(chunks, cache.block_size), scale=q.shape[-1] ** -0.5, window=window)


def page(chunks: list[tuple[int, int]], block_size: int) -> Paging:
    starts = [first for first, _ in chunks] + [sum(chunks[-1])]
    lengths = [first + count for first, count in chunks]
    table = torch.arange(1, 1 + -(-lengths[-1] // block_size), dtype=torch.int32, device=DEVICE)
    as_column = {"dtype": torch.int32, "device": DEVICE}
    return Paging(
        torch.tensor(starts, **as_column), torch.tensor(lengths, **as_column), [table.expand(len(chunks), -1)], [],
        block_size, starts, lengths,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def draw_requests() -> list[Request]:
    rng, requests = random.Random(3), []
    shared = [rng.randrange(2, 2000) for _ in range(400)]
    for number in range(24):
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.9]), top_p=rng.choice([1.0, 0.8]), max_tokens=rng.randrange(1, 30),
            logprobs=3 if number % 2 else None, ignore_eos=True,
        )  # fmt: skip
        length = rng.choice([1, 17, 60, 200, 700, 1200])
        tokens = shared[: rng.choice([0, 0, 48, 400])] + [rng.randrange(2, 2000) for _ in range(length)]
        requests.append(Request(str(number), tokens, params, max_tokens=params.max_tokens, seed=number))
    return requests


def answer(client: InProcess, requests: list[Request]) -> dict[str, Answer]:
    """Tokens, and log probabilities to the last bit."""
    answers: dict[str, Answer] = {request.id: ([], []) for request in requests}
    for request in requests:
        client.add(request)
    while client.engine.has_work:
        for update in client.step():
            answers[update.id][0].extend(update.tokens)
            answers[update.id][1].extend((update.detail and update.detail.logprobs) or [])
            assert update.finish is None or update.finish.value == "length", update
    return answers


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def alone(request: pytest.FixtureRequest, model: Path) -> tuple[str, dict[str, Answer]]:
    client = gpu.start(model, dtype=request.param, exact=True, prefix_cache=False, kv_memory=1.0)
    answers: dict[str, Answer] = {}
    for one in draw_requests():
        answers |= answer(client, [one])
    assert any(logprobs for _, logprobs in answers.values())
    return request.param, answers


class AllowMany:
    """A constraint that allows three of four tokens."""

    error = ""

    def allowed(self) -> bytes:
        return b"\x77" * 400

    def advance(self, token: int) -> None:
        pass

    def forced(self) -> Sequence[int]:
        return ()

    def num_allowed(self, tokens: Sequence[int]) -> int:
        return next((nth for nth, token in enumerate(tokens) if token % 4 == 3), len(tokens))

    def copy(self) -> AllowMany:
        return self


def neighbours() -> list[Request]:
    """One of each kind that goes a way of its own."""
    asked: list[dict[str, Any]] = [
        {"logprobs": 4}, {"prompt_logprobs": 2}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.3},
        {"logit_bias": {5: 3.0}}, {"temperature": 0.7, "top_k": 9}, {"min_p": 0.1, "temperature": 1.0}, {},
        {"allowed_token_ids": list(range(100))},
    ]  # fmt: skip
    many = []
    for number, options in enumerate(asked):
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 25, "ignore_eos": True} | options)
        constraint = AllowMany() if not options else None
        prompt = list(range(number + 2, number + 90))
        many.append(Request(f"n{number}", prompt, params, max_tokens=25, seed=number, constraint=constraint))
    return many


@pytest.mark.parametrize("options", [{}, {"kv_dtype": "fp8"}, {"max_tokens_per_step": 70, "max_requests": 30}], ids=str)
@pytest.mark.parametrize("vocab_size", [2000, 2047])
def test_the_same_bits_beside_every_kind_of_neighbour(model, options, vocab_size):
    def start() -> InProcess:
        return gpu.start(model, {"vocab_size": vocab_size}, dtype="bfloat16", exact=True, kv_memory=1.0, **options)

    client, expected = start(), dict[str, Answer]()
    for one in [*draw_requests(), *neighbours()]:
        expected |= answer(client, [one])
    assert answer(start(), [*draw_requests(), *neighbours()]) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"prefix_cache": False}, {"prefix_cache": True}, {"max_tokens_per_step": 37, "max_requests": 20},
        {"num_blocks": 150, "swap_memory": 0.0}, {"num_blocks": 150}, {"max_requests": 3}, {"batching": "static"},
    ],
    ids=lambda options: " ".join(options),
)  # fmt: skip
def test_the_same_bits_whatever_runs_beside_it(model, alone, options):
    dtype, expected = alone
    client = gpu.start(model, dtype=dtype, exact=True, **{"kv_memory": 1.0} | options)
    assert answer(client, draw_requests()) == expected
    again = draw_requests()  # in another order: this time prefixes are known and steps are captured
    random.Random(1).shuffle(again)
    assert answer(client, again) == expected
