"""How answers of OpenAI's completions and chat completions look: documents made from exchanges, whole or grown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.core.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from quire.text.exchange import Exchange


def usage(exchanges: Sequence[Exchange]) -> dict[str, Any]:
    outputs = [exchange.output for exchange in exchanges]
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


def finish_reason(answer: CompletionOutput) -> str | None:
    """An answer that was ended from outside is as long as it got."""
    return "length" if answer.finish_reason == "abort" else answer.finish_reason


def completion_logprobs(positions: Sequence[PositionLogprobs | None], num_top: int, offset: int) -> dict[str, Any]:
    """Columns, a token each. A first prompt token has no log probability: nothing stands before it."""
    columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for position in positions:
        entry = list((position or {}).values())
        token = entry[0].decoded_token if entry else ""
        columns["tokens"].append(token)
        columns["token_logprobs"].append(entry[0].logprob if entry else None)
        top = {one.decoded_token: one.logprob for one in (entry if num_top else ())}
        columns["top_logprobs"].append(top if entry else None)
        columns["text_offset"].append(offset)
        offset += len(token)
    return columns


def chat_logprobs(positions: Sequence[PositionLogprobs], num_top: int) -> dict[str, Any]:
    content = []
    for position in positions:
        chosen, *_ = position.values()
        ranked = sorted(position.values(), key=lambda one: one.rank)[:num_top]
        content.append(token_logprob(chosen) | {"top_logprobs": [token_logprob(one) for one in ranked]})
    return {"content": content, "refusal": None}


def token_logprob(one: Any) -> dict[str, Any]:
    return {"token": one.decoded_token, "logprob": one.logprob, "bytes": list(one.decoded_token.encode())}


def prompt_logprobs(output: RequestOutput) -> list[Any] | None:
    """As vLLM writes them: for each prompt token, id -> {logprob, rank, decoded_token}."""
    if output.prompt_logprobs is None:
        return None
    return [
        None if position is None else {str(token): one._asdict() for token, one in position.items()}
        for position in output.prompt_logprobs
    ]
