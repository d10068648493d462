"""/v1/responses as OpenAI's own client sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.server.openapi_schema import validate, validate_event
from tests.server.running import Running, wait_for

pytestmark = pytest.mark.server

MODEL = "smollm2:135m"
SEEDED: dict[str, Any] = {"temperature": 0.8, "max_output_tokens": 24, "extra_body": {"seed": 7}}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_output_tokens": 16}
ENDLESS: dict[str, Any] = {"max_output_tokens": 1500, "extra_body": {"ignore_eos": True}}
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60.0) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    response = client.responses.create(model=MODEL, **fields)
    validate("Response", document_of(response))
    return response


def document_of(made: BaseModel) -> dict[str, Any]:
    """What came over the wire: the client's own extra fields are left out."""
    return made.model_dump(mode="json", exclude_unset=True)


def read(stream: Any) -> list[dict[str, Any]]:
    """All events of a stream, each of them valid and in its place."""
    with stream:
        events = [document_of(event) for event in stream]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        validate_event(event)
    return events


def add_up(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that a stream's deltas make, by nothing but the deltas."""
    output: list[dict[str, Any]] = []
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                output.append(json.loads(json.dumps(event["item"])))
            case "response.content_part.added":
                output[event["output_index"]]["content"].append(json.loads(json.dumps(event["part"])))
            case "response.output_text.delta":
                part = output[event["output_index"]]["content"][event["content_index"]]
                part["text"] += event["delta"]
                part["logprobs"] += event["logprobs"]
            case "response.function_call_arguments.delta":
                output[event["output_index"]]["arguments"] += event["delta"]
            case "response.output_item.done":
                output[event["output_index"]]["status"] = event["item"]["status"]
                assert output[event["output_index"]] == event["item"]
    return output


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in output]


