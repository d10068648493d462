"""Tool calls and JSON schemas through chat completions, by OpenAI's client."""

from __future__ import annotations

import json

import jsonschema
import openai
import pytest

pytestmark = pytest.mark.server

MODEL = "smollm2:135m"
MESSAGES = [{"role": "user", "content": "What is the weather in Paris and in Rome?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
        },
    },
}
TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string", "maxLength": 12}},
            "required": ["zone"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
OPTIONS = {"model": MODEL, "messages": MESSAGES, "temperature": 0.8, "seed": 3, "max_tokens": 120}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def check_call(call, tool):
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert call.function.name == tool["function"]["name"]
    jsonschema.validate(json.loads(call.function.arguments), tool["function"]["parameters"])


def test_required_calls_fit_one_of_the_schemas(client):
    made = client.chat.completions.create(tools=[WEATHER, TIME], tool_choice="required", **OPTIONS).choices[0]
    assert made.finish_reason == "tool_calls"
    assert made.message.tool_calls
    tools = {tool["function"]["name"]: tool for tool in (WEATHER, TIME)}
    for call in made.message.tool_calls:
        check_call(call, tools[call.function.name])


def test_a_named_function_is_called_once(client):
    choice = {"type": "function", "function": {"name": "get_time"}}
    made = client.chat.completions.create(tools=[WEATHER, TIME], tool_choice=choice, **OPTIONS).choices[0]
    (call,) = made.message.tool_calls
    check_call(call, TIME)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_with_its_only_call(client, stream):
    """Its tokens and log probabilities do not depend on when its abort reaches the engine, or on drafts."""
    options = {**OPTIONS, "tool_choice": {"type": "function", "function": {"name": "get_time"}}, "logprobs": True}
    found = client.chat.completions.create(tools=[TIME], stream=stream, **options)
    choices = [choice for part in found for choice in part.choices] if stream else found.choices
    tokens = [each.token for choice in choices if choice.logprobs for each in choice.logprobs.content]
    call = json.loads("".join(tokens).removeprefix("<tool_call>"))  # nothing is behind it
    assert call["name"] == "get_time"
    if not stream:
        assert found.usage.completion_tokens == len(tokens)


def test_none_makes_no_call(client):
    made = client.chat.completions.create(tools=[WEATHER], tool_choice="none", **OPTIONS).choices[0]
    assert not made.message.tool_calls
    assert made.message.content


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_stream_adds_up_to_the_whole_answer(client, choice):
    options = {**OPTIONS, "tools": [WEATHER, TIME], "tool_choice": choice, "n": 2}
    whole = client.chat.completions.create(**options)
    contents, calls, reasons = ["", ""], [{}, {}], [None, None]
    for chunk in client.chat.completions.create(stream=True, **options):
        for one in chunk.choices:
            contents[one.index] += one.delta.content or ""
            reasons[one.index] = one.finish_reason or reasons[one.index]
            for call in one.delta.tool_calls or ():
                known = calls[one.index].setdefault(call.index, ["", ""])
                known[0] += call.function.name or ""
                known[1] += call.function.arguments or ""
    for one in whole.choices:
        assert contents[one.index] == (one.message.content or "")
        assert reasons[one.index] == one.finish_reason
        expected = [[call.function.name, call.function.arguments] for call in one.message.tool_calls or ()]
        assert list(calls[one.index].values()) == expected


def test_the_conversation_goes_on_with_a_result(client):
    made = client.chat.completions.create(tools=[TIME], tool_choice="required", **OPTIONS).choices[0].message
    conversation = [
        *MESSAGES,
        made.model_dump(exclude_none=True),
        *({"role": "tool", "tool_call_id": call.id, "content": "12:00"} for call in made.tool_calls),
    ]
    answer = client.chat.completions.create(**{**OPTIONS, "messages": conversation, "tools": [TIME]})
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


def test_json_schema(client):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        options = {**OPTIONS, "seed": seed, "max_tokens": 200}
        made = client.chat.completions.create(response_format=form, **options).choices[0]
        assert made.finish_reason == "stop"
        jsonschema.validate(json.loads(made.message.content), SCHEMA)


def test_json_object(client):
    made = client.chat.completions.create(
        response_format={"type": "json_object"}, **{**OPTIONS, "temperature": 0, "max_tokens": 400}
    )
    if made.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(made.choices[0].message.content), dict)
    else:
        assert made.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("structure", "pattern"),
    [
        ({"guided_regex": r"[0-9]{3}-[a-f]{2}"}, r"[0-9]{3}-[a-f]{2}"),
        ({"guided_choice": ["red", "green"]}, "red|green"),
        ({"structured_outputs": {"regex": "(yes|no)!"}}, "(yes|no)!"),
        ({"guided_grammar": 'start: "x" /[0-9]{1,4}/ "y"'}, "x[0-9]+y"),
        ({"guided_grammar": 'root ::= "ab" | "cd"'}, "ab|cd"),
    ],
)
def test_patterns_choices_and_grammars(client, structure, pattern):
    import re

    made = client.completions.create(
        model=MODEL, prompt="Say:", max_tokens=40, temperature=1.0, seed=1, extra_body=structure
    ).choices[0]
    assert made.finish_reason == "stop"
    assert re.fullmatch(pattern, made.text)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, ["json_schema"]),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}, []),
        ({"structured_outputs": {"regex": "("}}, []),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, ["json", "regex"]),
        ({"structured_outputs": {"sonnet": 1}}, ["sonnet"]),
        ({"guided_regex": "a" * 100_000}, ["regex"]),
        ({"tools": [WEATHER, WEATHER]}, ["get_weather"]),
        ({"tools": [{"type": "web_search"}]}, ["web_search"]),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "nope"}}}, ["nope"]),
        ({"tool_choice": "required"}, ["tools"]),
    ],
)
def test_what_cannot_be_honoured_is_a_400(client, body, words):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**OPTIONS, extra_body=body)
    for word in words:
        assert word in str(error.value)
