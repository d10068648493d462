"""`quire compare`: how much the next-token distributions of two configurations differ, over windows of text.

Both engines are in memory at once and compute the same windows in turn. The logits of one window of A are held while B
computes it, so memory does not grow with the text. All numbers are computed in float64 from the engines' logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.config import EngineConfig, flag_with_value
from quire.core.params import SamplingParams
from quire.engine.client import InProcess, no_garbage_collection
from quire.engine.prompt_logits import ExitedLogits, prompt_logits
from quire.errors import InvalidParams, ModelError
from quire.progress import bar
from quire.store import resolve
from quire.text.tokenizers.tokenizer import Tokenizer, load_tokenizer
from quire.weights.config import read_config

BUILT_IN_TEXT = Path(__file__).with_suffix(".txt")
DEFAULT_WINDOW, DEFAULT_MAX_TOKENS = 512, 4096
BYTES_PER_TOKEN = 64  # of a text, at most; more of a file is not read
CHUNK = 32  # rows that are compared at once, in float64

# Fields of EngineConfig that cannot change the logits of a prompt, or that this module chooses.
WITHOUT_EFFECT = (
    "max_len", "max_requests", "num_blocks", "kv_memory", "swap_memory", "prefix_cache", "batching", "order",
    "batch_size", "batch_wait", "waiting_served_ratio", "max_waiting_tokens", "itl_target_ms", "speculate", "seed",
)  # fmt: skip

Report = Callable[[int, int | None], None]


class Differences(NamedTuple):
    """One number for each compared position."""

    kl: NDArray[np.float64]  # KL(A||B), in nats
    nll_a: NDArray[np.float64]  # negative log probability of the text's token
    nll_b: NDArray[np.float64]
    same_top: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over tokens and its standard error, as if tokens were independent of each other."""

    mean: float
    se: float

    @classmethod
    def of(cls, values: NDArray[Any]) -> Mean:
        count = len(values)
        return cls(float(values.mean()), float(values.std(ddof=1) / math.sqrt(count)) if count > 1 else 0.0)


@dataclass(frozen=True, slots=True)
class Exits:
    """Early exit of one side. Where a token exits, its distribution is the exit's."""

    layer: int  # how many layers come before it
    threshold: float
    share: float  # of the positions
    unreachable_share: float  # of the positions: the exit is confident, and cannot give the text's token


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two configurations on one text. KL is KL(A||B) in nats a token."""

    a: str
    b: str
    num_tokens: int  # that were predicted
    num_windows: int
    window: int
    vocab_size: int
    kl: Mean
    kl_median: float
    kl_p99: float
    kl_max: float
    top1_agreement: Mean  # share of positions whose likeliest token is the same
    perplexity_a: float
    perplexity_b: float
    log_perplexity_difference: Mean  # of B over A, in nats a token
    exits_a: Exits | None = None
    exits_b: Exits | None = None

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of B relative to that of A."""
        return math.exp(self.log_perplexity_difference.mean)

    def as_document(self) -> dict[str, Any]:
        return {**asdict(self), "perplexity_ratio": self.perplexity_ratio}


def compare_models(
    a: EngineConfig,
    b: EngineConfig,
    text: str | None = None,
    *,
    window: int | None = None,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    early_exit: float | None = None,
    report: Report | None = None,
) -> Comparison:
    """Compare two configurations on a text, or on the one that comes with quire.

    `window` tokens are computed with nothing before them; 512 if not set, or as many as both models take. Of the text
    at most `max_tokens` are compared. Fields of the configurations in WITHOUT_EFFECT are not used. With `early_exit`,
    a side that has an exit head takes the exit's distribution where its confidence reaches that number.
    """
    check_early_exit(early_exit, a, b)
    if text is None:
        text = BUILT_IN_TEXT.read_text(encoding="utf-8")
    if max_tokens < 2:
        raise InvalidParams(f"max_tokens is {max_tokens}; give at least 2.", "max_tokens")
    with bar("fetching") as fetched:
        paths = [resolve(each.model, progress=lambda _, done, total: fetched(done, total)).path for each in (a, b)]
    size = check_window(window, [(a.model, paths[0]), (b.model, paths[1])])
    tokenizer = load_tokenizer(paths[0])
    tokens = tokenizer.encode(text, add_special_tokens=False)
    check_tokenizers(tokenizer, load_tokenizer(paths[1]), (a.model, b.model), text, tokens)
    windows = split(tokens[:max_tokens], size, prefix_of(tokenizer))
    with ExitStack() as until_done:
        with no_garbage_collection():
            engines = [
                until_done.enter_context(closing(InProcess(engine_config(config, size), path)))
                for config, path in zip((a, b), paths, strict=True)
            ]
        sides = [
            Side(config.model, client, config.exit_head is not None, early_exit)
            for config, client in zip((a, b), engines, strict=True)
        ]
        found: list[Differences] = []
        for number, each in enumerate(windows):
            if report:
                report(number, len(windows))
            found.append(compare_window(sides[0], sides[1], each))
        vocab_size = min(engine.info.config.vocab_size for engine in engines)
    joined = Differences(*(np.concatenate(columns) for columns in zip(*found, strict=True)))
    summary = summarize(joined, describe(a), describe(b), len(windows), size, vocab_size)
    return replace(summary, exits_a=sides[0].exits, exits_b=sides[1].exits)


