"""Request bodies of TGI's API.

A field that is not declared here is refused by name. So are fields that would change the answer and that quire does not
support: typical_p, watermark, adapter_id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt

from quire.core.params import MAX_STOP_STRINGS, SamplingParams
from quire.errors import InvalidField, PromptTooLong
from quire.server.request_model import ArrayOf, RequestModel

DEFAULT_NEW_TOKENS = 100
MAX_BEST_OF = 16
MAX_TOP_TOKENS = 20

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[Number, Field(gt=0)]
Count = Annotated[StrictInt, Field(ge=1)]


class Grammar(RequestModel):
    """The format of the answer. The value of a json_schema has a name beside its schema."""

    type: Literal["json", "regex", "json_schema"]
    value: Any

    def structured(self) -> dict[str, Any]:
        if self.type == "regex":
            return {"regex": self.value}
        if self.type == "json":
            return {"json": self.value}
        if not isinstance(self.value, dict) or "schema" not in self.value:
            name = "parameters.grammar.value"
            raise InvalidField(f'{name} has no schema; give {{"name": ..., "schema": ...}} for json_schema.', name)
        return {"json": self.value["schema"]}


class Parameters(RequestModel):
    """Sampling parameters, and the details of the response."""

    best_of: Annotated[StrictInt, Field(ge=1, le=MAX_BEST_OF)] | None = None
    decoder_input_details: StrictBool | None = None
    details: StrictBool | None = None
    do_sample: StrictBool | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    grammar: Grammar | None = None
    max_new_tokens: Count | None = None
    repetition_penalty: Positive | None = None
    return_full_text: StrictBool | None = None
    seed: Annotated[StrictInt, Field(ge=0, lt=2**64)] | None = None
    stop: Annotated[ArrayOf[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Annotated[Positive, Field(le=100)] | None = None
    top_k: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None
    top_n_tokens: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_TOKENS)] | None = None
    top_p: Annotated[Positive, Field(le=1)] | None = None
    truncate: Count | None = None
    typical_p: Number | None = None
    watermark: StrictBool | None = None
    adapter_id: str | None = None

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled: with do_sample, or with any parameter that changes sampling."""
        drawn = self.temperature not in (None, 1.0) or bool(self.top_k) or self.top_p not in (None, 1.0)
        return bool(self.do_sample) or drawn

    @property
    def num_answers(self) -> int:
        return self.best_of or 1

    @property
    def wants_details(self) -> bool:
        return bool(self.details or self.decoder_input_details)

    def check(self, *, stream: bool) -> None:
        """Refuse what quire does not support, and fields that exclude each other."""
        if self.typical_p not in (None, 1.0):
            raise refusal("typical_p", "quire does not have typical sampling; leave it out, or use top_p")
        if self.watermark:
            raise refusal("watermark", "quire does not have watermarks; leave it out")
        if self.adapter_id is not None:
            raise refusal("adapter_id", "this server has no adapters; leave it out")
        if self.num_answers > 1 and not self.samples:
            raise refusal("best_of", "all answers would be the same; set do_sample to true, or a temperature")
        if self.num_answers > 1 and stream:
            raise refusal("best_of", "which answer is the best is known at the end; a stream has one answer only")
        if self.decoder_input_details and stream:
            raise refusal("decoder_input_details", "a stream does not return the prompt's tokens; leave it out")

    def sampling_params(self, defaults: Mapping[str, Any], *, stream: bool, room: int) -> SamplingParams:
        """The model's `defaults`, then the fields of the request. `room`: tokens that the context has left.

        The text ends with the stop sequence, as in TGI. Without max_new_tokens an answer has at most 100 tokens.
        """
        if self.max_new_tokens is not None and self.max_new_tokens > room > 0:
            raise PromptTooLong(
                f"parameters.max_new_tokens is {self.max_new_tokens:,}, but beside the prompt there is room for "
                f"{room:,} tokens; lower it."
            )
        scored = stream or self.wants_details or self.num_answers > 1
        names = ("temperature", "top_k", "top_p", "frequency_penalty", "repetition_penalty")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return SamplingParams.of(
            {
                **defaults,
                **given,
                **({} if self.samples else {"temperature": 0.0}),
                "n": self.num_answers,
                "max_tokens": self.max_new_tokens or min(DEFAULT_NEW_TOKENS, max(1, room)),
                "stop": self.stop or (),
                "include_stop_str_in_output": bool(self.stop),
                "seed": self.seed,
                "logprobs": (self.top_n_tokens or 0) if scored else None,
                "prompt_logprobs": 0 if self.decoder_input_details else None,
                "structured_outputs": self.grammar.structured() if self.grammar else None,
            }
        )


class GenerateRequest(RequestModel):
    """POST /generate and /generate_stream"""

    inputs: str
    parameters: Parameters = Field(default_factory=Parameters)


class CompatGenerateRequest(GenerateRequest):
    """POST /, with a field for streaming."""

    stream: StrictBool | None = None


def refusal(name: str, reason: str) -> InvalidField:
    return InvalidField(f"parameters.{name}: {reason}.", f"parameters.{name}")
