"""`quire chat` with a model that reasons: what is printed, and what the history keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire.cli.chat import Conversation
from quire.core.outputs import CompletionOutput, RequestOutput
from quire.core.params import SamplingParams
from quire.text.tokenizers.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level

pytestmark = pytest.mark.cpu

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>' if false else '' }}{# </think> #}"


class ScriptedLLM:
    """Answers with the texts, one after the other."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.tokenizer = Tokenizer.from_gguf(byte_level() | {"tokenizer.chat_template": TEMPLATE})

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def render(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        return {"prompt": "".join(message["content"] for message in messages)}

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[RequestOutput]:
        assert params.skip_special_tokens  # the markers are no tokens of this vocabulary
        answer = CompletionOutput(0)
        for index, text in enumerate(self.texts):
            answer.text += text
            answer.finish_reason = "stop" if index == len(self.texts) - 1 else None
            yield RequestOutput("0", None, [], [answer])


def test_reasoning_is_shown_and_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(ScriptedLLM("<think>H", "m.</thi", "nk>\n\nYes", "."), SamplingParams())  # type: ignore[arg-type]
    conversation.answer("Well?")
    assert capsys.readouterr().out == "Hm.\n\nYes.\n"
    assert conversation.messages[-1] == {"role": "assistant", "content": "Yes."}


def test_an_answer_without_reasoning_is_all_text(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(ScriptedLLM("Y", "es."), SamplingParams())  # type: ignore[arg-type]
    conversation.answer("Well?")
    assert capsys.readouterr().out == "Yes.\n"
    assert conversation.messages[-1]["content"] == "Yes."
