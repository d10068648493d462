"""Questions of the default model."""

from __future__ import annotations

import pytest

from quire import LLM
from quire.train.dialogues import Interviewer, Limits, find_opening

pytestmark = pytest.mark.model


def test_it_asks_itself_questions(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    opening = tokenizer.decode(find_opening(llm), skip_special_tokens=False)
    assert opening.endswith("<|im_start|>user\n")
    made = Interviewer(llm, Limits(16, 16, 256), 0).make_round(0)
    assert len(made) > 8
    for dialogue in made:
        prompt = tokenizer.decode(dialogue.tokens[: dialogue.num_prompt].tolist(), skip_special_tokens=False)
        assert prompt.startswith(opening)
        assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