class Side:
    """One of the two engines. With `exits`, tokens of the text exit at the threshold."""

    def __init__(self, name: str, client: InProcess, exits: bool, threshold: float | None) -> None:
        self.name = name
        self.vocab_size = client.info.config.vocab_size
        self._threshold = threshold
        self._client = client
        self._exited = ExitedLogits(client.engine, threshold) if exits and threshold is not None else None

    def logits(self, tokens: Sequence[int]) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Chunks of a window's logits, each with the index of its first row."""
        if self._exited is not None:
            self._exited.begin(tokens)
        return numbered(prompt_logits(self._client.engine, tokens, self._exited), self.name)

    @property
    def exits(self) -> Exits | None:
        exited = self._exited
        if exited is None or self._threshold is None:
            return None
        shares = exited.num_exited / exited.num_rows, exited.num_unreachable / exited.num_rows
        return Exits(exited.layer, self._threshold, *shares)


def check_early_exit(early_exit: float | None, a: EngineConfig, b: EngineConfig) -> None:
    has_exit = a.exit_head is not None or b.exit_head is not None
    if early_exit is not None:
        SamplingParams(early_exit=early_exit)
        if not has_exit:
            raise InvalidParams(
                f"early_exit is {early_exit:g}, and neither side has an exit head; give one --exit-head DIR.",
                "early_exit",
            )
    elif has_exit:
        raise InvalidParams(
            "exit_head is given without early_exit, so nothing would exit; give --early-exit C, a confidence between "
            "0 and 1.",
            "exit_head",
        )


def engine_config(config: EngineConfig, window: int) -> EngineConfig:
    """For one window at a time."""
    kept = {
        field.name: getattr(config, field.name) for field in fields(config) if field.name not in WITHOUT_EFFECT
    }  # fmt: skip
    return EngineConfig.of(
        {**kept, "max_len": window, "max_requests": 1, "prefix_cache": False, "itl_target_ms": 0.0, "speculate": "off"}
    )


def describe(config: EngineConfig) -> str:
    """The model and the options that differ from the defaults, as on the command line."""
    words = [config.model]
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name == "model" or field.name in WITHOUT_EFFECT or value == field.default:
            continue
        words.append(flag_with_value(field, value))
    return " ".join(words)


def check_window(window: int | None, models: Sequence[tuple[str, Path]]) -> int:
    """The size of a window in tokens."""
    limit, name = min((read_config(path).max_len, name) for name, path in models)
    if window is None:
        return min(DEFAULT_WINDOW, limit)
    if not 2 <= window <= limit:
        raise InvalidParams(
            f"window is {window:,}; give from 2 to {limit:,} tokens, which is the context of {name}.", "window"
        )
    return window


def check_tokenizers(
    ours: Tokenizer, theirs: Tokenizer, names: tuple[str, str], text: str, tokens: Sequence[int]
) -> None:
    """Distributions can be compared only if an id means the same token in both models, and texts the same ids."""
    for token in range(min(ours.vocab_size, theirs.vocab_size)):
        if ours.pieces[token] != theirs.pieces[token]:
            raise InvalidParams(
                f"{names[0]} and {names[1]} have different vocabularies: token {token} is {ours.token_text(token)!r} "
                f"in the first and {theirs.token_text(token)!r} in the second. Compare models with the same tokenizer."
            )
    others = theirs.encode(text, add_special_tokens=False)
    if tokens != others or prefix_of(ours) != prefix_of(theirs):
        raise InvalidParams(
            f"{names[0]} and {names[1]} split the text into different tokens ({len(tokens):,} and {len(others):,}). "
            "Compare models with the same tokenizer."
        )


