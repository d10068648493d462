"""OpenAI's completions and chat completions, driven by its own client and by plain HTTP."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from quire.core.params import SamplingParams
from tests.server.openapi_schema import is_there, validate

pytestmark = pytest.mark.server

MODEL = "smollm2:135m"
PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "Say hello in one short sentence."}]
SEEDED = {"temperature": 0.8, "seed": 5, "max_tokens": 24}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def http(server):
    with server.client() as http:
        yield http


class TestModels:
    def test_list_and_show(self, client):
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).owned_by == "quire"

    def test_unknown(self, client):
        with pytest.raises(openai.NotFoundError, match='no model "gpt-9"'):
            client.models.retrieve("gpt-9")


class TestCompletions:
    def test_greedy_is_the_offline_answer(self, client, llm):
        made = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0)
        (expected,) = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0.0), use_tqdm=False)
        assert made.choices[0].text == expected.outputs[0].text
        assert made.choices[0].finish_reason == expected.outputs[0].finish_reason
        assert made.usage.prompt_tokens == len(expected.prompt_token_ids)
        assert made.usage.completion_tokens == len(expected.outputs[0].token_ids)

    def test_a_stream_adds_up_to_the_whole_answer(self, client):
        whole = client.completions.create(model=MODEL, prompt=PROMPT, n=2, **SEEDED)
        texts, reasons = ["", ""], [None, None]
        stream = client.completions.create(
            model=MODEL, prompt=PROMPT, n=2, stream=True, stream_options={"include_usage": True}, **SEEDED
        )
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        assert texts == [choice.text for choice in whole.choices]
        assert texts[0] != texts[1]
        assert reasons == [choice.finish_reason for choice in whole.choices]
        assert chunk.usage.completion_tokens == whole.usage.completion_tokens

    def test_several_prompts_as_texts_and_as_ids(self, client, http):
        ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
        made = client.completions.create(model=MODEL, prompt=[ids, ids[:2]], max_tokens=5, temperature=0)
        one = client.completions.create(model=MODEL, prompt=[PROMPT], max_tokens=5, temperature=0)
        assert len(made.choices) == 2
        assert made.choices[0].text == one.choices[0].text

    def test_logprobs_and_echo(self, client):
        made = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=3, temperature=0, logprobs=2, echo=True
        ).choices[0]
        columns = made.logprobs
        assert made.text.startswith(PROMPT)
        assert columns.token_logprobs[0] is None
        assert all(value <= 0 for value in columns.token_logprobs[1:])
        assert "".join(columns.tokens) == made.text
        assert all(len(top) >= 2 for top in columns.top_logprobs[1:])
        ends = [*columns.text_offset[1:], len(made.text)]
        spans = [made.text[start:end] for start, end in zip(columns.text_offset, ends, strict=True)]
        assert spans == columns.tokens

    @pytest.mark.parametrize("text", ["Grüße aus 東京, 🦙🦙 наш дом", "naïve café — ½"])
    @pytest.mark.parametrize("max_tokens", [0, 1])
    def test_an_evaluation_harness_scores_a_prompt(self, http, llm, text, max_tokens):
        """As lm-eval-harness does: an echoed prompt of token ids, whose continuation is summed and compared."""
        ids = llm.get_tokenizer().encode(text)
        fields = {"max_tokens": max_tokens, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
        answer = http.post("/v1/completions", json={"prompt": [ids], **fields}).json()
        (choice,) = answer["choices"]
        columns, num_context = choice["logprobs"], len(ids) // 2
        assert answer["usage"]["completion_tokens"] == max_tokens
        assert {len(column) for column in columns.values()} == {len(ids) + max_tokens}
        (expected,) = llm.score([{"prompt_token_ids": ids}])
        assert columns["token_logprobs"][1 : len(ids)] == pytest.approx(expected.logprobs, abs=1e-3)
        (greedy,) = llm.generate([{"prompt_token_ids": ids}], SamplingParams(max_tokens=0, prompt_logprobs=1))
        for index in range(num_context, len(ids)):
            likeliest = max(one.logprob for one in greedy.prompt_logprobs[index].values())
            assert max(columns["top_logprobs"][index].values()) == pytest.approx(likeliest, abs=1e-3)
            assert columns["tokens"][index] in columns["top_logprobs"][index]
        assert choice["text"].startswith(text)
        assert columns["text_offset"][: len(ids)] == [
            len(llm.get_tokenizer().decode(ids[:index]).rstrip("\ufffd")) for index in range(len(ids))
        ]

    def test_stop_and_its_reason(self, http):
        body = {"prompt": "1, 2, 3, 4,", "max_tokens": 40, "temperature": 0, "stop": [" 7"]}
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " 7")
        assert " 7" not in choice["text"]

    def test_extra_fields_of_vllm(self, http):
        body = {
            "prompt": PROMPT, "max_tokens": 8, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 8,
            "ignore_eos": True, "stop_token_ids": [5], "prompt_logprobs": 1, "return_token_ids": True, "seed": 1,
        }  # fmt: skip
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
        assert len(choice["token_ids"]) == 8
        assert choice["prompt_logprobs"][0] is None
        assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"])

    def test_cached_tokens_are_reported(self, client):
        prompt = "A prompt that nobody else sends. " * 20
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
        again = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
        assert again.usage.prompt_tokens_details.cached_tokens > 32

    def test_bias_decides(self, client):
        options = {"logit_bias": {"42": 100}, "extra_body": {"return_token_ids": True}}
        made = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3, temperature=0, **options)
        assert made.choices[0].token_ids == [42, 42, 42]


class TestChat:
    def test_answers(self, client):
        made = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=16, temperature=0)
        assert made.object == "chat.completion"
        assert made.choices[0].message.role == "assistant"
        assert made.choices[0].message.content

    def test_a_stream_adds_up_to_the_whole_answer(self, client):
        whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, **SEEDED)
        stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, **SEEDED)
        chunks = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason

    def test_async_client(self, server):
        async def ask():
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
                asked = [
                    client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, temperature=0)
                    for _ in range(4)
                ]
                return {made.choices[0].message.content for made in await asyncio.gather(*asked)}

        assert len(asyncio.run(ask())) == 1

    def test_logprobs(self, client):
        made = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
        )
        content = made.choices[0].logprobs.content
        assert len(content) == 3
        assert all(one.top_logprobs[0].logprob == one.logprob for one in content)
        assert bytes(content[0].bytes).decode() == content[0].token

    def test_parts_of_text_are_taken(self, client):
        parts = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
        options = {"model": MODEL, "max_tokens": 8, "temperature": 0}
        plain = client.chat.completions.create(messages=MESSAGES, **options)
        assert client.chat.completions.create(messages=parts, **options).choices == plain.choices

    def test_a_developer_is_heard_as_the_system(self, client):
        options = {"model": MODEL, "max_tokens": 8, "temperature": 0}
        said = [
            client.chat.completions.create(messages=[{"role": role, "content": "Be brief."}, *MESSAGES], **options)
            for role in ("system", "developer")
        ]
        assert said[0].choices == said[1].choices
        assert said[0].usage.prompt_tokens == said[1].usage.prompt_tokens


class TestRefusals:
    @pytest.mark.parametrize(
        ("path", "body", "words"),
        [
            ("/v1/completions", {"prompt": "x", "frobnicate": 1}, ["frobnicate"]),
            ("/v1/completions", {"prompt": "x", "request_id": "a"}, ["request_id"]),
            ("/v1/completions", {"prompt": "x", "stream_options": {"frobnicate": True}}, ["frobnicate"]),
            ("/v1/completions", {"max_tokens": 1}, ["prompt", "missing"]),
            ("/v1/completions", {"prompt": "x", "temperature": -1}, ["temperature", "-1"]),
            ("/v1/completions", {"prompt": "x", "temperature": "hot"}, ["temperature"]),
            ("/v1/completions", {"prompt": "x", "max_tokens": -1}, ["max_tokens"]),
            ("/v1/completions", {"prompt": "x", "max_tokens": 100_000}, ["100,000", "2,048"]),
            ("/v1/completions", {"prompt": "x", "n": 10_000}, ["n is 10000"]),
            ("/v1/completions", {"prompt": []}, ["prompt", "empty"]),
            ("/v1/completions", {"prompt": ["x"] * 1000}, ["1000 prompts", "128"]),
            ("/v1/completions", {"prompt": [1 << 40]}, ["prompt_token_ids"]),
            ("/v1/completions", {"prompt": "x", "stop": ["a"] * 100}, ["stop", "100", "64"]),
            ("/v1/completions", {"prompt": "x", "suffix": "y"}, ["suffix"]),
            ("/v1/completions", {"prompt": "x", "best_of": 3}, ["best_of"]),
            ("/v1/completions", {"prompt": "x", "logit_bias": {"a": 1}}, ["logit_bias", '"a"']),
            ("/v1/completions", {"prompt": "x", "priority": 3}, ["priority"]),
            ("/v1/chat/completions", {"messages": []}, ["messages"]),
            ("/v1/chat/completions", {"messages": [{"content": "x"}]}, ["role"]),
            ("/v1/chat/completions", {"messages": MESSAGES, "chat_template": "x"}, ["chat_template"]),
            ("/v1/chat/completions", {"messages": MESSAGES, "top_logprobs": 3}, ["top_logprobs"]),
            ("/v1/chat/completions", {"messages": MESSAGES, "audio": {}}, ["audio"]),
        ],
    )
    def test_a_wrong_field_is_named(self, http, path, body, words):
        answer = http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        for word in words:
            assert word in error["message"], error

    @pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b'{"prompt": NaN}', b"\xff\xfe", b'"x"'])
    def test_what_is_not_an_object_is_a_400(self, http, body):
        answer = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]

    def test_a_large_body_is_a_413(self, http):
        answer = http.post("/v1/completions", content=b"x" * (10 << 20))
        assert answer.status_code == 413
        assert "4,194,304" in answer.json()["error"]["message"]

    def test_no_such_path(self, http):
        assert http.get("/v2/nothing").status_code == 404
        assert http.get("/v1/completions").status_code == 405

    def test_the_id_of_a_request_comes_back(self, http):
        answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"x-request-id": "abc-1"})
        assert answer.headers["x-request-id"] == "abc-1"
        assert answer.json()["id"] == "cmpl-abc-1"
        odd = http.get("/v1/models", headers={"x-request-id": "a b\tc"})
        assert odd.headers["x-request-id"] != "a b\tc"


class TestHealth:
    def test_health_ready_generate(self, http):
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/ready").json()["status"] == "ready"
        assert len(http.get("/health/generate").json()["token_ids"]) == 1

    def test_metrics(self, http):
        http.post("/v1/completions", json={"prompt": "x", "max_tokens": 4, "ignore_eos": True})
        page = http.get("/metrics").text
        figures = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        assert float(figures["quire_output_tokens_total"]) >= 4
        assert float(figures["quire_engine_ready"]) == 1
        for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "request_seconds", "step_seconds"):
            assert float(figures[f"quire_{name}_count"]) > 0


@pytest.mark.skipif(not is_there, reason="OpenAI's schema is not beside the project")
def test_bodies_are_what_openai_has_published(http):
    options = {"max_tokens": 4, "temperature": 0, "model": MODEL}
    chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1, **options}
    validate("CreateChatCompletionResponse", http.post("/v1/chat/completions", json=chat).json())
    plain = {"prompt": PROMPT, "logprobs": 2, **options}
    validate("CreateCompletionResponse", http.post("/v1/completions", json=plain).json())
    validate("ListModelsResponse", http.get("/v1/models").json())
    body = {**chat, "stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    for line in lines:
        validate("CreateChatCompletionStreamResponse", json.loads(line[6:]))


def test_raw_stream_is_what_curl_sees(http):
    body = {"prompt": PROMPT, "max_tokens": 3, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["object"] == "text_completion" for line in lines[:-1])


class TestPrediction:
    TEXT = "one two three four five six seven eight nine ten " * 3

    def test_it_makes_no_difference_to_the_answer(self, client):
        messages = [{"role": "user", "content": f"Repeat: {self.TEXT}"}]
        plain = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=48)
        for content in (plain.choices[0].message.content, [{"type": "text", "text": "something else entirely"}]):
            prediction = {"type": "content", "content": content}
            made = client.chat.completions.create(
                model=MODEL, messages=messages, temperature=0, max_tokens=48, prediction=prediction
            )
            assert made.choices[0].message.content == plain.choices[0].message.content
        details = plain.usage.completion_tokens_details
        assert details.accepted_prediction_tokens >= 0
        assert details.rejected_prediction_tokens >= 0

    @pytest.mark.parametrize(
        "prediction",
        ["text", {"type": "content"}, {"type": "image", "content": "x"}, {"type": "content", "content": 3}],
    )
    def test_a_wrong_one_is_refused(self, http, prediction):
        body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2, "prediction": prediction}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert "prediction" in answer.json()["error"]["message"]
