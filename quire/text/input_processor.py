"""InputProcessor: a prompt and its sampling parameters become requests.

It encodes the prompt, checks it against the model's limits, chooses a seed and makes the requests, together with the
`OutputProcessor` that collects their output. Used by `LLM`, `AsyncLLM` and the server. No engine and no torch.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from quire.core.constraint import Constraint
from quire.core.params import SamplingParams, check_early_exit, check_priority
from quire.core.request import Request
from quire.errors import EmptyPrompt, InvalidParams, PromptTooLong, UnknownField, kind, show
from quire.text.detokenizer import TextEnd, TextStops
from quire.text.output_processor import OutputProcessor
from quire.text.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.text.grammar.constraint import GrammarBackend
    from quire.text.tokenizers.length_bound import LengthBound

Prompt = str | Mapping[str, Any]
ENCODE_BATCH_SIZE = 1024  # texts that are encoded in one call
MAX_TOKEN_CHARACTERS = 32  # of a prediction, for each token that an answer may have
SEED_STRIDE = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads the seeds of samples over 64 bits


class PackedTokens(array):  # type: ignore[type-arg]
    """Token ids from the model's own tokenizer, four bytes each."""


@dataclass(slots=True)
class InputProcessor:
    """Makes requests for one model. The end tokens are those of the tokenizer and of the model's configuration."""

    tokenizer: Tokenizer
    vocab_size: int
    max_len: int
    eos_token_ids: Sequence[int] = ()
    seed: int | None = None
    by_priority: bool = False  # whether the scheduler orders requests by priority
    has_exit: bool = False  # whether requests may exit early
    grammars: GrammarBackend | None = None  # makes constraints here; None: the engine's process makes them
    length_bound: LengthBound | None = None  # refuses a text that is too long without encoding it
    request_counter: Iterator[int] = field(default_factory=count)  # numbers prompts in their order
    end_token_ids: frozenset[int] = field(init=False)
    # One int object for each id that occurs: a list of them takes 8 bytes a token, not 36.
    _ids: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        ids = self.tokenizer.end_token_ids | frozenset(self.eos_token_ids)
        self.end_token_ids = frozenset(token for token in ids if token < self.vocab_size)

    def process(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        salt: bytes = b"",
        tenant: str = "",
        keep_special_ids: frozenset[int] = frozenset(),
        make_text_end: Callable[[], TextEnd] | None = None,
    ) -> OutputProcessor:
        """Check a prompt and its parameters, and make its requests.

        `keep_special_ids` are special tokens that stay in the text when special tokens are skipped.
        """
        text, tokens = self.encode(prompt)
        self.check_params(params)
        self.check_prompt(tokens, params, priority)
        return self.build(
            text,
            tokens,
            params,
            next(self.request_counter),
            request_id,
            priority,
            salt,
            tenant,
            keep_special_ids,
            make_text_end,
        )

    def build(
        self,
        text: str | None,
        tokens: list[int],
        params: SamplingParams,
        number: int,
        request_id: str | None = None,
        priority: int = 0,
        salt: bytes = b"",
        tenant: str = "",
        keep_special_ids: frozenset[int] = frozenset(),
        make_text_end: Callable[[], TextEnd] | None = None,
    ) -> OutputProcessor:
        """Make the requests of a checked prompt. `number` is the default id, and offsets the engine's seed."""
        request_id = str(number) if request_id is None else request_id
        seed = self._choose_seed(params, number)
        is_one = params.n == 1 or params.use_beam_search
        ids = [request_id] if is_one else [f"{request_id}#{index}" for index in range(params.n)]
        requests: list[Request] = []
        bad_words, prediction = self._bad_words(params), self._prediction(params)
        for index, one_id in enumerate(ids):
            requests.append(
                Request(
                    one_id,
                    tokens,
                    params,
                    end_token_ids=self.end_token_ids,
                    bad_word_ids=bad_words,
                    seed=(seed + index * SEED_STRIDE) % 2**64,
                    priority=priority,
                    salt=salt,
                    tenant=tenant,
                    max_tokens=self.max_len - len(tokens) if params.max_tokens is None else params.max_tokens,
                    leader=requests[0] if requests else None,
                    constraint=self._constraint(params),
                    stop_matcher=TextStops.of(params, self.tokenizer),
                    prediction=prediction,
                )
            )
        return OutputProcessor(request_id, requests, text, self.tokenizer, keep_special_ids, make_text_end)

    def encode_prompts(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Encode the prompts that are strings. The token ids are added, four bytes each."""
        encoded = list(prompts)
        texts = [(index, text) for index, prompt in enumerate(encoded) if (text := get_text(prompt)) is not None]
        for first in range(0, len(texts), ENCODE_BATCH_SIZE):
            some = texts[first : first + ENCODE_BATCH_SIZE]
            batch = self.tokenizer.encode_batch([text for _, text in some])
            for (index, text), tokens in zip(some, batch, strict=True):
                encoded[index] = pack_prompt(text, tokens)
        return encoded

    def check_length(self, text: str) -> None:
        """Refuse a text that cannot fit the context, without encoding it."""
        if self.length_bound is None or len(text) < self.max_len:
            return
        least = self.length_bound.min_tokens(text)
        if least >= self.max_len:
            raise PromptTooLong(
                f"The prompt has {len(text):,} characters, which are at least {least:,} tokens, but prompt and answer "
                f"together may have {self.max_len:,}. Shorten the prompt or raise max_len."
            )

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """A prompt's text, or None if only its token ids are given, and its token ids."""
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if not isinstance(prompt, Mapping):
            raise InvalidParams(f"A prompt is a string or an object with prompt_token_ids, not {kind(prompt)}.")
        UnknownField.check("A prompt", prompt, ("prompt", "prompt_token_ids"))
        if "prompt_token_ids" in prompt:
            tokens = prompt["prompt_token_ids"]
            is_packed = isinstance(tokens, PackedTokens)
            shared = self._ids.setdefault
            return prompt.get("prompt"), [shared(token, token) for token in tokens] if is_packed else list(tokens)
        return self.encode(prompt.get("prompt", ""))

    def check_params(self, params: SamplingParams) -> None:
        """Refuse an early exit without an exit head, token ids outside of the vocabulary, and a bad grammar."""
        check_early_exit(params.early_exit, self.has_exit)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", list(params.logit_bias or ()))
        self._constraint(params)

    def check_prompt(self, tokens: Sequence[int], params: SamplingParams, priority: int) -> None:
        """Refuse a prompt that this engine cannot serve."""
        check_priority(priority)
        if priority and not self.by_priority:
            raise InvalidParams(
                f"priority is {priority}, but this engine serves in order of arrival; set order='priority'."
            )
        if not tokens:
            raise EmptyPrompt("The prompt is empty; give at least one token of text.")
        room = self.max_len - len(tokens)
        if room < (params.max_tokens != 0):  # a prompt that is only scored may fill the context
            raise PromptTooLong(
                f"The prompt has {len(tokens):,} tokens, but prompt and answer together may have {self.max_len:,}. "
                "Shorten the prompt or raise max_len."
            )
        self._check_ids("prompt_token_ids", tokens)
        if params.max_tokens is not None and params.max_tokens > room:
            raise PromptTooLong(
                f"The prompt has {len(tokens):,} tokens and max_tokens is {params.max_tokens:,}, together more than "
                f"{self.max_len:,}. Lower max_tokens to {room:,} or less, or leave it out.",
                "max_tokens",
            )

    def _check_ids(self, name: str, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
                raise InvalidParams(
                    f"{name} holds {show(token)}; token ids are whole numbers from 0 to {self.vocab_size - 1}.",
                    name,
                )

    def _choose_seed(self, params: SamplingParams, number: int) -> int:
        if params.seed is not None:
            return params.seed % 2**64
        if self.seed is not None:
            return (self.seed + (number + 1) * SEED_STRIDE) % 2**64
        return int.from_bytes(os.urandom(8), "little")

    def _constraint(self, params: SamplingParams) -> Constraint | None:
        if self.grammars is None or params.structured_outputs is None:
            return None
        return self.grammars.make_constraint(params.structured_outputs)

    def _prediction(self, params: SamplingParams) -> Sequence[int]:
        """The tokens of the expected answer, as many as an answer may have."""
        if not params.prediction:
            return ()
        text = params.prediction[: MAX_TOKEN_CHARACTERS * self.max_len]
        tokens = self.tokenizer.encode(text, add_special_tokens=False)[: self.max_len]
        return [token for token in tokens if token < self.vocab_size]

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The tokens of banned words: each word at the start of a line and after a space has other tokens.

        Tokens that the model does not have cannot be sampled anyway.
        """
        spellings = [spelling for word in params.bad_words for spelling in (word, " " + word.lstrip())]
        encoded = (tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in spellings)
        return tuple(dict.fromkeys(ids for ids in encoded if ids and max(ids) < self.vocab_size))


def pack_prompt(text: str, tokens: Sequence[int]) -> Prompt:
    """A text prompt with its token ids, in a compact form. Many of them may wait until the engine has room."""
    return {"prompt": text, "prompt_token_ids": PackedTokens("I", tokens)}


def get_text(prompt: object) -> str | None:
    """The text of a prompt that has no token ids; None for any other."""
    if isinstance(prompt, Mapping) and prompt.keys() == {"prompt"}:
        prompt = prompt["prompt"]
    return prompt if isinstance(prompt, str) else None
