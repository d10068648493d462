"""/v1/messages as Anthropic's own client sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from quire.errors import EngineClosed, QuireError
from quire.server.anthropic.messages import MessageBuilder, MessageGeneration
from quire.server.anthropic.protocol import MessagesRequest, chat_input
from quire.server.chat import ChatParser
from quire.server.error_response import anthropic_error
from quire.text.answer_format import AnswerFormat
from quire.text.reasoning.formats import THINK
from quire.text.tools.definitions import NO_TOOLS, ToolChoice, make_tool
from quire.text.tools.formats import HARMONY, HERMES
from tests.server.running import Running, wait_for
from tests.server.scripted import ScriptedService, make_output_processor
from tests.server.test_responses import running

pytestmark = pytest.mark.server

MODEL = "smollm2:135m"
REASONING = AnswerFormat(HERMES, NO_TOOLS, THINK, "either")
TEXT_ONLY = AnswerFormat(HERMES, NO_TOOLS, None, "answer")
STORY: Any = [{"role": "user", "content": "Tell me a story."}]
SEEDED: dict[str, Any] = {"max_tokens": 24, "extra_body": {"temperature": 0.8, "seed": 7}}
GREEDY: dict[str, Any] = {"max_tokens": 16, "extra_body": {"temperature": 0.0}}
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
    },
}

ONE_CALL: Any = {"type": "any", "disable_parallel_tool_use": True}


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60.0) as client:
        yield client


def ask(client: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    return client.messages.create(model=MODEL, **fields)


def document_of(message: Any) -> dict[str, Any]:
    """Without what differs from call to call: the id, and what the cache held."""
    document = message.model_dump(mode="json", exclude_unset=True)
    for block in document["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    usage = document.pop("usage")
    own = {key: value for key, value in document.items() if key not in ("id", "stop_details", "container")}
    return {**own, "output_tokens": usage["output_tokens"], "input_tokens": count_input(usage)}


def count_input(usage: dict[str, Any]) -> int:
    return usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]


class TestMessages:
    def test_text(self, client):
        message = ask(client, messages=STORY, metadata={"user_id": "someone"}, **SEEDED)
        assert message.type == "message"
        assert message.role == "assistant"
        assert message.model == MODEL
        (block,) = message.content
        assert block.type == "text"
        assert block.text
        assert message.usage.output_tokens <= 24
        assert message._request_id

    def test_cut_at_max_tokens(self, client):
        assert ask(client, messages=STORY, **GREEDY).stop_reason == "max_tokens"

    def test_stop_sequence(self, client):
        text = ask(client, messages=STORY, **GREEDY).content[0].text
        word = text.split()[3]
        message = ask(client, messages=STORY, stop_sequences=[word], **GREEDY)
        assert message.stop_reason == "stop_sequence"
        assert message.stop_sequence == word
        assert message.content[0].text == text[: text.index(word)]

    def test_end_of_turn(self, client):
        message = ask(
            client,
            messages=[{"role": "user", "content": "Say hi."}],
            system="Be brief.",
            **{**GREEDY, "max_tokens": 300},
        )
        assert message.stop_reason == "end_turn"

    def test_blocks_say_the_same_as_text(self, client):
        short = ask(client, messages=STORY, system="Be brief.", **GREEDY)
        block = {"type": "text", "text": "Tell me a story.", "cache_control": {"type": "ephemeral"}}
        long = ask(
            client,
            messages=[{"role": "user", "content": [block]}],
            system=[{"type": "text", "text": "Be brief."}],
            thinking={"type": "disabled"},
            **GREEDY,
        )
        assert document_of(short) == document_of(long)

    def test_goes_on_from_a_last_message_of_the_assistants(self, client):
        text = ask(client, messages=STORY, **GREEDY).content[0].text
        begun = text[: text.index(" ", 10)]
        message = ask(client, messages=[*STORY, {"role": "assistant", "content": begun}], **GREEDY)
        assert (begun + message.content[0].text).startswith(text)

    def test_json_schema(self, client):
        schema = {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "blue"]}},
            "required": ["colour"],
            "additionalProperties": False,
        }
        message = ask(
            client, messages=STORY, output_config={"format": {"type": "json_schema", "schema": schema}}, max_tokens=100
        )
        assert json.loads(message.content[0].text)["colour"] in ("red", "blue")

    def test_count_tokens(self, client):
        counted = client.messages.count_tokens(model=MODEL, messages=STORY, system="Be brief.", tools=[WEATHER])
        message = ask(client, messages=STORY, system="Be brief.", tools=[WEATHER], **GREEDY)
        assert counted.input_tokens == count_input(message.usage.model_dump())


class TestStream:
    def test_adds_up_to_the_whole_message(self, client):
        whole = ask(client, messages=STORY, **SEEDED)
        with client.messages.stream(model=MODEL, messages=STORY, **SEEDED) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert document_of(final) == document_of(whole)
        assert text == whole.content[0].text

    def test_order_of_events(self, client, server):
        body = {"model": MODEL, "messages": STORY, "max_tokens": 8, "stream": True, "temperature": 0.0}
        with server.client() as http:
            lines = http.post("/v1/messages", json=body).text.splitlines()
        kinds = [line[7:] for line in lines if line.startswith("event: ")]
        assert kinds == [json.loads(line[6:])["type"] for line in lines if line.startswith("data: ")]
        assert kinds[:3] == ["message_start", "ping", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert set(kinds[3:-3]) == {"content_block_delta"}

    def test_async(self, server):
        async def run() -> tuple[Any, Any]:
            async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as client:
                whole = await client.messages.create(model=MODEL, messages=STORY, **SEEDED)
                async with client.messages.stream(model=MODEL, messages=STORY, **SEEDED) as stream:
                    return whole, await stream.get_final_message()

        whole, final = asyncio.run(run())
        assert document_of(final) == document_of(whole)

    def test_ends_when_the_client_goes(self, client, server):
        with client.messages.create(model=MODEL, messages=STORY, max_tokens=1500, stream=True) as stream:
            for event in stream:
                if event.type == "content_block_delta":
                    break
        wait_for(lambda: running(server) == 0)


class TestTools:
    @pytest.mark.parametrize("choice", [ONE_CALL, {"type": "tool", "name": "get_weather"}])
    def test_forced_call(self, client, choice):
        question: Any = [{"role": "user", "content": "How is the weather in Rome?"}]
        fields: dict[str, Any] = {"tools": [WEATHER], "tool_choice": choice, **SEEDED, "max_tokens": 80}
        whole = ask(client, messages=question, **fields)
        assert whole.stop_reason == "tool_use"
        assert {block.type for block in whole.content} == {"tool_use"}
        assert whole.content[0].name == "get_weather"
        assert whole.content[0].input["city"] in ("Paris", "Rome")
        with client.messages.stream(model=MODEL, messages=question, **fields) as stream:
            streamed, expected = document_of(stream.get_final_message()), document_of(whole)
        for document in (streamed, expected):  # tokens after the call that came in the same step count too
            assert document.pop("output_tokens") <= 80
        assert streamed == expected

    def test_one_call_and_its_result(self, client):
        question: Any = {"role": "user", "content": "How is the weather in Rome?"}
        called = ask(client, messages=[question], tools=[WEATHER], tool_choice=ONE_CALL, max_tokens=80)
        (call,) = called.content
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}
        conversation: Any = [
            question,
            {"role": "assistant", "content": called.content},
            {"role": "user", "content": [result, {"type": "text", "text": "In one word?"}]},
        ]
        answer = ask(client, messages=conversation, tools=[WEATHER], tool_choice={"type": "none"}, **GREEDY)
        assert answer.content[0].type == "text"


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "name"),
        [
            ({"max_tokens": None}, "max_tokens"),
            ({"max_tokens": 100_000}, "max_tokens"),
            ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
            ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
            ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "document"),
            ({"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": ""}]}]}, "thinking"),
            ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]}, "thinking"),
            ({"messages": [{"role": "user", "content": [
                {"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]}, "tool_use"),
            ({"messages": []}, "messages"),
            ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
            ({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}, "tools[0].name"),
            ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
            ({"tool_choice": {"type": "any"}}, "tool_choice"),
            ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
            ({"mcp_servers": []}, "mcp_servers"),
            ({"output_config": {"effort": "low"}}, "effort"),
            ({"top_p": 2}, "top_p"),
        ],
    )  # fmt: skip
    def test_is_a_400_that_names_the_field(self, client, fields, name):
        body = {"messages": STORY, "max_tokens": 5, **fields}
        body = {key: value for key, value in body.items() if value is not None}
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.post("/v1/messages", body={"model": MODEL, **body}, cast_to=object)
        problem: Any = caught.value.body
        assert problem["type"] == "error"
        assert problem["error"]["type"] == "invalid_request_error"
        assert name in problem["error"]["message"]

    def test_unknown_model(self, client):
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.messages.create(model="claude-99", messages=STORY, max_tokens=5)
        assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]

    @pytest.mark.parametrize(
        ("status", "kind"),
        [(401, "authentication_error"), (413, "request_too_large"), (429, "rate_limit_error"),
         (500, "api_error"), (503, "overloaded_error"), (504, "timeout_error")],
    )  # fmt: skip
    def test_kinds_of_errors(self, status, kind):
        error = QuireError("It went wrong.")
        error.status = status
        assert anthropic_error(error) == {"type": "error", "error": {"type": kind, "message": "It went wrong."}}


class TestParts:
    """What a real server does only when things go wrong, or a small model hardly ever."""

    def test_an_error_is_the_last_event(self):
        generation, _ = make_generation(["Once ", "upon"], error=EngineClosed("Shut down."))
        events = asyncio.run(gather(generation))
        assert events[-1] == {"type": "error", "error": {"type": "overloaded_error", "message": "Shut down."}}

    def test_who_stops_reading_ends_it(self):
        generation, service = make_generation(["a", "b", "c"])

        async def run() -> None:
            stream = generation.stream()
            for _ in range(3):
                await anext(stream)
            await stream.aclose()

        asyncio.run(run())
        assert service.num_closed == 1

    def test_words_and_calls(self):
        said = ["Well. ", '<tool_call>\n{"name": "look", "arguments"', ': {"a": [1]}}\n</tool_call>']
        tool = make_tool("tools[0]", name="look")
        format = AnswerFormat(HERMES, ToolChoice(mode="auto", tools=(tool,)), None, "answer")
        generation, _ = make_generation(said, format=format)
        events = asyncio.run(gather(generation))
        words, call = generation.builder.document["content"]
        assert words == {"type": "text", "text": "Well."}
        assert call["input"] == {"a": [1]}
        assert call["id"].startswith("toolu_")
        assert generation.builder.document["stop_reason"] == "tool_use"
        assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1]
        started = next(event for event in events if event.get("index") == 1)
        assert started["content_block"]["input"] == {}

    def test_reasoning_is_a_thinking_block(self):
        generation, _ = make_generation(["<think>Let me", " see.</think>", " Yes."], format=REASONING)
        events = asyncio.run(gather(generation))
        thinking, words = generation.builder.document["content"]
        assert thinking == {"type": "thinking", "thinking": "Let me see.", "signature": ""}
        assert words == {"type": "text", "text": "Yes."}
        deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
        assert deltas == ["thinking_delta", "thinking_delta", "text_delta"]

    def test_thinking_blocks_are_sent_back(self):
        blocks = [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Yes."}]
        body = MessagesRequest(
            max_tokens=1,
            messages=[{"role": "assistant", "content": blocks}, {"role": "user", "content": "Sure?"}],  # type: ignore[list-item]
        )
        assert chat_input(body).messages[0] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}

    def test_thinking_of_messages_in_a_row_is_kept(self):
        turns = [[{"type": "thinking", "thinking": text}, {"type": "text", "text": text}] for text in ("One", "Two")]
        body = MessagesRequest.model_validate(
            {
                "max_tokens": 1,
                "messages": [*({"role": "assistant", "content": turn} for turn in turns), STORY[0]],
            }
        )
        joined = {"role": "assistant", "content": "One\nTwo", "reasoning_content": "One\nTwo"}
        assert chat_input(body).messages[0] == joined

    @pytest.mark.parametrize("arguments", ["look at it", "[1]", "3", "{{"])
    def test_arguments_that_are_no_object_do_not_fail_the_answer(self, arguments):
        choice = ToolChoice(mode="auto", tools=(make_tool("tools[0]", name="look"),))
        said = ["<|channel|>commentary to=functions.look <|constrain|>json<|message|>", arguments]
        generation, _ = make_generation(said, format=AnswerFormat(HARMONY, choice, None, "either"))
        events = asyncio.run(gather(generation))
        assert events[-1]["type"] == "message_stop"
        assert generation.builder.document["content"][0]["input"] == {}

    def test_a_call_that_is_cut_keeps_what_there_is(self):
        said = ['<tool_call>\n{"name": "look", "arguments": {"a": 1, "b": "x']
        format = AnswerFormat(
            HERMES, ToolChoice(mode="auto", tools=(make_tool("tools[0]", name="look"),)), None, "answer"
        )
        generation, _ = make_generation(said, finish="length", format=format)
        asyncio.run(gather(generation))
        (call,) = generation.builder.document["content"]
        assert call["input"]["a"] == 1
        assert generation.builder.document["stop_reason"] == "max_tokens"

    def test_turns_of_one_side_are_one_turn(self):
        result = {
            "type": "tool_result",
            "tool_use_id": "1",
            "is_error": True,
            "content": [{"type": "text", "text": "no"}],
        }
        use = {"type": "tool_use", "id": "1", "name": "look", "input": {"a": 1}}
        body = MessagesRequest.model_validate(
            {
                "max_tokens": 1,
                "messages": [
                    {"role": "user", "content": "One."},
                    {"role": "user", "content": "Two."},
                    {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, use]},
                    {"role": "user", "content": [{"type": "text", "text": "Go on."}, result]},
                ],
            }
        )
        one, two, three, four = chat_input(body).messages
        assert one == {"role": "user", "content": "One.\nTwo."}
        assert two["content"] == "Let me see."
        assert json.loads(two["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
        assert three == {"role": "tool", "tool_call_id": "1", "content": "Error: no"}
        assert four == {"role": "user", "content": "Go on."}


def make_generation(
    texts: list[str], format: AnswerFormat = TEXT_ONLY, **more: Any
) -> tuple[MessageGeneration, ScriptedService]:
    service, output_processor = ScriptedService(texts, **more), make_output_processor()
    builder = MessageBuilder("scripted", output_processor)  # type: ignore[arg-type]
    return MessageGeneration(service, output_processor, ChatParser(format), builder), service  # type: ignore[arg-type]


async def gather(generation: MessageGeneration) -> list[dict[str, Any]]:
    data = b"".join([piece async for piece in generation.stream()]).decode()
    return [json.loads(line[6:]) for line in data.split("\n") if line.startswith("data: ")]
