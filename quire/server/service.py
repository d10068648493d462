"""Service: the model as the routes use it. It tokenizes prompts, runs requests under the server's limits, and counts.

It has no fields and no documents of an API; those are in the API's own folder. `RequestContext` is what the middleware
passes to a route.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request

from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.engine.messages import Ready, StepOutputs
from quire.errors import DeadlineExceeded, EngineError, InvalidParams, ModelNotFound, show
from quire.server.admission import Admission
from quire.server.auth import Tenant
from quire.server.chat import ChatParser, ChatPrompt, ChatTemplates, Result, run_in
from quire.server.config import ServerConfig
from quire.server.console.live import LiveView
from quire.server.engines import EngineClient
from quire.server.metrics import Metrics, RequestTimer
from quire.text.detokenizer import PromptText, TextEnd, locate_prompt
from quire.text.grammar.checker import GrammarChecker
from quire.text.input_processor import InputProcessor, Prompt
from quire.text.output_processor import OutputProcessor
from quire.text.tokenizers.length_bound import find_length_bound
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.tools.events import Event

LONG_CHARS = 8192  # a longer text takes longer to encode than a step takes, so it is encoded in a thread
PLACEHOLDER_MODELS = frozenset({"tgi", "dummy"})  # sent by Hugging Face's clients when the user names no model


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What a route gets with an HTTP request."""

    service: Service
    tenant: Tenant
    request_id: str
    created_s: int


def request_context(request: Request, model: str | None = None) -> RequestContext:
    """The context of a request. Raises ModelNotFound if the request names a model that is not served."""
    context: RequestContext = request.scope["quire"]
    served = context.service.model
    if model is not None and model != served and model not in PLACEHOLDER_MODELS:
        raise ModelNotFound(f"There is no model {show(model)} here; this server has {show(served)}.")
    return context