class TestCreate:
    def test_text(self, client):
        response = ask(client, input="Name a colour.", metadata={"purpose": "test"}, user="someone", **SEEDED)
        assert response.output_text
        assert response.status in ("completed", "incomplete")
        assert response.metadata == {"purpose": "test"}
        assert response.usage.output_tokens <= 24
        assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens

    def test_cut_at_max_output_tokens(self, client):
        response = ask(client, input="Count to a thousand.", **{**GREEDY, "extra_body": {"ignore_eos": True}})
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output[0].status == "incomplete"
        assert response.usage.output_tokens == 16

    def test_items_say_the_same_as_text_and_instructions(self, client):
        short = ask(client, input="Name a colour.", instructions="Be brief.", **GREEDY)
        system: Any = {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}
        long = ask(client, input=[system, {"type": "message", "role": "user", "content": "Name a colour."}], **GREEDY)
        assert short.output_text == long.output_text
        assert short.usage.input_tokens == long.usage.input_tokens

    def test_log_probabilities(self, client):
        fields: dict[str, Any] = {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
        response = ask(client, **fields, **GREEDY)
        (part,) = response.output[0].content
        assert len(part.logprobs) == response.usage.output_tokens
        assert all(len(one.top_logprobs) == 2 for one in part.logprobs)
        assert part.logprobs[0].token == part.logprobs[0].top_logprobs[0].token
        assert part.text.startswith(part.logprobs[0].token)
        events = read(client.responses.create(model=MODEL, stream=True, **fields, **GREEDY))
        assert without_ids(add_up(events)) == without_ids(document_of(response)["output"])

    def test_json_schema(self, client):
        class Person(BaseModel):
            name: str
            age: int

        limits = {"temperature": 0.0, "max_output_tokens": 200}
        response = client.responses.parse(
            model=MODEL, input="Invent a person with a short name.", text_format=Person, **limits
        )
        assert isinstance(response.output_parsed, Person)

    def test_json_object(self, client):
        response = ask(
            client, input="Give me JSON.", text={"format": {"type": "json_object"}}, temperature=0.0,
            max_output_tokens=20,
        )  # fmt: skip
        assert response.output_text.startswith("{")


class TestStream:
    def test_adds_up_to_the_whole_response(self, client):
        longer = {**SEEDED, "max_output_tokens": 48}  # several tokens may come at once
        whole = ask(client, input="Tell me a story.", **longer)
        events = read(client.responses.create(model=MODEL, input="Tell me a story.", stream=True, **longer))
        kinds = [event["type"] for event in events]
        assert kinds[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert kinds[-4:-1] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
        ]
        assert kinds[-1] == f"response.{whole.status}"
        assert kinds.count("response.output_text.delta") > 5
        final = events[-1]["response"]
        assert add_up(events) == final["output"]
        assert without_ids(final["output"]) == without_ids(document_of(whole)["output"])
        assert final["usage"]["output_tokens"] == whole.usage.output_tokens

    def test_helper_of_the_client(self, client):
        with client.responses.stream(model=MODEL, input="Name a colour.", temperature=0.0) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            assert stream.get_final_response().output_text == text

    def test_async(self, server):
        async def run() -> tuple[str, str]:
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
                whole = await client.responses.create(model=MODEL, input="Tell me a story.", **SEEDED)
                text = ""
                async with await client.responses.create(
                    model=MODEL, input="Tell me a story.", stream=True, **SEEDED
                ) as stream:
                    async for event in stream:
                        text += event.delta if event.type == "response.output_text.delta" else ""
                return whole.output_text, text

        whole, text = asyncio.run(run())
        assert whole == text != ""

    def test_ends_when_the_client_goes(self, client, server):
        with client.responses.create(model=MODEL, input="Go on for ever.", stream=True, **ENDLESS) as stream:
            created = next(iter(stream))
            wait_for(lambda: running(server) == 1)
        wait_for(lambda: running(server) == 0)
        assert client.responses.retrieve(created.response.id).status == "cancelled"


class TestTools:
    def test_forced_call_and_its_result(self, client):
        question: Any = {"role": "user", "content": "How is the weather in Rome?"}
        fields: dict[str, Any] = {"tools": [WEATHER], "temperature": 0.0, "max_output_tokens": 60}
        response = ask(client, input=[question], tool_choice="required", parallel_tool_calls=False, **fields)
        (call,) = response.output
        assert call.type == "function_call"
        assert call.name == "get_weather"
        assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 24 degrees."}
        answer = ask(client, input=[question, call, result], tool_choice="none", **fields)
        assert answer.output[0].type == "message"
        chained = ask(client, input=[result], previous_response_id=response.id, tool_choice="none", **fields)
        assert chained.output_text == answer.output_text

    @pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
    def test_stream_adds_up_to_the_whole_response(self, client, choice):
        fields: dict[str, Any] = {
            "input": "How is the weather in Paris?", "tools": [WEATHER], "tool_choice": choice, **SEEDED,
            "max_output_tokens": 80,
        }  # fmt: skip
        whole = ask(client, **fields)
        events = read(client.responses.create(model=MODEL, stream=True, **fields))
        kinds = [event["type"] for event in events]
        assert "response.function_call_arguments.delta" in kinds
        assert "response.function_call_arguments.done" in kinds
        assert "response.output_text.delta" not in kinds
        assert add_up(events) == events[-1]["response"]["output"]
        assert without_ids(add_up(events)) == without_ids(document_of(whole)["output"])

    def test_call_that_is_cut(self, client):
        response = ask(
            client, input="Weather?", tools=[WEATHER], tool_choice="required", max_output_tokens=16, temperature=0.0
        )
        assert response.status == "incomplete"

    def test_log_probabilities_are_refused(self, client):
        with pytest.raises(openai.BadRequestError, match=r"message\.output_text\.logprobs"):
            ask(client, input="Hi", tools=[WEATHER], include=["message.output_text.logprobs"])


class TestStored:
    def test_goes_on_from_an_earlier_response(self, client):
        first = ask(client, input="My name is Ada.", **GREEDY)
        said = first.output_text
        second = ask(client, input="What is my name?", previous_response_id=first.id, **GREEDY)
        turns: Any = [
            {"role": "user", "content": "My name is Ada."},
            {"role": "assistant", "content": said},
            {"role": "user", "content": "What is my name?"},
        ]
        assert second.output_text == ask(client, input=turns, **GREEDY).output_text
        items = client.responses.input_items.list(second.id, order="asc", limit=2)
        validate("ResponseItemList", document_of(items))
        assert items.has_more
        assert [item.role for item in items] == ["user", "assistant", "user"]  # the client turns the pages

    def test_fetch_and_delete(self, client):
        made = ask(client, input="Hi", **GREEDY)
        fetched = client.responses.retrieve(made.id)
        assert document_of(fetched) == document_of(made)
        client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError, match="deleted"):
            client.responses.retrieve(made.id)

    def test_not_stored(self, client):
        made = ask(client, input="Hi", store=False, **GREEDY)
        with pytest.raises(openai.NotFoundError, match="no response"):
            client.responses.retrieve(made.id)

    def test_only_background_can_be_cancelled(self, client):
        made = ask(client, input="Hi", **GREEDY)
        with pytest.raises(openai.BadRequestError, match="background"):
            client.responses.cancel(made.id)
        with pytest.raises(openai.BadRequestError, match="background"):
            client.responses.retrieve(made.id, stream=True)


