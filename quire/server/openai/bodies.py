"""How answers of OpenAI's completions and chat completions look: documents made from exchanges, whole or grown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.core.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from quire.text.output_processor import OutputProcessor
from quire.text.tokenizers.tokenizer import Tokenizer


def usage(exchanges: Sequence[OutputProcessor]) -> dict[str, Any]:
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


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs | None],
    offsets: Sequence[int],
    num_top: int,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Columns, a token each. A first prompt token has no log probability: nothing stands before it."""
    columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, position, offset in zip(token_ids, positions, offsets, strict=True):
        columns["tokens"].append(token_name(token_id, tokenizer))
        columns["token_logprobs"].append(position[token_id].logprob if position else None)
        columns["top_logprobs"].append(top_logprobs(position, num_top, tokenizer) if position else None)
        columns["text_offset"].append(offset)
    return columns


def top_logprobs(position: PositionLogprobs, num_top: int, tokenizer: Tokenizer) -> dict[str, float]:
    """By name: the token that stands there, and the likeliest ones. Of tokens with the same text the others are named
    by their ids."""
    top: dict[str, float] = {}
    for token_id, one in likeliest(position, num_top).items() if num_top else ():
        name = token_name(token_id, tokenizer)
        top[name if name not in top else f"token_id:{token_id}"] = one.logprob
    return top


def likeliest(position: PositionLogprobs, num_top: int) -> PositionLogprobs:
    """The token that stands there, and the `num_top` likeliest ones."""
    chosen, *_ = position
    return {token_id: one for token_id, one in position.items() if token_id == chosen or one.rank <= num_top}


def token_name(token_id: int, tokenizer: Tokenizer) -> str:
    """A token's text, where it has one. As OpenAI's API a part of a character is named by its bytes, and as vLLM's a
    token without text by its id."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode() or f"token_id:{token_id}"
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(positions: Sequence[PositionLogprobs], num_top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    content = []
    for position in positions:
        chosen, *_ = position
        ranked = sorted(position, key=lambda token_id: position[token_id].rank)[:num_top]
        top = [token_logprob(token_id, position[token_id], tokenizer) for token_id in ranked]
        content.append(token_logprob(chosen, position[chosen], tokenizer) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def token_logprob(token_id: int, one: Logprob, tokenizer: Tokenizer) -> dict[str, Any]:
    return {"token": one.decoded_token, "logprob": one.logprob, "bytes": list(tokenizer.token_bytes(token_id))}


def prompt_logprobs(output: RequestOutput, num_top: int) -> list[Any] | None:
    """As vLLM writes them: for each prompt token, id -> {logprob, rank, decoded_token}."""
    if output.prompt_logprobs is None:
        return None
    return [
        None if position is None else {str(token): one._asdict() for token, one in likeliest(position, num_top).items()}
        for position in output.prompt_logprobs
    ]
