"""The output side of completions and chat completions: what has grown, the stream of chunks, usage, log probabilities.

`chat.py` and `completions.py` write the documents of one choice. This file decides when, and sends them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from quire.core.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from quire.errors import QuireError
from quire.server.error_response import openai_error
from quire.server.openai.protocol import StreamOptions
from quire.server.service import Service
from quire.server.streaming import DONE, sse_event
from quire.text.output_processor import OutputProcessor
from quire.text.tokenizers.tokenizer import Tokenizer

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Delta:
    """What a choice has grown by since its last document."""

    index: int  # of the choice
    output_processor: OutputProcessor
    answer: CompletionOutput
    text: str
    is_first: bool  # no earlier document has a token of the answer
    token_ids: list[int]
    logprobs: list[PositionLogprobs]
    finish_reason: str | None


Write = Callable[[Delta], Document | None]


@dataclass(slots=True)
class Choice:
    """One answer, and how much of it documents have."""

    index: int
    output_processor: OutputProcessor
    answer: CompletionOutput
    num_chars: int = 0
    num_tokens: int = 0
    finished: bool = False

    def write(self, write: Write) -> Document | None:
        """The document that `write` makes of what is new. Where it makes none, the delta grows until it does."""
        answer, num_tokens = self.answer, len(self.answer.token_ids)
        reason = answer.finish_reason
        if self.finished or (reason is None and num_tokens == self.num_tokens):
            return None
        delta = Delta(
            self.index,
            self.output_processor,
            answer,
            answer.text[self.num_chars :],
            not self.num_tokens,
            answer.token_ids[self.num_tokens :],
            (answer.logprobs or [])[self.num_tokens :],
            "length" if reason == "abort" else reason,  # the API has no reason for an aborted answer
        )
        document = write(delta)
        if document is not None:
            self.num_chars, self.num_tokens, self.finished = len(answer.text), num_tokens, reason is not None
        return document


def list_choices(output_processors: Sequence[OutputProcessor]) -> list[Choice]:
    pairs = [(processor, answer) for processor in output_processors for answer in processor.output.outputs]
    return [Choice(index, *pair) for index, pair in enumerate(pairs)]


async def stream_choices(
    service: Service,
    output_processors: Sequence[OutputProcessor],
    head: Document,
    write: Write,
    options: StreamOptions | None,
) -> AsyncIterator[bytes]:
    """The events of a stream. The events of one step are sent together.

    The status has been sent before the first event, so an error becomes the last event.
    """
    choices_of: dict[OutputProcessor, list[Choice]] = {}
    for choice in list_choices(output_processors):
        choices_of.setdefault(choice.output_processor, []).append(choice)
    include_usage = options is not None and bool(options.include_usage)
    continuous_usage = options is not None and bool(options.continuous_usage_stats)
    try:
        async with aclosing(service.generate(output_processors)) as stream:  # type: ignore[type-var]
            async for grown in stream:
                events = []
                for processor in grown:
                    for choice in choices_of[processor]:
                        if (written := choice.write(write)) is None:
                            continue
                        document = {**head, "choices": [written]}
                        if include_usage or continuous_usage:
                            document["usage"] = usage(output_processors) if continuous_usage else None
                        events.append(sse_event(document))
                if events:
                    yield b"".join(events)
        if include_usage:
            yield sse_event({**head, "choices": [], "usage": usage(output_processors)})
        yield DONE
    except QuireError as error:
        yield sse_event(openai_error(error))


def usage(output_processors: Sequence[OutputProcessor]) -> Document:
    outputs = [processor.output for processor in output_processors]
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    accepted = sum(output.num_accepted_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(output.num_drafted_tokens for output in outputs) - accepted,
            "early_exit_tokens": sum(output.num_exited_tokens for output in outputs),
        },
    }


# ── log probabilities ─────────────────────────────────────────────────────────────────────────────────────────────


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs | None],
    offsets: Sequence[int],
    num_top: int,
    tokenizer: Tokenizer,
) -> Document:
    """Four columns with an entry for each token. The first token of a prompt has no log probability."""
    columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, position, offset in zip(token_ids, positions, offsets, strict=True):
        columns["tokens"].append(token_name(token_id, tokenizer))
        columns["token_logprobs"].append(position[token_id].logprob if position else None)
        columns["top_logprobs"].append(top_logprobs(position, num_top, tokenizer) if position else None)
        columns["text_offset"].append(offset)
    return columns


def top_logprobs(position: PositionLogprobs, num_top: int, tokenizer: Tokenizer) -> dict[str, float]:
    """Log probabilities by token name. Of several tokens with the same name, all but the first are named by id."""
    top: dict[str, float] = {}
    for token_id, one in top_tokens(position, num_top).items() if num_top else ():
        name = token_name(token_id, tokenizer)
        top[name if name not in top else f"token_id:{token_id}"] = one.logprob
    return top


def top_tokens(position: PositionLogprobs, num_top: int) -> PositionLogprobs:
    """The chosen token and the `num_top` likeliest ones."""
    chosen, *_ = position
    return {token_id: one for token_id, one in position.items() if token_id == chosen or one.rank <= num_top}


def token_name(token_id: int, tokenizer: Tokenizer) -> str:
    """The text of a token. An incomplete character is named by its bytes, as in OpenAI's API. A token without text is
    named by its id, as in vLLM's."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode() or f"token_id:{token_id}"
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(positions: Sequence[PositionLogprobs], num_top: int, tokenizer: Tokenizer) -> Document:
    content = []
    for position in positions:
        chosen, *_ = position
        ranked = sorted(position, key=lambda token_id: position[token_id].rank)[:num_top]
        top = [token_logprob(token_id, position[token_id], tokenizer) for token_id in ranked]
        content.append(token_logprob(chosen, position[chosen], tokenizer) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def token_logprob(token_id: int, one: Logprob, tokenizer: Tokenizer) -> Document:
    return {"token": one.decoded_token, "logprob": one.logprob, "bytes": list(tokenizer.token_bytes(token_id))}


def prompt_logprobs(output: RequestOutput, num_top: int) -> list[Any] | None:
    """In vLLM's form: for each prompt token, id -> {logprob, rank, decoded_token}."""
    if output.prompt_logprobs is None:
        return None
    return [
        None
        if position is None
        else {str(token): one._asdict() for token, one in top_tokens(position, num_top).items()}
        for position in output.prompt_logprobs
    ]
