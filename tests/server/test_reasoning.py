"""Reasoning in chat completions: documents of messages and of chunks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.core.outputs import CompletionOutput
from quire.server.chat import ChatParser
from quire.server.openai.chat import ChatWriter
from quire.server.openai.output import Choice
from quire.server.openai.protocol import ChatCompletionRequest
from quire.text.answer_format import AnswerFormat
from quire.text.tools.formats import HARMONY
from tests.server.scripted import make_output_processor
from tests.text.tools.answers import AUTO

pytestmark = pytest.mark.cpu

HARMONY_FORMAT = AnswerFormat(HARMONY, AUTO, None, "either")
CALLED = (
    "<|channel|>analysis<|message|>A tool.<|end|><|start|>assistant",
    "<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>",
    "{}",
)
SAID = ("<|channel|>analysis<|message|>Easy", ".<|end|><|start|>assistant<|channel|>final<|message|>Y", "es.")


def grow(texts: tuple[str, ...], *, is_stream: bool, finish: str = "stop") -> list[dict[str, Any]]:
    """The documents of an answer that grows by these texts."""
    body = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}])
    writer = ChatWriter(SimpleNamespace(), body, [ChatParser(HARMONY_FORMAT)])  # type: ignore[arg-type]
    processor, answer = make_output_processor(), CompletionOutput(0)
    processor.output.outputs = [answer]
    choice, documents = Choice(0, processor, answer), []
    for index, text in enumerate(texts):
        answer.text += text
        answer.token_ids.append(index)
        answer.finish_reason = finish if index == len(texts) - 1 else None
        if is_stream or answer.finish_reason:
            documents.append(choice.write(writer.write_chunk if is_stream else writer.write_message))
    return [document for document in documents if document is not None]


def test_a_message_has_reasoning_beside_its_content():
    (document,) = grow(SAID, is_stream=False)
    message = document["message"]
    assert (message["reasoning_content"], message["content"]) == ("Easy.", "Yes.")
    assert document["finish_reason"] == "stop"


def test_a_message_without_content_says_so():
    (document,) = grow(SAID[:1], is_stream=False, finish="length")
    assert (document["message"]["reasoning_content"], document["message"]["content"]) == ("Easy", None)


def test_a_call_follows_its_reasoning():
    (document,) = grow(CALLED, is_stream=False)
    message = document["message"]
    assert (message["reasoning_content"], message["content"]) == ("A tool.", None)
    assert message["tool_calls"][0]["function"] == {"name": "get_time", "arguments": "{}"}
    assert document["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("texts", [SAID, CALLED])
def test_chunks_add_up_to_the_message(texts):
    (whole,) = grow(texts, is_stream=False)
    deltas = [chunk["delta"] for chunk in grow(texts, is_stream=True)]
    reasoning, content = ("".join(delta.get(name, "") for delta in deltas) for name in ("reasoning_content", "content"))
    assert (reasoning, content or None) == (whole["message"]["reasoning_content"], whole["message"]["content"])
    names = [call["function"]["name"] for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]
    assert names == [call["function"]["name"] for call in whole["message"].get("tool_calls", ())]
    assert deltas[0]["role"] == "assistant"
