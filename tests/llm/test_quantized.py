"""`LLM` on directories with quantized weights: the same answers out of the prefix cache, with drafts, in any batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from tests.llm.test_families import PROMPTS, VOCAB, write_tokenizer
from tests.weights.schemes.packed import quantized_model

pytestmark = pytest.mark.cpu


def answers(path: Path, **options: object) -> list[list[int]]:
    """Of two calls, of which the second is out of the cache, and of one prompt alone."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(str(path), **{"kernels": "native", "num_blocks": 64, "max_len": 64, **options}) as llm:
        found = [llm.generate(prompts, params, use_tqdm=False) for prompts in (PROMPTS, PROMPTS, PROMPTS[:1])]
    first, again, alone = [[output.outputs[0].token_ids for output in outputs] for outputs in found]
    assert (again, alone) == (first, first[:1])
    return first


@pytest.mark.parametrize("method", ["gptq 4 order", "awq", "fp8 block"])
def test_answers_do_not_depend_on_batch_cache_or_drafts(tmp_path: Path, method: str) -> None:
    path, _ = quantized_model(tmp_path, method, vocab_size=VOCAB)
    write_tokenizer(path)
    expected = answers(path, speculate="off")
    assert answers(path, speculate="self:1", threads=1) == expected
    assert all(len(tokens) == 12 for tokens in expected)
