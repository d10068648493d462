"""Request bodies of OpenAI's completions and chat completions, with the fields that vLLM adds.

A field that is not declared here is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt

from quire.core.params import SamplingParams
from quire.errors import InvalidParams, show
from quire.server.request_model import ArrayOf, RequestModel

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Ids = ArrayOf[StrictInt]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
STRUCTURED_FIELDS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")

MAX_ID_DIGITS = 10
MAX_LOGPROBS = 20  # OpenAI's limit; documents with more take the event loop long to write


class StreamOptions(RequestModel):
    """`include_obfuscation` has no effect: quire adds no random characters to hide the length of an answer."""

    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None
    include_obfuscation: StrictBool | None = None


class NoEffectFields(RequestModel):
    """Fields that clients send and that do not change the answer. They have no effect."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: StrictBool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


NO_EFFECT = tuple(NoEffectFields.model_fields)


class SamplingFields(NoEffectFields):
    """The fields that completions and chat completions share."""

    model: str | None = None
    n: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    max_tokens: StrictInt | None = None
    stop: str | ArrayOf[str] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    seed: StrictInt | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None

    top_k: StrictInt | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: StrictInt | None = None
    ignore_eos: StrictBool | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    allowed_token_ids: Ids | None = None
    bad_words: ArrayOf[str] | None = None
    prompt_logprobs: StrictInt | None = None
    return_token_ids: StrictBool | None = None
    priority: StrictInt | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: ArrayOf[str] | None = None
    guided_grammar: str | None = None
    use_beam_search: StrictBool | None = None
    best_of: StrictInt | None = None
    length_penalty: Number | None = None
    early_stopping: StrictBool | Literal["never"] | None = None
    early_exit: Number | None = None

    def sampling_params(self, defaults: Mapping[str, Any], **overrides: Any) -> SamplingParams:
        """The model's `defaults`, then the fields of the request, then `overrides` of the route."""
        given: dict[str, Any] = {
            name: value
            for name in (
                "n", "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "top_k", "min_p",
                "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output",
                "skip_special_tokens", "allowed_token_ids", "bad_words", "prompt_logprobs", "stop", "use_beam_search",
                "best_of", "length_penalty", "early_stopping", "early_exit",
            )
            if (value := getattr(self, name)) is not None
        }  # fmt: skip
        if self.prompt_logprobs is not None and not 0 <= self.prompt_logprobs <= MAX_LOGPROBS:
            raise InvalidParams(
                f"prompt_logprobs is {self.prompt_logprobs}; give a whole number from 0 to {MAX_LOGPROBS}.",
                "prompt_logprobs",
            )
        if given.get("top_k") == -1:
            given["top_k"] = 0  # vLLM's value for: keep all
        if self.logit_bias is not None:
            given["logit_bias"] = {token_id("logit_bias", key): value for key, value in self.logit_bias.items()}
        if (structured := self.structured()) is not None:
            given["structured_outputs"] = structured
        if self.use_beam_search:
            if self.stream:
                raise InvalidParams("The answers of a beam search are known at its end; leave stream out.", "stream")
            defaults = {"temperature": 0.0}  # nothing is drawn, so the model's sampling defaults do not apply
        return SamplingParams.of({**defaults, **given, **overrides})

    def structured(self) -> dict[str, Any] | None:
        """The structured outputs of the request, under their current or an older name."""
        asked = {name: value for name in STRUCTURED_FIELDS if (value := getattr(self, name)) is not None}
        if len(asked) > 1:
            raise InvalidParams(f"{' and '.join(asked)} all say what the answer looks like; give one of them.")
        for name, value in asked.items():
            return dict(value) if name == "structured_outputs" else {name.removeprefix("guided_"): value}
        return None


class CompletionRequest(SamplingFields):
    """POST /v1/completions"""

    prompt: str | ArrayOf[str] | Ids | ArrayOf[Ids]
    echo: StrictBool | None = None
    logprobs: StrictInt | None = None
    suffix: None = None

    def prompts(self, max_prompts: int) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidParams("prompt is an empty list; give at least one prompt.", "prompt")
        if isinstance(prompt[0], int):
            return [prompt]
        if len(prompt) > max_prompts:
            raise InvalidParams(
                f"prompt holds {len(prompt)} prompts; give at most {max_prompts} in one request.", "prompt"
            )
        return list(prompt)


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None
    value: dict[str, Any] | None = None  # the schema of a json_object, as Hugging Face's client sends it

    def structured(self) -> dict[str, Any] | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"json_object": True} if self.value is None else {"json": self.value}
        if not self.json_schema or "schema" not in self.json_schema:
            raise InvalidParams(
                "response_format.json_schema.schema is missing; give the schema there.",
                "response_format.json_schema.schema",
            )
        return {"json": self.json_schema["schema"]}


class TextPart(RequestModel):
    type: Literal["text"]
    text: str


class Prediction(RequestModel):
    """A text that the answer may repeat."""

    type: Literal["content"]
    content: str | ArrayOf[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatCompletionRequest(SamplingFields):
    """POST /v1/chat/completions"""

    messages: ArrayOf[dict[str, Any]]
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    response_format: ResponseFormat | None = None
    tools: ArrayOf[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: StrictBool | None = None
    reasoning_effort: Effort | None = None
    modalities: ArrayOf[Literal["text"]] | None = None
    prediction: Prediction | None = None

    def structured(self) -> dict[str, Any] | None:
        own = super().structured()
        asked = self.response_format.structured() if self.response_format else None
        if own is not None and asked is not None:
            raise InvalidParams("response_format and structured_outputs both say what the answer looks like; give one.")
        return own if own is not None else asked


def token_id(name: str, key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= MAX_ID_DIGITS):
        raise InvalidParams(f"{name} has the key {show(key)}; keys are token ids.", name)
    return int(key)
