"""The default model, for real: its logits are transformers', and its answers do not depend on the company they keep."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.kernels import select_torch
from quire.weights.loader import load_model
from tests.tools.paged import PagedCache
from tests.tools.transformers_gguf import load_llama

pytestmark = pytest.mark.model

TEXT = (
    "A quire was once four sheets of parchment folded to make eight leaves, later any gathering of leaves in a book. "
    "Printers count paper in quires of twenty-four or twenty-five sheets; twenty quires make a ream. In 1450, the "
    "workshop set type by hand, letter by letter, and pulled each sheet on a wooden press. 3.14159 + 2.71828 = 5.8598. "
)


@pytest.fixture(scope="module")
def theirs(default_model: Path):
    return load_llama(default_model)


def test_logits_and_perplexity_agree_with_transformers(llm: LLM, theirs, default_model: Path) -> None:
    tokens = llm.get_tokenizer().encode(TEXT * 2)
    loaded = load_model(default_model, dtype="float32", ops=select_torch("cpu"), max_len=512)
    config = loaded.config
    groups = [0] * config.num_layers
    cache = PagedCache(kv_heads=config.num_kv_heads, head_dim=config.head_dim, groups=groups, num_blocks=128)
    rows = [(0, len(tokens))]
    with torch.inference_mode():
        paging = cache.step(rows)
        hidden = loaded.model(torch.tensor(tokens), cache.positions(rows), paging, cache.layers)
        ours = loaded.model.head(hidden)
        expected = theirs(torch.tensor([tokens])).logits[0]
    assert (ours - expected).abs().max() < 1e-3
    targets = torch.tensor(tokens[1:])
    losses = [torch.nn.functional.cross_entropy(logits[:-1], targets).item() for logits in (ours, expected)]
    assert math.exp(losses[0]) == pytest.approx(math.exp(losses[1]), rel=1e-4)


def test_greedy_answers_are_transformers_too(llm: LLM, theirs) -> None:
    tokens = llm.get_tokenizer().encode("The three laws of thermodynamics say that")
    (out,) = llm.generate({"prompt_token_ids": tokens}, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    answer = torch.tensor(out.outputs[0].token_ids)
    with torch.inference_mode():
        logits = theirs(torch.tensor([[*tokens, *answer]])).logits[0, len(tokens) - 1 : -1]
    logprobs = logits.log_softmax(-1)
    # Activations in int8 move log probabilities by about 0.1, which decides between tokens that are almost equal.
    behind = logprobs.max(-1).values - logprobs.gather(1, answer[:, None])[:, 0]
    assert behind.max() < 0.3
    assert (behind == 0).float().mean() > 0.85


def questions(llm: LLM) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """32 prompts of mixed length, some with a common beginning; half of them greedy, half sampled with a seed."""
    rng = random.Random(11)
    words = llm.get_tokenizer().encode(TEXT)
    prompts, params = [], []
    for number in range(32):
        start = 0 if number % 4 == 0 else rng.randrange(len(words) - 2)
        prompts.append({"prompt_token_ids": words[start : start + rng.randint(1, 60)]})
        params.append(
            SamplingParams(
                temperature=0.0 if number % 2 else 0.9,
                top_p=0.95,
                seed=number,
                max_tokens=rng.randint(2, 12),
                ignore_eos=True,
            )
        )
    return prompts, params


def answers(llm: LLM, prompts, params) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def alone(default_model: Path) -> list[list[int]]:
    """Each question answered with nobody else there, in one chunk, without a cache."""
    with LLM(max_len=256, num_blocks=64, prefix_cache=False) as llm:
        prompts, params = questions(llm)
        return [answers(llm, [prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {"max_requests": 32},
        {"max_requests": 3, "max_tokens_per_step": 3},
        {"max_requests": 8, "max_tokens_per_step": 17, "block_size": 8},
        {"max_requests": 32, "num_blocks": 9, "max_len": 128},
        {"max_requests": 32, "batching": "static", "batch_size": 7},
    ],
    ids=["one batch", "chunks of 3", "chunks of 17", "preempted", "static"],
)
def test_the_same_answer_in_any_company(alone, options) -> None:
    with LLM(**({"max_len": 256, "kv_memory": 1.0} | options)) as llm:
        prompts, params = questions(llm)
        assert answers(llm, prompts, params) == alone
        scheduler = llm._client.engine.scheduler
        if "num_blocks" in options:
            assert scheduler.counters.preemptions > 0
        cached = scheduler.counters.cached_tokens
        order = list(range(32))
        random.Random(3).shuffle(order)
        again = answers(llm, [prompts[i] for i in order], [params[i] for i in order])
        assert again == [alone[i] for i in order]
        assert scheduler.counters.cached_tokens > cached
