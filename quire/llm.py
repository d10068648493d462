"""LLM: a model in this process, driven by the caller. Names and meanings follow vLLM's offline API.

    llm = LLM("smollm2:135m")
    for out in llm.generate(["What is AI?"], SamplingParams(max_tokens=100)):
        print(out.outputs[0].text)

For asyncio there is `AsyncLLM`. Several streams may be open at once, and several threads may use one LLM: their
requests share the engine's batch. Ctrl-C during a step aborts all requests.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from quire.config import DEFAULT_MODEL, EngineConfig
from quire.core.outputs import CompletionOutput, RequestOutput, Score
from quire.core.params import SamplingParams
from quire.core.policy import PRIORITY_POSITIONS
from quire.engine.client import SyncClient, UpdateQueue, no_garbage_collection
from quire.errors import EngineError, InvalidParams, TemplateError, show
from quire.progress import bar
from quire.store import resolve
from quire.text.detokenizer import Detokenizer
from quire.text.grammar.constraint import GrammarBackend
from quire.text.input_processor import InputProcessor, Prompt, pack_prompt
from quire.text.output_processor import OutputProcessor
from quire.text.tokenizers.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from quire.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from quire.text.templates.chat_template import ChatTemplate

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """Options are EngineConfig's fields."""

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        config = EngineConfig.of({"model": model, **options})
        # Offline there is no target for the time between two tokens, unless the caller sets one.
        self.config = replace(config, itl_target_ms=config.itl_target_ms or 0.0)
        with bar("fetching") as report:
            files = resolve(self.config.model, progress=lambda what, done, total: report(done, total))
        with no_garbage_collection(), bar("loading") as report:
            self._tokenizer = load_tokenizer(files.path)
            self._client = SyncClient(self.config, files.path, report)
        self._chat_template: ChatTemplate | None = None
        self.info = self._client.info
        model_config = self.info.config
        self._input_processor = InputProcessor(
            self._tokenizer,
            model_config.vocab_size,
            self.info.max_len,
            model_config.eos_token_ids,
            self.config.seed,
            by_priority=self.config.order == "priority",
            has_exit=self.config.exit_head is not None,
        )
        self._input_processor.grammars = GrammarBackend(
            self._tokenizer, model_config.vocab_size, self._input_processor.end_token_ids
        )
        self._input_lock = threading.Lock()  # grammars are compiled one at a time
        # Requests of one call in the engine: those that run, and as many that wait.
        self._max_open = 2 * max(self.info.max_requests, self.config.batch_size or 0)

    # ── generating ────────────────────────────────────────────────────────────────────────────────────────────────

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, in their order. A prompt is a string or {"prompt_token_ids": [...]}.

        Without sampling_params the model's own defaults apply, here and wherever else they may be left out. All prompts
        are checked before the first one is computed. Requests are made as the engine has room for them.
        """
        many = as_list(prompts)
        params = spread("sampling_params", sampling_params or self.get_default_sampling_params(), len(many))
        priorities = spread("priority", 0 if priority is None else priority, len(many))
        encoded = self._check(many, params, priorities)
        numbers = list(itertools.islice(self._input_processor.request_counter, len(many)))
        outputs: dict[str, RequestOutput] = {}

        def opened() -> Iterator[OutputProcessor]:
            for index in sorted(range(len(many)), key=lambda index: index + PRIORITY_POSITIONS * priorities[index]):
                text, tokens = self._input_processor.encode(encoded[index])
                with self._input_lock:
                    made = self._input_processor.build(
                        text, tokens, params[index], numbers[index], priority=priorities[index]
                    )
                yield made

        with bar("generating", unit="requests", enabled=use_tqdm and len(many) > 1) as report:
            report(0, len(many))
            for processor in self._run(opened()):
                if processor.finished:
                    outputs[processor.output.request_id] = processor.output
                    report(len(outputs), len(many))
        return [outputs[str(number)] for number in numbers]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer conversations: one (a list of messages) or several (a list of those)."""
        one = not messages or isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Messages]", [messages] if one else messages)
        prompts = []
        for conversation in conversations:
            prompt = self.render(conversation, tools=tools, template=chat_template, open_turn=add_generation_prompt)
            prompts.append(pack_prompt(prompt["prompt"], prompt["prompt_token_ids"]))
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Answer one prompt, yielding the output each time it has grown. Closing the iterator ends the request."""
        with self._input_lock:
            processor = self._input_processor.process(prompt, sampling_params or self.get_default_sampling_params())
        for grown in self._run([processor]):
            yield grown.snapshot()

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        open_turn: bool = True,
    ) -> Mapping[str, Any]:
        """A conversation as the prompt that the model's chat template makes of it."""
        source = template or self._tokenizer.chat_template
        if source is None:
            raise TemplateError(f"{self.config.model} has no chat template; pass chat_template, or use generate.")
        text = self._compile(source).render(messages, tools=tools, add_generation_prompt=open_turn)
        return {"prompt": text, "prompt_token_ids": self._tokenizer.encode(text, add_special_tokens=False)}

    def _compile(self, source: str) -> ChatTemplate:
        """The compiled chat template. The last one is cached."""
        from quire.text.templates.chat_template import ChatTemplate  # loads jinja

        if self._chat_template is None or self._chat_template.source != source:
            self._chat_template = ChatTemplate(source, self._tokenizer.special_tokens)
        return self._chat_template

    # ── scoring and searching ─────────────────────────────────────────────────────────────────────────────────────

    def score(self, prompts: Sequence[Prompt], continuations: Sequence[str] | None = None) -> list[Score]:
        """Log probability of each prompt's tokens after the first. With continuations, of the continuation's tokens."""
        texts = [self._input_processor.encode(prompt)[1] for prompt in as_list(prompts)]
        starts = [1] * len(texts)
        if continuations is not None:
            starts = [len(tokens) for tokens in texts]
            texts = [
                tokens + self._tokenizer.encode(text, add_special_tokens=False)
                for tokens, text in zip(texts, spread("continuations", list(continuations), len(texts)), strict=True)
            ]
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        outputs = self.generate([{"prompt_token_ids": tokens} for tokens in texts], params)
        scores = []
        for tokens, start, output in zip(texts, starts, outputs, strict=True):
            positions = (output.prompt_logprobs or [])[start:]
            chosen = [entry[token].logprob for token, entry in zip(tokens[start:], positions, strict=True) if entry]
            scores.append(Score(tokens[start:], chosen))
        return scores

    def beam_search(self, prompts: Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The likeliest answers that a search `beam_width` wide finds."""
        from quire.beam_search import BeamSearchOutput

        ends = frozenset[int]() if params.ignore_eos else self._input_processor.end_token_ids
        outputs = self.generate(prompts, params.sampling, use_tqdm=False)
        return [BeamSearchOutput([self._as_beam(answer, ends) for answer in out.outputs]) for out in outputs]

    # ── the rest ──────────────────────────────────────────────────────────────────────────────────────────────────

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters that the model's files name; quire's own where they name none."""
        return SamplingParams.of(self.info.config.sampling.as_params())

    def close(self) -> None:
        """Free the model's memory. Using the LLM after that raises EngineClosed."""
        self._client.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _as_beam(self, answer: CompletionOutput, ends: frozenset[int]) -> BeamSearchSequence:
        if answer.finish_reason in ("error", "abort"):
            raise InvalidParams(answer.error or "") if answer.refused else EngineError(answer.error or "aborted")
        from quire.beam_search import BeamSearchSequence

        assert answer.cumulative_logprob is not None
        text = Detokenizer(self._tokenizer).decode([token for token in answer.token_ids if token not in ends])
        return BeamSearchSequence(answer.token_ids, answer.cumulative_logprob, text, answer.finish_reason == "stop")

    def _check(self, prompts: list[Prompt], params: list[SamplingParams], priorities: list[int]) -> list[Prompt]:
        """Raise for prompts and parameters that cannot be served. Returns the prompts with their tokens."""
        with self._input_lock:
            for one in {id(one): one for one in params}.values():
                self._input_processor.check_params(one)
        encoded = self._input_processor.encode_prompts(prompts)
        for prompt, one, priority in zip(encoded, params, priorities, strict=True):
            self._input_processor.check_prompt(self._input_processor.encode(prompt)[1], one, priority)
        return encoded

    def _run(self, processors: Iterable[OutputProcessor]) -> Iterator[OutputProcessor]:
        """Run the engine until all outputs are finished. Yields an output processor whenever it has new tokens.

        If this ends early (an error, Ctrl-C, a closed generator), its requests are aborted.
        """
        updates, waiting = UpdateQueue(), iter(processors)
        owners: dict[str, OutputProcessor] = {}  # of requests that have not ended
        try:
            while True:
                while len(owners) < self._max_open and (processor := next(waiting, None)) is not None:
                    for request in processor.requests:
                        owners[request.id] = processor
                        self._client.submit(request, updates)
                if not owners:
                    return
                for update in self._client.receive(updates):
                    if (grown := owners.get(update.id)) is None:
                        continue  # it ended at a stop string
                    at_stop_string = grown.process(update)
                    if at_stop_string:
                        self._client.abort([update.id])
                    if at_stop_string or update.finish:
                        del owners[update.id]
                    yield grown
        finally:
            self._client.abort(owners)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or many."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidParams(f"prompts is {show(prompts)}; give a text, token ids in a dictionary, or a list of these.")
    return list(prompts)


def spread(name: str, value: Any, length: int) -> list[Any]:
    """One value for all, or a list with one for each."""
    if not isinstance(value, list | tuple):
        return [value] * length
    if len(value) != length:
        raise InvalidParams(f"{name} has {len(value)} entries for {length} prompts; give one for each.")
    return list(value)
