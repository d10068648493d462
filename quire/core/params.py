"""SamplingParams: how the tokens of a request are chosen, and when it ends.

Names and defaults follow vLLM's. The constructor checks all values, so every instance is valid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields
from typing import Any, Literal

from quire.core.structured import StructuredOutputs as StructuredOutputs
from quire.errors import InvalidParams, UnknownField, show

MAX_N = 256
MAX_BEAM_WIDTH = 64
MAX_LOGPROBS = 1_000
MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 256  # each is looked for at every token
MAX_BEAM_STOP_IDS = 16
MAX_PRIORITY = 100


def check_priority(priority: object) -> None:
    if not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        raise InvalidParams(f"priority is {priority!r}; give a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}.")


def check_early_exit(early_exit: float | None, has_exit: bool) -> None:
    if early_exit is not None and not has_exit:
        raise InvalidParams(
            f"early_exit is {early_exit:g}, and this engine has no exit head; start it with exit_head "
            "(--exit-head DIR), or leave early_exit out.",
            "early_exit",
        )


# Parameters that beam search does not support, with the values that leave probabilities unchanged.
NEUTRAL_SAMPLING: dict[str, float] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
MAX_COUNT = 2**31 - 1  # of tokens: above any context length, and fits in an int32


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling, stopping and reporting.

    temperature         0 takes the likeliest token; above 0 divides the logits
    top_k               keep the k likeliest tokens; 0 keeps all
    top_p               keep the likeliest tokens that together reach this probability
    min_p               drop tokens less likely than this share of the likeliest one
    presence_penalty    subtracted from the logit of every token that is in the answer
    frequency_penalty   the same, times the number of its occurrences
    repetition_penalty  divides (or multiplies, if negative) the logits of tokens in prompt or answer
    logit_bias          token id -> number added to its logit
    allowed_token_ids   only these tokens can be chosen
    bad_words           texts that must not be produced
    min_tokens          no end of sequence, stop token or stop string before this many tokens
    max_tokens          at most this many tokens; None: until the context is full; 0: only the prompt is computed
    stop                texts that end the answer; left out of it unless include_stop_str_in_output
    stop_token_ids      tokens that end the answer
    ignore_eos          continue after the end-of-sequence token
    seed                the same seed gives the same answer; None draws one
    n                   number of answers, which share the prompt's cache
    logprobs            number of likeliest tokens to report at each position of the answer, with log probabilities
    prompt_logprobs     the same for the prompt
    prediction          a text that the answer may repeat, as a whole or in parts: it makes the answer faster, and does
                        not change it
    early_exit          take a token from an exit in the middle of the model, where its confidence reaches this number
                        between 0 and 1. Faster and approximate; the engine needs an exit head
    structured_outputs  the format of the answer: a StructuredOutputs, or a mapping of its fields
    use_beam_search     search for the n likeliest answers instead of sampling (`core/beam_group.py`)
    best_of             the width of the beam search; n if it is None
    length_penalty      a beam's log probability is divided by its length to this power: above 0 favours long answers
    early_stopping      when a beam search that has found best_of answers ends: True, at once; False, when no live beam
                        scores higher at its present length; "never", when none can at any length
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    use_beam_search: bool = False
    best_of: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    prediction: str | None = None
    early_exit: float | None = None

    def __post_init__(self) -> None:
        self._whole("n", 1, MAX_N)
        self._number("temperature", 0.0, 100.0)
        self._whole("top_k", 0, MAX_COUNT)
        self._number("top_p", 0.0, 1.0, open_below=True)
        self._number("min_p", 0.0, 1.0)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._number("repetition_penalty", 1e-6, 100.0)  # a logit divided by less may overflow
        self._whole("min_tokens", 0, MAX_COUNT)
        for name, least, most in (("max_tokens", 0, MAX_COUNT), ("seed", -(2**63), 2**64 - 1)):
            if getattr(self, name) is not None:
                self._whole(name, least, most)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._whole(name, 0, MAX_LOGPROBS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParams(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}); lower it.", "min_tokens"
            )
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "use_beam_search"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParams(f"{name} is {show(getattr(self, name))}; give true or false.", name)
        self._freeze("stop", _strings("stop", self.stop, MAX_STOP_STRINGS))
        self._freeze("bad_words", _strings("bad_words", self.bad_words, MAX_BAD_WORDS))
        self._freeze("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise InvalidParams(
                    "allowed_token_ids is empty, so no token could be chosen; name one or leave it out.",
                    "allowed_token_ids",
                )
            self._freeze("allowed_token_ids", allowed)
        if self.logit_bias is not None:
            self._freeze("logit_bias", _bias(self.logit_bias))
        if self.structured_outputs is not None:
            self._freeze("structured_outputs", StructuredOutputs.of(self.structured_outputs))
        if self.prediction is not None and not isinstance(self.prediction, str):
            raise InvalidParams(f"prediction is {show(self.prediction)}; give a text.", "prediction")
        self._check_early_exit()
        self._check_beam_search()

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Make params from keyword arguments. An unknown one raises UnknownField with its name."""
        UnknownField.check("SamplingParams", options, [field.name for field in fields(cls)])
        return cls(**options)

    @property
    def beam_width(self) -> int:
        """The number of live beams; 0 without beam search."""
        return (self.best_of or self.n) if self.use_beam_search else 0

    @property
    def num_sequences(self) -> int:
        """The number of sequences that are computed at once for a prompt."""
        return self.beam_width or self.n

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def processes_logits(self) -> bool:
        """Whether logits are changed before temperature, top-k, top-p and min-p."""
        restricts = self.allowed_token_ids is not None or self.bad_words or self.structured_outputs is not None
        return bool(restricts or self.has_penalties or self.logit_bias or self.min_tokens)

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens that have occurred."""
        return bool(self.repetition_penalty != 1.0 or self.frequency_penalty or self.presence_penalty)

    @property
    def restrictions(self) -> list[str]:
        """The parameters that ban tokens."""
        names = ("structured_outputs", "allowed_token_ids", "bad_words", "min_tokens")
        return [name for name in names if getattr(self, name)]

    @property
    def argmax_only(self) -> bool:
        """Whether the next token is the argmax of the model's logits, and no log probabilities are needed."""
        return self.greedy and not self.processes_logits and self.logprobs is None and not self.use_beam_search

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop)

    def _check_early_exit(self) -> None:
        """Refuse what an exit cannot do, or what would have no effect with it."""
        if self.early_exit is None:
            return
        self._number("early_exit", 0.0, 1.0, open_below=True)
        if self.early_exit == 1.0:
            raise InvalidParams("early_exit is 1, which no exit is sure of; give less, or leave it out.", "early_exit")
        for name, reason in {
            "logprobs": "log probabilities are those of the whole model",
            "structured_outputs": "its exit knows no grammar",
            "use_beam_search": "a beam search needs the probabilities of the whole model",
            "prediction": "nothing is drafted for a request that exits early",
        }.items():
            if (value := getattr(self, name)) is not None and value is not False:
                raise InvalidParams(f"early_exit and {name} are both given, and {reason}; leave one out.", name)

    def _check_beam_search(self) -> None:
        if self.best_of is not None:
            self._whole("best_of", 1, MAX_N)
        self._number("length_penalty", -10.0, 10.0)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidParams(
                f'early_stopping is {show(self.early_stopping)}; give true, false or "never".', "early_stopping"
            )
        if not self.use_beam_search:
            for name, default in (("best_of", self.n), ("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) not in (None, default):
                    raise InvalidParams(
                        f"{name} is {show(getattr(self, name))}, which applies to beam search only; set "
                        "use_beam_search, or leave it out.", name,
                    )  # fmt: skip
            return
        if self.beam_width > MAX_BEAM_WIDTH:
            raise InvalidParams(
                f"A beam search of width {self.beam_width} is too wide; give a width (best_of) of at most "
                f"{MAX_BEAM_WIDTH}.", "best_of",
            )  # fmt: skip
        if self.beam_width < self.n:
            raise InvalidParams(
                f"A beam search of width {self.beam_width} cannot return n = {self.n} answers; give a width (best_of) "
                "of at least n.", "best_of",
            )  # fmt: skip
        if len(self.stop_token_ids) > MAX_BEAM_STOP_IDS:
            raise InvalidParams(
                f"stop_token_ids holds {len(self.stop_token_ids):,} ids; give at most {MAX_BEAM_STOP_IDS} to a beam "
                "search, whose candidates grow with them.", "stop_token_ids",
            )  # fmt: skip
        if self.max_tokens == 0:
            raise InvalidParams("max_tokens is 0; a beam search computes at least one token.", "max_tokens")
        for name, default in NEUTRAL_SAMPLING.items():
            if getattr(self, name) != default:
                raise InvalidParams(
                    f"{name} is {show(getattr(self, name))}; a beam search ranks answers by the model's own "
                    f"probabilities and draws nothing. Set {name} to {default:g}.", name,
                )  # fmt: skip
        if self.logit_bias:
            raise InvalidParams(
                "logit_bias is given; a beam search ranks answers by the model's own probabilities. Leave it out.",
                "logit_bias",
            )

    def _freeze(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _whole(self, name: str, least: int, most: int | None) -> None:
        value = getattr(self, name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or value < least or (most is not None and value > most):
            limit = f"at least {least}" if most is None else f"from {least} to {most}"
            raise InvalidParams(f"{name} is {show(value)}; give a whole number {limit}.", name)

    def _number(self, name: str, least: float, most: float, *, open_below: bool = False) -> None:
        value = getattr(self, name)
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good or value > most or value < least or (open_below and value == least):
            limit = f"above {least:g} and at most {most:g}" if open_below else f"from {least:g} to {most:g}"
            raise InvalidParams(f"{name} is {show(value)}; give a number {limit}.", name)


def _strings(name: str, value: str | Sequence[str], most: int) -> tuple[str, ...]:
    if not isinstance(value, str | Sequence | Set):
        raise InvalidParams(f"{name} is {show(value)}; give a text or a list of texts.", name)
    texts = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) and text for text in texts):
        raise InvalidParams(f"{name} holds {show(texts)}; give texts, none of them empty.", name)
    if len(texts) > most:
        raise InvalidParams(f"{name} holds {len(texts)} texts; give at most {most}.", name)
    return texts


def _token_ids(name: str, value: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(value, Sequence | Set | Mapping) or isinstance(value, str | bytes):
        raise InvalidParams(f"{name} is {show(value)}; give a list of token ids.", name)
    ids = tuple(value)
    if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token <= MAX_COUNT for token in ids):
        raise InvalidParams(f"{name} holds {show(ids)}; give token ids, whole numbers from 0.", name)
    return ids


def _bias(value: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidParams(f"logit_bias is {show(value)}; give a number for each token id.", "logit_bias")
    _token_ids("logit_bias", value)  # type: ignore[arg-type]
    for number in value.values():
        if not isinstance(number, int | float) or isinstance(number, bool) or not abs(number) <= 100:
            raise InvalidParams(f"logit_bias holds {show(number)}; give numbers from -100 to 100.", "logit_bias")
    return {token: float(number) for token, number in value.items()}
