"""prepare_messages: messages with tools as templates get them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from quire.errors import InvalidParams, TemplateError
from quire.text.templates.capabilities import TemplateCapabilities, detect_capabilities
from quire.text.templates.chat_template import ChatTemplate
from quire.text.templates.messages import describe_tools, prepare_messages
from quire.text.tools.formats import HERMES, LLAMA, MISTRAL
from tests.text.tools.answers import TIME, TOOLS, WEATHER, brief, parse

pytestmark = pytest.mark.cpu

REAL = sorted((Path(__file__).parents[4] / "shared" / "data" / "chat-templates").glob("*.jinja"))
PLAIN = TemplateCapabilities(format=HERMES)
NATIVE = TemplateCapabilities(format=HERMES, supports_tools=True)


def call(name: str, arguments: str, call_id: str = "call_1") -> dict[str, object]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: object, call_id: str = "call_1") -> dict[str, object]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


ASK = {"role": "user", "content": "Weather in Paris and the time?"}
CALLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [call("get_weather", '{"city": "Paris"}'), call("get_time", "{}", "call_2")],
}
CONVERSATION = [ASK, CALLS, result("sunny"), result([{"type": "text", "text": "noon"}], "call_2")]


class TestNative:
    def test_arguments_become_objects(self):
        conversation = prepare_messages(CONVERSATION, TOOLS, NATIVE)
        calls = conversation.messages[1]["tool_calls"]
        assert [made["function"]["arguments"] for made in calls] == [{"city": "Paris"}, {}]
        assert conversation.messages[1]["content"] == ""
        assert conversation.tools == [tool.to_openai() for tool in TOOLS]
        assert CALLS["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}', "what was given is not changed"

    def test_or_stay_text(self):
        capabilities = TemplateCapabilities(format=HERMES, supports_tools=True, requires_text_arguments=True)
        given = [ASK, {**CALLS, "tool_calls": [call("get_time", '{"é":1}'), {**call("get_time", ""), "id": "b"}]}]
        calls = prepare_messages(given, (), capabilities).messages[1]["tool_calls"]
        assert [made["function"]["arguments"] for made in calls] == ['{"é": 1}', "{}"]

    def test_results_know_their_function(self):
        messages = prepare_messages(CONVERSATION, TOOLS, NATIVE).messages
        assert [message.get("name") for message in messages] == [None, None, "get_weather", "get_time"]

    def test_without_tools_and_calls_nothing_changes(self):
        messages = [ASK, {"role": "assistant", "content": "Hm.", "tool_calls": []}, ASK]
        conversation = prepare_messages(messages, (), NATIVE)
        assert conversation.tools is None
        assert conversation.messages == [ASK, {"role": "assistant", "content": "Hm."}, ASK]

    def test_short_ids(self):
        capabilities = TemplateCapabilities(format=MISTRAL, supports_tools=True)
        messages = prepare_messages(CONVERSATION, TOOLS, capabilities).messages
        ids = [made["id"] for made in messages[1]["tool_calls"]]
        assert all(re.fullmatch("[a-z0-9]{9}", short) for short in ids)
        assert [message["tool_call_id"] for message in messages[2:]] == ids
        assert len(set(ids)) == 2
        kept = prepare_messages([ASK, {**CALLS, "tool_calls": [call("get", "{}", "abcDEF123")]}], (), capabilities)
        assert kept.messages[1]["tool_calls"][0]["id"] == "abcDEF123"

    def test_one_call_a_message(self):
        capabilities = TemplateCapabilities(format=LLAMA, supports_tools=True, single_tool_call=True)
        given = [ASK, {**CALLS, "content": "Hm."}, result("noon", "call_2"), result("sunny"), ASK]
        messages = prepare_messages(given, TOOLS, capabilities).messages
        assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "tool", "user"]
        assert [message["content"] for message in messages[1:-1]] == ["Hm.", "sunny", "", "noon"]
        assert [len(message.get("tool_calls", ())) for message in messages] == [0, 1, 0, 1, 0, 0]


class TestPlain:
    def test_calls_and_results_become_text(self):
        conversation = prepare_messages([*CONVERSATION, ASK], (), PLAIN)
        assert conversation.tools is None
        assert [message["role"] for message in conversation.messages] == ["user", "assistant", "user"]
        expected = ("", [("get_weather", '{"city": "Paris"}'), ("get_time", "{}")])
        assert brief(parse(HERMES, conversation.messages[1]["content"])) == expected
        results = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\n"
        assert conversation.messages[2]["content"] == results + ASK["content"]

    def test_words_stay_in_front_of_calls(self):
        message = prepare_messages([ASK, {**CALLS, "content": "I look."}], (), PLAIN).messages[1]
        assert message["content"].startswith("I look.\n<tool_call>")
        assert "tool_calls" not in message

    def test_the_explanation_is_a_system_message(self):
        messages = prepare_messages([ASK], TOOLS, PLAIN).messages
        assert messages == [{"role": "system", "content": describe_tools(TOOLS, HERMES)}, ASK]

    def test_or_follows_the_one_there_is(self):
        for content in ("Be kind.", [{"type": "text", "text": "Be kind."}]):
            messages = prepare_messages([{"role": "system", "content": content}, ASK], TOOLS, PLAIN).messages
            assert messages[0]["content"] == "Be kind.\n\n" + describe_tools(TOOLS, HERMES)
            assert messages[1:] == [ASK]

    def test_or_comes_before_the_first_question(self):
        messages = prepare_messages(
            [ASK, CALLS], TOOLS, TemplateCapabilities(format=HERMES, supports_system_role=False)
        ).messages
        assert messages[0] == {"role": "user", "content": f"{describe_tools(TOOLS, HERMES)}\n\n{ASK['content']}"}

    def test_the_explanation_shows_tools_and_the_format(self):
        text = describe_tools((WEATHER, TIME), HERMES)
        lines = text.splitlines()
        for tool in (WEATHER, TIME):
            assert any(line[:1] == "{" and json.loads(line) == tool.to_openai()["function"] for line in lines[2:4])
        assert HERMES.opening in text
        assert HERMES.closing in text
        assert not parse(HERMES, text).calls


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user", "content": "", "tool_calls": [call("f", "{}")]}, "messages[1].tool_calls must be"),
        ({"role": "assistant", "tool_calls": "f"}, "messages[1].tool_calls must be"),
        ({"role": "assistant", "tool_calls": [1]}, "messages[1].tool_calls[0] is no call"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "messages[1].tool_calls[0] is no call"),
        (
            {"role": "assistant", "tool_calls": [{**call("f", "{}"), "id": None}]},
            "messages[1].tool_calls[0].id is null",
        ),
        ({"role": "assistant", "tool_calls": [call(3, "{}")]}, "messages[1].tool_calls[0].function.name is 3"),
        (
            {"role": "assistant", "tool_calls": [call("f", "[1]")]},
            "messages[1].tool_calls[0].function.arguments is not",
        ),
        (
            {"role": "assistant", "tool_calls": [call("f", '{"a": ')]},
            "messages[1].tool_calls[0].function.arguments is not",
        ),
        ({"role": "assistant", "tool_calls": [call("f", '{"a": NaN}')]}, "tool_calls[0].function.arguments is not"),
        ({"role": "assistant", "tool_calls": [call("f", 5)]}, "messages[1].tool_calls[0].function.arguments is not"),
    ],
)
@pytest.mark.parametrize("capabilities", [PLAIN, NATIVE], ids=["plain", "native"])
def test_refusals_name_the_field(message, reason, capabilities):
    with pytest.raises(InvalidParams, match=re.escape(reason)):
        prepare_messages([ASK, message], TOOLS, capabilities)


@pytest.mark.skipif(not REAL, reason="the collection of real templates is not here")
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_every_real_template_renders_a_conversation_with_tools(path):
    template = ChatTemplate(path.read_text(), {"bos_token": "<s>", "eos_token": "</s>"})
    capabilities = detect_capabilities(template)
    conversation = prepare_messages(
        [*CONVERSATION, {"role": "assistant", "content": "Fine."}, ASK], TOOLS, capabilities
    )
    try:
        text = template.render(conversation.messages, tools=conversation.tools)
    except TemplateError:
        with pytest.raises(TemplateError):  # one that cannot render the simplest conversation either
            template.render([ASK])
        return
    for shown in ("get_weather", "does get_time", "Paris", "sunny", "noon"):
        assert shown in text
