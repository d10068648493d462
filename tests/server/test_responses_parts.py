"""What happens to responses only when things go wrong, or after very long: drafts that fail, shelves that are full."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest

from quire.errors import EngineClosed, EngineError, Overloaded, ResponseNotFound
from quire.server.app import build_app
from quire.server.auth import ApiKeys
from quire.server.chat import ChatParser
from quire.server.config import ServerConfig
from quire.server.metrics import Metrics
from quire.server.openai.responses import store as store_module
from quire.server.openai.responses.builder import ResponseBuilder
from quire.server.openai.responses.generation import ResponseGeneration
from quire.server.openai.responses.protocol import as_messages
from quire.server.openai.responses.store import ResponseStore, StoredResponse, TenantResponses
from quire.text.answer_format import AnswerFormat
from quire.text.reasoning.formats import THINK
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.tools.definitions import NO_TOOLS, ToolChoice, make_tool
from quire.text.tools.events import ReasoningDelta, TextDelta
from quire.text.tools.formats import HERMES
from tests.server.openapi_schema import validate_event
from tests.server.scripted import ScriptedService, make_output_processor
from tests.text.vocabularies import byte_level

pytestmark = pytest.mark.server

REASONING = AnswerFormat(HERMES, NO_TOOLS, THINK, "reasoning")
TEXT_ONLY = AnswerFormat(HERMES, NO_TOOLS, None, "answer")
TOOL = make_tool("tools[0]", name="look", parameters={"type": "object", "properties": {}})


def make_stored(response_id: str = "resp_1", status: str = "in_progress", **more: Any) -> StoredResponse:
    return StoredResponse(ResponseBuilder(make_document(response_id, status)), [], **more)


def make_document(response_id: str, status: str) -> dict[str, Any]:
    return {
        "id": response_id, "object": "response", "created_at": 0, "status": status, "error": None,
        "incomplete_details": None, "instructions": None, "metadata": {}, "model": "scripted", "output": [],
        "parallel_tool_calls": True, "temperature": 1.0, "tool_choice": "auto", "tools": [], "top_p": 1.0,
    }  # fmt: skip


def make_generation(
    service: ScriptedService, stored: StoredResponse, responses: TenantResponses | None = None, **more: Any
) -> ResponseGeneration:
    parser = ChatParser(more.pop("format", TEXT_ONLY))
    return ResponseGeneration(service, make_output_processor(), parser, stored, responses, **more)  # type: ignore[arg-type]


def read_events(data: bytes) -> list[dict[str, Any]]:
    events = [json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: ")]
    for event in events:
        validate_event(event)
    return events


async def gather(stream: Any) -> list[dict[str, Any]]:
    return read_events(b"".join([data async for data in stream]))


class TestEndings:
    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (EngineError("It broke."), "server_error"),
            (EngineClosed("Shut down."), "server_error"),
            (Overloaded("Full."), "rate_limit_exceeded"),
        ],
    )
    def test_an_error_is_the_last_event(self, error, code):
        stored, responses = make_stored(), TenantResponses(lambda: 0.0)
        service = ScriptedService(["Once ", "upon"], error=error)
        events = asyncio.run(gather(make_generation(service, stored, responses).stream()))
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"] == {"code": code, "message": str(error)}
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Once upon"
        assert responses.find("resp_1").document["status"] == "failed"

    def test_an_answer_that_failed_in_the_engine(self):
        service = ScriptedService(["Once"], finish="error")
        events = asyncio.run(gather(make_generation(service, make_stored()).stream()))
        assert events[-1]["type"] == "response.failed"

    def test_an_empty_answer_has_an_item(self):
        events = asyncio.run(gather(make_generation(ScriptedService([""]), make_stored()).stream()))
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""
        assert events[-1]["type"] == "response.completed"

    def test_who_stops_reading_cancels(self):
        service, stored = ScriptedService(["a", "b", "c"]), make_stored()

        async def run() -> None:
            stream = make_generation(service, stored).stream()
            for _ in range(3):
                await anext(stream)
            await stream.aclose()

        asyncio.run(run())
        assert service.num_closed == 1
        assert stored.document["status"] == "cancelled"

    def test_calls_between_texts(self):
        said = ["Well. ", '<tool_call>\n{"name": "look", ', '"arguments": {"a": 1}}\n</tool_call>', " And then."]
        format = AnswerFormat(HERMES, ToolChoice(mode="auto", tools=(TOOL,)), None, "answer")
        events = asyncio.run(gather(make_generation(ScriptedService(said), make_stored(), format=format).stream()))
        first, call, last = events[-1]["response"]["output"]
        assert (first["type"], call["type"], last["type"]) == ("message", "function_call", "message")
        assert json.loads(call["arguments"]) == {"a": 1}
        assert [item["status"] for item in (first, call, last)] == ["completed"] * 3

    def test_reasoning_is_an_item_that_goes_back_with_the_answer(self):
        service = ScriptedService(["Let me", " see.</think>", "Yes."], tokenizer=Tokenizer.from_gguf(byte_level()))
        events = asyncio.run(gather(make_generation(service, make_stored(), format=REASONING).stream()))
        reasoning, message = events[-1]["response"]["output"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
        assert message["content"][0]["text"] == "Yes."
        kinds = [event["type"] for event in events]
        assert kinds.count("response.reasoning_text.delta") == 2
        assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
        assert as_messages([reasoning, message], None) == [
            {"role": "assistant", "content": "Yes.", "reasoning_content": "Let me see."}
        ]
        call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
        (called,) = as_messages([reasoning, call], None)
        assert (called["reasoning_content"], len(called["tool_calls"])) == ("Let me see.", 1)

    def test_log_probabilities_of_reasoning_are_not_those_of_the_text(self):
        builder = make_stored().builder
        builder.write([ReasoningDelta("Hm")], [{"token": "Hm"}])
        builder.write([TextDelta("Yes")], [{"token": "Yes"}])
        assert builder.document["output"][1]["content"][0]["logprobs"] == [{"token": "Yes"}]

    def test_a_call_that_is_cut_is_incomplete(self):
        said = ['<tool_call>\n{"name": "look", "arguments": {"a": ']
        format = AnswerFormat(HERMES, ToolChoice(mode="required", tools=(TOOL,)), None, "answer")
        service = ScriptedService(said, finish="length")
        events = asyncio.run(gather(make_generation(service, make_stored(), format=format).stream()))
        (call,) = events[-1]["response"]["output"]
        assert call["status"] == "incomplete"
        assert call["arguments"] == '{"a": '
        assert events[-1]["type"] == "response.incomplete"

    def test_the_one_call_that_was_wanted_ends_the_answer(self):
        said = ['<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>', "More", " and more"]
        format = AnswerFormat(HERMES, ToolChoice(mode="auto", tools=(TOOL,), parallel=False), None, "answer")
        service = ScriptedService(said)
        events = asyncio.run(gather(make_generation(service, make_stored(), format=format).stream()))
        assert [item["type"] for item in events[-1]["response"]["output"]] == ["function_call"]
        assert events[-1]["response"]["usage"]["output_tokens"] == 1
        assert service.num_closed == 1


class TestFollowers:
    def test_many_read_the_same(self):
        async def run() -> list[list[dict[str, Any]]]:
            stored = make_stored(status="queued", events=[])
            generation = make_generation(ScriptedService(["a", "b", "c"]), stored)
            readers = [asyncio.create_task(gather(stored.stream())) for _ in range(2)]
            generation.run_in_background()
            late = asyncio.create_task(gather(stored.stream(5)))
            return await asyncio.gather(*readers, late)

        first, second, late = asyncio.run(run())
        assert first == second
        assert late == first[5:]
        assert first[-1]["type"] == "response.completed"

    def test_are_told_of_a_cancellation(self):
        async def run() -> list[dict[str, Any]]:
            stored = make_stored(status="queued", events=[])
            service = ScriptedService(["a", "b"])
            waiting = asyncio.Event()

            async def wait(output_processors: Any) -> Any:
                async for grown in ScriptedService.generate(service, output_processors):
                    yield grown
                    waiting.set()
                    await asyncio.sleep(60)

            service.generate = wait  # type: ignore[method-assign]
            reader = asyncio.create_task(gather(stored.stream()))
            make_generation(service, stored).run_in_background()
            await waiting.wait()
            assert stored.task is not None
            stored.task.cancel()
            return await reader

        events = asyncio.run(run())
        assert events[-1]["response"]["status"] == "cancelled"
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "a"


class TestStore:
    def test_each_tenant_sees_its_own(self):
        store = ResponseStore()
        store.for_tenant("one").add(make_stored())
        assert store.for_tenant("one").find("resp_1")
        with pytest.raises(ResponseNotFound, match="no response"):
            store.for_tenant("two").find("resp_1")

    def test_each_key_sees_its_own(self):
        keys = {"one": "key-of-one", "two": "key-of-two"}
        middleware = build_app(ServerConfig(log_requests=False), ApiKeys(keys), Metrics())
        middleware.service = ScriptedService([])  # type: ignore[assignment]
        middleware.app.state.responses.for_tenant("one").add(make_stored(status="completed"))  # type: ignore[attr-defined]

        async def run(method: str, key: str) -> int:
            async with httpx2.AsyncClient(transport=httpx2.ASGITransport(middleware), base_url="http://quire") as http:
                answer = await http.request(method, "/v1/responses/resp_1", headers={"Authorization": f"Bearer {key}"})
            return answer.status_code

        assert asyncio.run(run("GET", keys["two"])) == 404
        assert asyncio.run(run("DELETE", keys["two"])) == 404
        assert asyncio.run(run("GET", "key-of-none")) == 401
        assert asyncio.run(run("GET", keys["one"])) == 200

    def test_the_oldest_go_when_there_are_too_many(self, monkeypatch):
        monkeypatch.setattr(store_module, "MAX_RESPONSES", 2)
        responses = TenantResponses(lambda: 0.0)
        for number in range(3):
            responses.add(make_stored(f"resp_{number}", "completed"))
        with pytest.raises(ResponseNotFound, match="the last 2 responses"):
            responses.find("resp_0")
        assert responses.find("resp_1")
        assert responses.find("resp_2")

    def test_the_oldest_go_when_they_are_too_large(self, monkeypatch):
        monkeypatch.setattr(store_module, "MAX_BYTES", 1 << 20)
        responses = TenantResponses(lambda: 0.0)
        for number in range(3):
            stored = make_stored(f"resp_{number}", "completed")
            stored.items.append({"text": "x" * 500_000})
            responses.add(stored)
        with pytest.raises(ResponseNotFound, match="1 MiB"):
            responses.find("resp_0")
        assert responses.find("resp_1")

    def test_events_that_are_kept_have_a_size(self, monkeypatch):
        monkeypatch.setattr(store_module, "MAX_BYTES", 1 << 20)
        responses, stored = TenantResponses(lambda: 0.0), make_stored(status="completed", events=[])
        responses.add(stored)
        assert responses.find("resp_1")
        stored.append([b"x" * (1 << 20)])
        responses.update_size(stored)
        with pytest.raises(ResponseNotFound, match="1 MiB"):
            responses.find("resp_1")

    def test_old_ones_go(self):
        now_s = 0.0
        responses = TenantResponses(lambda: now_s)
        responses.add(make_stored("resp_1", "completed"))
        responses.add(make_stored("resp_2", "in_progress"))
        now_s = store_module.MAX_AGE_S + 1
        with pytest.raises(ResponseNotFound, match="hours"):
            responses.find("resp_1")
        assert responses.find("resp_2"), "one that is still being made stays"


def test_calls_join_the_turn_that_they_were_made_in():
    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    words = {"type": "message", "role": "assistant", "content": [{"text": "Let me see."}]}
    result = {"type": "function_call_output", "call_id": "1", "output": "a cat"}
    messages = as_messages([words, call, {**call, "call_id": "2"}, result, call], "Be kind.")
    assert [message["role"] for message in messages] == ["system", "assistant", "tool", "assistant"]
    assert messages[1]["content"] == "Let me see."
    assert [made["id"] for made in messages[1]["tool_calls"]] == ["1", "2"]
    assert messages[3]["content"] is None