class TestBackground:
    def test_runs_on_by_itself(self, client):
        expected = ask(client, input="Tell me a story.", **SEEDED)
        made = ask(client, input="Tell me a story.", background=True, **SEEDED)
        assert made.status == "queued"
        wait_for(lambda: client.responses.retrieve(made.id).status in ("completed", "incomplete"))
        assert client.responses.retrieve(made.id).output_text == expected.output_text

    def test_stream_can_be_taken_up_again(self, client):
        stream = client.responses.create(model=MODEL, input="Tell me a story.", background=True, stream=True, **SEEDED)
        with stream:
            begun = [document_of(event) for _, event in zip(range(5), stream, strict=False)]
        response_id = begun[0]["response"]["id"]
        events = read(client.responses.retrieve(response_id, stream=True))
        assert events[:5] == begun
        assert [event["type"] for event in events[:3]] == [
            "response.created",
            "response.queued",
            "response.in_progress",
        ]
        with client.responses.retrieve(response_id, stream=True, starting_after=4) as rest:
            assert [document_of(event) for event in rest] == events[5:]
        assert add_up(events) == events[-1]["response"]["output"]

    def test_cancel(self, client, server):
        made = ask(client, input="Go on for ever.", background=True, **ENDLESS)
        wait_for(lambda: running(server) == 1)
        assert client.responses.cancel(made.id).status == "cancelled"
        wait_for(lambda: running(server) == 0)
        assert client.responses.cancel(made.id).status == "cancelled"
        with pytest.raises(openai.BadRequestError, match="cancelled"):
            ask(client, input="And?", previous_response_id=made.id)

    def test_delete_ends_it(self, client, server):
        made = ask(client, input="Go on for ever.", background=True, **ENDLESS)
        wait_for(lambda: running(server) == 1)
        client.responses.delete(made.id)
        wait_for(lambda: running(server) == 0)


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "name"),
        [
            ({"truncation": "auto"}, "truncation"),
            ({"reasoning": {"effort": "low"}}, "reasoning"),
            ({"reasoning": {"summary": "auto"}}, "summary"),
            ({"conversation": "conv_1"}, "conversation"),
            ({"max_tool_calls": 3}, "max_tool_calls"),
            ({"text": {"verbosity": "low"}}, "verbosity"),
            ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
            ({"tools": [{"type": "web_search"}]}, "web_search"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"include": ["web_search_call.results"]}, "include"),
            ({"top_logprobs": 3}, "top_logprobs"),
            ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
            ({"background": True, "store": False}, "background"),
            ({"temperature": -1}, "temperature"),
            ({"max_output_tokens": 100_000}, "max_tokens"),
            ({"input": [{"type": "reasoning", "summary": []}]}, "content"),
            ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image"),
            ({"input": []}, "messages"),
            ({"extra_body": {"colour": "blue"}}, "colour"),
            ({"tools": [WEATHER], "text": {"format": {"type": "json_object"}}}, "tool_choice"),
        ],
    )
    def test_is_a_400_that_names_the_field(self, client, fields, name):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model=MODEL, **{"input": "Hi", **fields})
        assert name in caught.value.body["message"]  # type: ignore[index]
        assert caught.value.body["type"] == "invalid_request_error"  # type: ignore[index]

    @pytest.mark.parametrize("path", ["/v1/responses", "/v1/completions", "/v1/messages"])
    def test_half_a_character(self, server, path):
        """It could not be sent back, nor to the engine: wherever it stands, it is refused at once."""
        body = r'{"metadata": {"a": "\\ud800 \ud83d\ude00"}, "stop": ["\uDC00"]}'
        with server.client() as http:
            answer = http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert "half a character" in answer.text

    def test_unknown_model(self, client):
        with pytest.raises(openai.NotFoundError, match="gpt-99"):
            client.responses.create(model="gpt-99", input="Hi")

    @pytest.mark.parametrize("call", ["retrieve", "delete", "cancel"])
    def test_unknown_response(self, client, call):
        with pytest.raises(openai.NotFoundError, match="resp_none") as caught:
            getattr(client.responses, call)("resp_none")
        assert caught.value.body["code"] is None

    def test_unknown_previous_response(self, client):
        with pytest.raises(openai.NotFoundError, match="resp_none"):
            ask(client, input="Hi", previous_response_id="resp_none")


def running(server: Running) -> int:
    with server.client() as http:
        page = http.get("/metrics").text
    (line,) = [line for line in page.splitlines() if line.startswith("quire_requests_running ")]
    return int(float(line.split()[1]))
