"""The default model's tokenizer and template."""

from __future__ import annotations

import pytest

from quire.config import DEFAULT_MODEL
from quire.store import resolve
from quire.text.templates.chat_template import ChatTemplate
from quire.text.tokenizers.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve(DEFAULT_MODEL).path)


def test_known_ids(tokenizer):
    assert tokenizer.encode("Hello  world 123<|im_end|>") == [19556, 216, 905, 216, 33, 34, 35, 2]
    assert tokenizer.decode([19556, 216, 905, 2]) == "Hello  world"
    assert {tokenizer.id_to_token(token_id) for token_id in tokenizer.end_token_ids} == {"<|endoftext|>", "<|im_end|>"}


def test_a_conversation(tokenizer):
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    prompt = template.render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert prompt == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    token_ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert token_ids[0] == tokenizer.token_to_id("<|im_start|>")
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == prompt
