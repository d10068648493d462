"""Whole engines on the families of `models/transformer.py`: a directory with a tokenizer answers as transformers does,
out of the prefix cache too, with drafts, with a grammar, and on both CPU backends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quire import LLM, SamplingParams
from tests.tools.family_cases import VOCAB, expected_logits, save

pytestmark = pytest.mark.cpu

PROMPTS = ["0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1", "pa re", "0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 2"]
LENGTH = 12


def write_tokenizer(directory: Path) -> Tokenizer:
    """Byte-level BPE, as these families have, with a vocabulary of printable ASCII and no merges."""
    characters = [chr(number) for number in range(33, 127)] + ["Ġ"]
    vocabulary = {"<|endoftext|>": 0, "<a>": 1} | {each: 2 + index for index, each in enumerate(characters)}
    assert len(vocabulary) == VOCAB
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


def greedy(name: str, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(LENGTH):
        tokens.append(int(expected_logits(name, torch.tensor(tokens))[-1].argmax()))
    return tokens[len(prompt) :]


RUNS = [
    ("gpt2", "native", "off"),
    ("gpt2", "torch", "off"),
    ("bloom", "native", "self:1"),
    ("bloom", "torch", "off"),
    ("granite", "native", "self:1"),
    ("phi", "native", "self:1"),
]


@pytest.mark.parametrize(("name", "kernels", "speculate"), RUNS)
def test_answers_are_those_of_transformers(tmp_path: Path, name: str, kernels: str, speculate: str) -> None:
    save(name, tmp_path)
    tokenizer = write_tokenizer(tmp_path)
    expected = [greedy(name, tokenizer.encode(prompt).ids) for prompt in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    options = {"kernels": kernels, "speculate": speculate, "kv_dtype": "float32", "max_len": 64, "num_blocks": 64}
    with LLM(str(tmp_path), threads=2, **options) as llm:
        for _ in range(2):  # the second time out of the cache
            answers = llm.generate(PROMPTS, params, use_tqdm=False)
            assert [answer.outputs[0].token_ids for answer in answers] == expected
        assert answers[0].num_cached_tokens
        sampled = llm.generate(PROMPTS[0], SamplingParams(temperature=1.0, n=3, seed=1, max_tokens=6), use_tqdm=False)
        assert len(sampled[0].outputs) == 3
        grammar = SamplingParams(temperature=0.0, max_tokens=LENGTH, structured_outputs={"regex": "[01]{4}"})
        assert len(llm.generate(PROMPTS[0], grammar, use_tqdm=False)[0].outputs[0].text) == 4