def prefix_of(tokenizer: Tokenizer) -> list[int]:
    """The BOS token, if the tokenizer puts it before a text: each window begins with it then."""
    encoded, bos = tokenizer.encode("a"), tokenizer.bos_token_id
    return [bos] if bos is not None and encoded[:1] == [bos] else []


def split(tokens: Sequence[int], window: int, prefix: Sequence[int]) -> list[list[int]]:
    """Windows of a text, each with the prefix. The last one may be shorter."""
    size = window - len(prefix)
    windows = [[*prefix, *tokens[start : start + size]] for start in range(0, len(tokens), size)]
    windows = [each for each in windows if len(each) > 1]
    if not windows:
        raise InvalidParams(f"The text has {len(tokens)} tokens; give at least 2: the first one is not predicted.")
    return windows


def compare_window(a: Side, b: Side, tokens: Sequence[int]) -> Differences:
    vocab_size = min(a.vocab_size, b.vocab_size)  # one may be padded further than the other
    logits_a = np.empty((len(tokens) - 1, vocab_size), np.float32)
    for start, rows in a.logits(tokens):
        logits_a[start : start + len(rows)] = rows[:, :vocab_size]
    found: list[Differences] = []
    for start, rows in b.logits(tokens):
        for first in range(0, len(rows), CHUNK):
            logits_b = rows[first : first + CHUNK, :vocab_size]
            begin, stop = start + first, start + first + len(logits_b)
            found.append(compare_rows(logits_a[begin:stop], logits_b, tokens[begin + 1 : stop + 1]))
    return Differences(*(np.concatenate(columns) for columns in zip(*found, strict=True)))


def numbered(chunks: Iterator[NDArray[np.float32]], name: str) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Each chunk of a model's logits with the index of its first row."""
    start = 0
    for rows in chunks:
        if not np.isfinite(rows).all():
            raise ModelError(
                f"The logits of {name} are not numbers, so nothing can be compared. Check the model's file."
            )
        yield start, rows
        start += len(rows)


def compare_rows(logits_a: NDArray[Any], logits_b: NDArray[Any], targets: Sequence[int]) -> Differences:
    """logits [n, vocab_size] of both, and the token that follows each position in the text."""
    logprobs_a, logprobs_b = log_softmax(logits_a), log_softmax(logits_b)
    kl = (np.exp(logprobs_a) * (logprobs_a - logprobs_b)).sum(-1)
    rows, index = np.arange(len(targets)), np.asarray(targets)
    return Differences(
        np.maximum(kl, 0.0),  # rounding may leave a tiny negative number
        -logprobs_a[rows, index],
        -logprobs_b[rows, index],
        logits_a.argmax(-1) == logits_b.argmax(-1),
    )


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x


def summarize(found: Differences, a: str, b: str, num_windows: int, window: int, vocab_size: int) -> Comparison:
    kl = found.kl
    return Comparison(
        a=a,
        b=b,
        num_tokens=len(kl),
        num_windows=num_windows,
        window=window,
        vocab_size=vocab_size,
        kl=Mean.of(kl),
        kl_median=float(np.median(kl)),
        kl_p99=float(np.quantile(kl, 0.99)),
        kl_max=float(kl.max()),
        top1_agreement=Mean.of(found.same_top),
        perplexity_a=math.exp(found.nll_a.mean()),
        perplexity_b=math.exp(found.nll_b.mean()),
        log_perplexity_difference=Mean.of(found.nll_b - found.nll_a),
    )


def read_text(path: Path, max_tokens: int) -> str:
    """The text of a file, as much of it as `max_tokens` may need."""
    max_bytes = BYTES_PER_TOKEN * max(2, max_tokens)
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise InvalidParams(f"{path} cannot be read: {error.strerror}. Give a text file.", "text") from error
    if not data:
        raise InvalidParams(f"{path} is empty. Give a text file.", "text")
    try:
        return decode(data[:max_bytes], is_cut=len(data) > max_bytes)
    except UnicodeDecodeError as error:
        raise InvalidParams(
            f"{path} is no UTF-8 text: see its byte {error.start:,}. Give a text file.", "text"
        ) from error


def decode(data: bytes, *, is_cut: bool) -> str:
    """UTF-8 without NUL. A character at the end that was cut is dropped."""
    if (nul := data.find(0)) >= 0:
        raise UnicodeDecodeError("utf-8", data, nul, nul + 1, "a NUL byte")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if is_cut and error.start > len(data) - 4 and error.end == len(data):
            return data[: error.start].decode("utf-8")
        raise
