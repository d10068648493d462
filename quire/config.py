"""EngineConfig: what an engine is built with. The command line's flags are generated from its fields.

Only the entry points and the modules that build an engine (`engine/build.py`) read it; all others take plain values.
This module is the only reader of environment variables: see `cache_dir`, `onednn_max_isa`, `api_key` and
`one_blas_thread`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from quire.errors import InvalidParams, UnknownField

DEFAULT_MODEL = "smollm2:135m"
MAX_THREADS = 1024
MAX_COUNT = 2**31 - 1  # tokens, requests, blocks, threads
MAX_NUMBER = 1e12  # of other options


def cache_dir() -> Path:
    """Where models are kept: $QUIRE_CACHE, or `quire` in the user's cache directory."""
    if explicit := os.environ.get("QUIRE_CACHE"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"


def onednn_max_isa() -> str | None:
    """The user's limit on oneDNN's instruction sets, from its current or its former environment variable."""
    return os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or None


def api_key() -> str | None:
    """The key that clients of a server must send: $QUIRE_API_KEY. A flag would show in the list of processes."""
    return os.environ.get("QUIRE_API_KEY") or None


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """For the import of numpy: its BLAS library starts no threads, unless the user sets how many there are.

    The library reads $OPENBLAS_NUM_THREADS when it is loaded. The variable is removed again, because other libraries,
    and processes that are started later, read it too.
    """
    name = "OPENBLAS_NUM_THREADS"
    is_set = name in os.environ
    os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        if not is_set:
            del os.environ[name]


def option(default: Any, text: str, metavar: str | None = None, flag: str | None = None) -> Any:
    """A field that becomes a command line flag with `text` as its help.

    `metavar` is the value's name in the help. The default is N for an integer, X for a float, and the last word of the
    field's name for a string. `flag` is the flag's name, if it is not the field's.
    """
    return field(default=default, metadata={"help": text, "metavar": metavar, "flag": flag})


def flag_of(field: Field[Any]) -> str:
    """The command line flag of an option."""
    return "--" + (field.metadata.get("flag") or field.name.replace("_", "-"))


def flag_with_value(field: Field[Any], value: Any) -> str:
    """The option as it is written on a command line."""
    flag = flag_of(field)
    if isinstance(value, bool):
        return flag if value else f"--no-{flag[2:]}"
    return f"{flag} {value:g}" if isinstance(value, float) else f"{flag} {value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine's options. The constructor checks them."""

    model: str = DEFAULT_MODEL
    device: Literal["auto", "cpu", "cuda"] = option("auto", "Where the model runs; auto takes a GPU if there is one.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Type of weights and activations; auto is float32 on a CPU, bfloat16 on a GPU that has it."
    )
    kernels: Literal["auto", "native", "torch"] = option(
        "auto", "Kernels: quire's own (native), torch's, or quire's own wherever they can be used (auto)."
    )
    weights: Literal["file", "random"] = option(
        "file", "Where weights come from; random ones, in the shapes of the model, are for measuring speed."
    )
    quantize: Literal["none", "int8", "int4", "fp8", "nf4"] = option(
        "none",
        "Round weights that are stored in full precision while they are loaded (own kernels only). fp8 and nf4 are for "
        "GPUs.",
    )
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"] = option(
        "auto",
        "Type of the KV cache; auto is bfloat16 with quire's own CPU kernels and the model's dtype otherwise. int8 is "
        "for CPUs, fp8 (e4m3) for quire's own kernels.",
    )
    exact: bool = option(
        False,
        "Compute a request bit for bit the same whatever else is in the batch. Always so with quire's own CPU kernels; "
        "slower on a GPU.",
    )
    max_len: int | None = option(None, "Longest request, prompt and answer together; the model's own limit if not set.")
    max_requests: int | None = option(
        None,
        "How many requests run at once; 64 on a CPU and 512 on a GPU if not set, or --max-tokens-per-step if less.",
    )
    max_tokens_per_step: int | None = option(
        None,
        "How many tokens one step computes, prompts in chunks; 192 on a CPU and 8192 on a GPU (1024 with torch's ops) "
        "if not set.",
    )
    block_size: int = option(16, "Tokens in a block of the cache.")
    num_blocks: int | None = option(None, "Blocks in the cache; as many as fit into --kv-memory if not set.")
    kv_memory: float | None = option(None, "GiB for the cache, at most what is free; if not set, a share of it.", "GIB")
    swap_memory: float | None = option(
        None,
        "GiB of host memory for blocks of preempted requests; up to 8 on a GPU and 0 on a CPU if not set.",
        "GIB",
    )
    prefix_cache: bool = option(True, "Keep the blocks of finished prompts for requests with the same prefix.")
    batching: Literal["continuous", "static", "dynamic", "ratio"] = option(
        "continuous",
        "When waiting requests are admitted: at every step (continuous), when the running batch has ended (static, "
        "dynamic), or when the ratio of waiting to running requests is high enough (ratio).",
    )
    order: Literal["fcfs", "priority"] = option(
        "fcfs", "Order of waiting requests: first come first served, or by priority."
    )
    batch_size: int | None = option(
        None, "Static and dynamic batching: requests in a batch; --max-requests if not set."
    )
    batch_wait: float | None = option(
        None, "Dynamic batching: seconds to wait for a batch to fill; 0.05 if not set.", "SECONDS"
    )
    waiting_served_ratio: float | None = option(
        None, "Batching by ratio: waiting requests for each running one at which they join; 0.3 if not set.", "RATIO"
    )
    max_waiting_tokens: int | None = option(
        None,
        "Batching by ratio: tokens that running requests get before waiting ones join in any case; 20 if not set.",
    )
    itl_target_ms: float | None = option(
        None,
        "Target for the milliseconds between two tokens: a step computes only as much of a prompt as keeps it, as long "
        "as the queue is short. Lower is smoother and brings first tokens later, 0 is no target. If not set, a "
        "server's is 26.5 on a GPU and 50 on a CPU, and offline there is none.",
        "MS",
    )
    speculate: str = option(
        "auto",
        "How the next tokens of a request are guessed, to verify several in one step: auto (from repeated text and "
        "grammars, where it pays), off, or a list of what is used besides: draft:MODEL, block:DIR, medusa:DIR, "
        "eagle:DIR, mtp (the model's own layers), self:DIR (the model's first layers and an exit head) or self:LAYERS "
        "(without a head), module:Class. Answers are the same with any of them. On a GPU auto speculates with --exact "
        "only: rounding depends on it otherwise. A list is used in any case; suffix in it is repeated text alone.",
        "METHODS",
    )
    exit_head: str | None = option(
        None,
        "A trained exit head: requests may then set early_exit, and take tokens from the first layers where these are "
        "confident. Approximate; on quire's own CPU kernels.",
        "DIR",
    )
    threads: int | None = option(None, "Threads that compute on a CPU; as many as there are cores if not set.")
    tensor_parallel_size: int = option(
        1,
        "Processes that compute the model together on a CPU, each with a share of the weights, of the cache and of the "
        "threads. Answers are the same with any number.",
        flag="tensor-parallel",
    )
    seed: int | None = option(None, "Seeds requests that bring none; each draws its own if not set.")

    def __post_init__(self) -> None:
        self._at_least("block_size", 1)
        self._at_least("tensor_parallel_size", 1)
        for name in ("max_len", "max_requests", "max_tokens_per_step", "num_blocks", "batch_size", "threads"):
            if getattr(self, name) is not None:
                self._at_least(name, 1)
        if self.threads is not None and self.threads > MAX_THREADS:
            raise InvalidParams(f"threads is {self.threads:,}; give at most {MAX_THREADS:,}.", "threads")
        if self.max_tokens_per_step and self.max_requests and self.max_tokens_per_step < self.max_requests:
            raise InvalidParams(
                f"max_tokens_per_step is {self.max_tokens_per_step}, below max_requests ({self.max_requests}): every "
                "running request needs a token a step. Raise the one or lower the other."
            )
        if self.kv_memory is not None:
            self._is_number("kv_memory", "GiB", may_be_0=False)
        for name, unit in (
            ("swap_memory", "GiB"), ("batch_wait", "seconds"), ("waiting_served_ratio", ""),
            ("itl_target_ms", "milliseconds"),
        ):  # fmt: skip
            if getattr(self, name) is not None:
                self._is_number(name, unit)
        if self.max_waiting_tokens is not None:
            self._at_least("max_waiting_tokens", 0)
        self._only_with("batching", ("static", "dynamic"), "batch_size")
        self._only_with("batching", ("dynamic",), "batch_wait")
        self._only_with("batching", ("ratio",), "waiting_served_ratio", "max_waiting_tokens")
        self._one_of("device", ("auto", "cpu", "cuda"))
        self._one_of("dtype", ("auto", "float32", "bfloat16", "float16"))
        self._one_of("kernels", ("auto", "native", "torch"))
        self._one_of("weights", ("file", "random"))
        self._one_of("quantize", ("none", "int8", "int4", "fp8", "nf4"))
        self._one_of("kv_dtype", ("auto", "float32", "bfloat16", "float16", "int8", "fp8"))
        self._one_of("batching", ("continuous", "static", "dynamic", "ratio"))
        self._one_of("order", ("fcfs", "priority"))
        parse_speculate(self.speculate)
        if self.exit_head is not None and (not isinstance(self.exit_head, str) or not self.exit_head):
            raise InvalidParams(f"exit_head is {self.exit_head!r}; give the directory of an exit head.", "exit_head")
        if self.exit_head is not None and self.exact:
            raise InvalidParams(
                "exit_head and exact are both given: a request that exits early gets another answer than the whole "
                "model's. Leave one out; speculate self:DIR drafts with the head, and is exact.",
                "exit_head",
            )

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Make a config from keyword arguments, naming the first one that does not exist."""
        UnknownField.check("EngineConfig", options, [field.name for field in fields(cls)])
        return cls(**options)

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InvalidParams(f"{name} is {value!r}; give a whole number of at least {least}.")
        if value > MAX_COUNT:
            raise InvalidParams(f"{name} is more than {MAX_COUNT:,}, the most there can be; give a smaller number.")

    def _is_number(self, name: str, unit: str, *, may_be_0: bool = True) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MAX_NUMBER
        if not is_number or not (value or may_be_0):
            wanted = f"a number of {unit}" if unit else "a number"
            raise InvalidParams(f"{name} is {value!r}; give {wanted}, {'0 or more' if may_be_0 else 'more than 0'}.")

    def _only_with(self, option: str, values: tuple[str, ...], *names: str) -> None:
        for name in names:
            if getattr(self, name) is not None and getattr(self, option) not in values:
                needed = " or ".join(map(repr, values))
                raise InvalidParams(
                    f"{name} needs {option} {needed}, and it is {getattr(self, option)!r}; leave it out."
                )

    def _one_of(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise InvalidParams(f"{name} is {value!r}; choose one of {', '.join(choices)}.")


# What `speculate` may name besides classes, as kind:value. Each is described by its value; mtp has none.
SPECULATION_KINDS = {
    "draft": "MODEL",
    "block": "DIR",
    "medusa": "DIR",
    "eagle": "DIR",
    "mtp": "",
    "self": "DIR or LAYERS",
}


@dataclass(frozen=True, slots=True)
class SpeculationMethod:
    """One entry of `EngineConfig.speculate`."""

    kind: str  # of SPECULATION_KINDS, "suffix" or "plugin"
    # A model's name, a head's directory, a number of layers, or module:Class. Empty for mtp and suffix.
    value: str


def parse_speculate(text: str) -> list[SpeculationMethod] | None:
    """The methods that `speculate` lists. Those of auto are used beside any of them. None if speculation is off."""
    if not isinstance(text, str) or not text:
        raise InvalidParams(f"speculate is {text!r}; give auto, off or a list of methods.", "speculate")
    if text == "off":
        return None
    methods: list[SpeculationMethod] = []
    for entry in text.split(","):
        kind, colon, value = entry.partition(":")
        module, _, name = entry.rpartition(":")
        if entry == "auto":
            continue
        if entry == "suffix":
            methods.append(SpeculationMethod(entry, ""))
            continue
        described = SPECULATION_KINDS.get(kind)
        if described is not None and bool(colon) == bool(value) == bool(described):
            methods.append(SpeculationMethod(kind, value))
            continue
        if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
            kinds = ", ".join(f"{kind}:{value}" if value else kind for kind, value in SPECULATION_KINDS.items())
            raise InvalidParams(
                f"speculate has {entry!r}; give off, or a list of auto, suffix, {kinds} and classes as module:Class.",
                "speculate",
            )
        methods.append(SpeculationMethod("plugin", entry))
    return methods