class Service:
    """One model with its limits and metrics."""

    def __init__(
        self,
        client: EngineClient,
        ready: Ready,
        tokenizer: Tokenizer,
        config: ServerConfig,
        engine: EngineConfig,
        metrics: Metrics,
    ) -> None:
        self.client = client
        self.ready = ready
        self.tokenizer = tokenizer
        self.config = config
        self.engine = engine
        self.metrics = metrics
        self.model = config.served_model_name or engine.model
        self.created_s = int(time.time())
        self.admission = Admission(ready.max_requests, config.max_queue_requests, config.max_queue_tokens)
        self.templates = ChatTemplates(self.model, tokenizer, allow_request_templates=config.allow_request_templates)
        self._input_processor = InputProcessor(
            tokenizer,
            ready.vocab_size,
            ready.max_len,
            ready.eos_token_ids,
            engine.seed,
            by_priority=engine.order == "priority",
            has_exit=engine.exit_head is not None,
            length_bound=find_length_bound(tokenizer.backend),
        )
        self._prompt_numbers = itertools.count()
        self._threads = ThreadPoolExecutor(2, "quire-text")
        self._grammar_checker: GrammarChecker | None = None  # started with the first grammar
        self._computed_tokens: dict[int, int] = {}  # of each replica
        self.live = LiveView(client, metrics, config.replicas)

    # ── input ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def open(
        self,
        prompt: Prompt,
        params: SamplingParams,
        context: RequestContext,
        priority: int = 0,
        kept: frozenset[int] = frozenset(),
        make_text_end: Callable[[], TextEnd] | None = None,
    ) -> OutputProcessor:
        """Check a prompt and its parameters, and make its requests. `kept`: special tokens that stay in the text.

        Admission is checked here as well as in `generate`: a refusal before a stream begins has a status of its own.
        """
        if isinstance(prompt, str):
            prompt = {"prompt": prompt, "prompt_token_ids": await self.encode_prompt(prompt)}
        # Clients may send the same request id twice; the engine's ids are unique.
        request_id = f"{context.request_id}-{next(self._prompt_numbers)}"
        tenant = context.tenant
        output_processor = self._input_processor.process(
            prompt,
            params,
            request_id,
            priority=priority,
            salt=tenant.salt,
            tenant=tenant.name,
            keep_special_ids=kept,
            make_text_end=make_text_end,
        )
        self.admission.check(output_processor.num_sequences, len(output_processor.output.prompt_token_ids))
        return output_processor

    async def open_chat(
        self, prompt: ChatPrompt, params: SamplingParams, context: RequestContext, priority: int = 0
    ) -> OutputProcessor:
        await self.check_grammar(params)
        kept, tokens = prompt.kept_token_ids(), await self.encode_prompt(prompt.text, add_special_tokens=False)
        return await self.open(
            {"prompt": prompt.text, "prompt_token_ids": tokens}, params, context, priority, kept, prompt.make_text_end
        )

    async def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a prompt. A prompt that cannot fit the context is refused before it is encoded."""
        self._input_processor.check_length(text)
        return await self.encode(text, add_special_tokens=add_special_tokens)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return await self.run_text_work(len(text), lambda: self.tokenizer.encode(text, add_special_tokens))

    async def locate_prompt(self, output_processor: OutputProcessor) -> PromptText:
        """The text of a prompt, and the offsets of its tokens."""
        text, token_ids = output_processor.output.prompt, output_processor.output.prompt_token_ids
        size = len(token_ids) if text is None else len(text)
        return await self.run_text_work(size, lambda: locate_prompt(self.tokenizer, text, token_ids))

    async def run_text_work(self, size: int, work: Callable[[], Result]) -> Result:
        """Run work on a text: a short text at once, a long text in a thread, so that it does not block streams."""
        return work() if size < LONG_CHARS else await run_in(self._threads, work)

    async def check_grammar(self, params: SamplingParams) -> None:
        """Compile the grammar of structured outputs in a worker process. Raises BadGrammar if that fails."""
        if params.structured_outputs is None:
            return
        if self._grammar_checker is None:
            self._grammar_checker = GrammarChecker(
                self.tokenizer, self.ready.vocab_size, self._input_processor.end_token_ids
            )
        await self._grammar_checker.check(params.structured_outputs)

    # ── output ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def generate(self, output_processors: Sequence[OutputProcessor]) -> AsyncIterator[set[OutputProcessor]]:
        """Run the requests of one HTTP request to their end. Yields the output processors whose output has grown.

        Closing the iterator aborts the requests. An answer that fails, or a request that exceeds its deadline, raises.
        """
        owners = {request.id: processor for processor in output_processors for request in processor.requests}
        requests = [request for processor in output_processors for request in processor.requests]
        num_sequences = sum(processor.num_sequences for processor in output_processors)
        num_tokens = sum(len(processor.requests[0].prompt) for processor in output_processors)
        with self.admission.admit(num_sequences, num_tokens):
            timer = RequestTimer(self.metrics, output_processors)
            deadline = Deadline(self.client, output_processors, self.config.request_timeout)
            stream = self.client.submit(requests)
            try:
                async for updates in stream:
                    deadline.check()
                    grown = {owners[update.id] for update in updates}
                    for update in updates:
                        if owners[update.id].process(update):
                            self.client.abort(update.id)
                    timer.observe(updates)
                    for processor in grown:
                        raise_failure(processor)
                    yield grown
            finally:
                deadline.cancel()
                await stream.aclose()  # type: ignore[attr-defined]
                timer.stop()

    async def complete(self, output_processors: Sequence[OutputProcessor]) -> None:
        """Run requests to their end."""
        async for _ in self.generate(output_processors):
            pass

    def on_step(self, outputs: StepOutputs, replica: int = 0) -> None:
        """An engine has finished a step."""
        if outputs.step_s is not None:
            tokens = outputs.computed_tokens - self._computed_tokens.get(replica, 0)
            self.admission.throughput.add(max(0, tokens), outputs.step_s / self.metrics.num_replicas)
        self._computed_tokens[replica] = outputs.computed_tokens
        self.metrics.on_step(outputs, replica)

    async def close(self) -> None:
        """Stop threads and the grammar worker. The client ends the requests."""
        self.live.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.templates.close()
        if self._grammar_checker is not None:
            await self._grammar_checker.close()


async def stream_chat(
    service: Service, output_processor: OutputProcessor, parser: ChatParser
) -> AsyncGenerator[list[Event], None]:
    """The one answer to a prompt as reasoning, text and calls while it grows. It ends early if the parser is done."""
    answer = output_processor.output.outputs[0]
    async with aclosing(service.generate([output_processor])) as stream:  # type: ignore[type-var]
        async for _ in stream:
            yield parser.push(answer.text, is_last=answer.finished)
            if parser.finished:
                return


def raise_failure(output_processor: OutputProcessor) -> None:
    """Raise the error of an answer that failed."""
    for answer in output_processor.output.outputs:
        if answer.finish_reason == "error":
            message = answer.error or "The engine failed on this request."
            raise InvalidParams(message) if answer.refused else EngineError(message)


class Deadline:
    """Aborts requests that have run for too long, even if their client reads nothing."""

    def __init__(self, client: EngineClient, output_processors: Sequence[OutputProcessor], seconds: float) -> None:
        self._client = client
        self._output_processors = output_processors
        self._seconds = seconds
        self._exceeded = False
        self._timer = asyncio.get_running_loop().call_later(seconds, self._abort)

    def _abort(self) -> None:
        self._exceeded = True
        for processor in self._output_processors:
            for request_id in processor.unfinished_ids:
                self._client.abort(request_id)

    def check(self) -> None:
        if self._exceeded:
            raise DeadlineExceeded(f"The request was ended after {self._seconds:g} s, the longest one may take here.")

    def cancel(self) -> None:
        self._timer.cancel()
