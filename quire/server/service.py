"""Service: the model as the routes see it. It turns prompts into exchanges, runs them under the server's limits, and
counts. What an API's fields are called and how its answers look is the routes' own affair.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.core.structured import StructuredOutputs
from quire.engine.messages import Ready, Stepped
from quire.engine.supervisor import Supervised
from quire.errors import DeadlineExceeded
from quire.server.config import ServerConfig
from quire.server.gate import Gate
from quire.server.keys import Caller
from quire.server.metrics import Metrics
from quire.server.templates import ChatTemplates, Result, run_in
from quire.text.detokenizer import PromptText, locate_prompt
from quire.text.grammar.checker import GrammarChecker
from quire.text.input_processor import InputProcessor, Prompt
from quire.text.output_processor import OutputProcessor
from quire.text.tokenizers.length_bound import find_length_bound
from quire.text.tokenizers.tokenizer import Tokenizer

LONG_CHARS = 8192  # what takes longer than a step to encode is encoded in a thread


class Service:
    """One model, its limits and its figures."""

    def __init__(
        self,
        client: Supervised,
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
        self.metrics = metrics
        self.model = config.served_model_name or engine.model
        self.created_s = int(time.time())
        self.numbers = itertools.count()
        self.gate = Gate(ready.max_requests, config.max_queue_requests, config.max_queue_tokens)
        self._input_processor = InputProcessor(
            tokenizer,
            ready.vocab_size,
            ready.max_len,
            ready.eos_token_ids,
            engine.seed,
            by_priority=engine.order == "priority",
            length_bound=find_length_bound(tokenizer.backend),
        )
        self.templates = ChatTemplates(self.model, tokenizer, allow_request_templates=config.allow_request_templates)
        self._threads = ThreadPoolExecutor(2, "quire-text")
        self._grammars: GrammarChecker | None = None  # made when the first grammar comes
        self._computed_tokens = 0

    # ── words in ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a prompt. One that cannot fit the context is refused before it is encoded."""
        self._input_processor.check_length(text)
        return await self.encode(text, add_special_tokens=add_special_tokens)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return await self._aside(len(text), lambda: self.tokenizer.encode(text, add_special_tokens))

    async def locate_prompt(self, exchange: OutputProcessor) -> PromptText:
        """The text of an exchange's prompt, and where its tokens begin in it."""
        text, token_ids = exchange.output.prompt, exchange.output.prompt_token_ids
        size = len(token_ids) if text is None else len(text)
        return await self._aside(size, lambda: locate_prompt(self.tokenizer, text, token_ids))

    async def _aside(self, size: int, work: Callable[[], Result]) -> Result:
        """Work on a short text is done at once, on a long one in a thread, so that no stream stands still meanwhile."""
        return work() if size < LONG_CHARS else await run_in(self._threads, work)

    async def open(
        self,
        prompt: Prompt,
        params: SamplingParams,
        caller: Caller,
        request_id: str,
        priority: int = 0,
        kept: frozenset[int] = frozenset(),
    ) -> OutputProcessor:
        """Check a prompt and its parameters, and make the requests for it.

        Whether there is room is asked here too, as long as a refusal can still have a status of its own.
        """
        if isinstance(prompt, str):
            prompt = {"prompt": prompt, "prompt_token_ids": await self.encode_prompt(prompt)}
        exchange = self._input_processor.process(
            prompt, params, request_id, priority=priority, salt=caller.salt, tenant=caller.tenant, keep_special_ids=kept
        )
        self.gate.check(len(exchange.requests), len(exchange.output.prompt_token_ids))
        return exchange

    async def check_grammar(self, spec: StructuredOutputs) -> None:
        """Raise BadGrammar if an answer cannot be made to follow this."""
        if self._grammars is None:
            self._grammars = GrammarChecker(self.tokenizer, self.ready.vocab_size, self._input_processor.end_token_ids)
        await self._grammars.check(spec)

    async def close(self) -> None:
        """Let go of threads and processes. Requests are the client's affair."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.templates.close()
        if self._grammars is not None:
            await self._grammars.close()

    # ── answers out ───────────────────────────────────────────────────────────────────────────────────────────────

    async def answer(self, exchanges: Sequence[OutputProcessor]) -> AsyncIterator[set[OutputProcessor]]:
        """Run exchanges that belong together to their end, yielding those that have grown each time some have.

        Whoever stops listening ends them. They end too when their time is over: then DeadlineExceeded is raised.
        """
        requests = [request for exchange in exchanges for request in exchange.requests]
        owners = {request.id: exchange for exchange in exchanges for request in exchange.requests}
        num_tokens = sum(len(exchange.requests[0].prompt) for exchange in exchanges)
        with self.gate.admit(len(requests), num_tokens):
            clock = self.metrics.begin(exchanges)
            deadline = Deadline(self.client, exchanges, self.config.request_timeout)
            updates = self.client.submit(requests)
            try:
                async for bundle in updates:
                    deadline.check()
                    grown = {owners[update.id] for update in bundle}
                    for update in bundle:
                        if owners[update.id].process(update):
                            self.client.abort(update.id)
                    clock.tick(bundle)
                    yield grown
            finally:
                deadline.cancel()
                await updates.aclose()  # type: ignore[attr-defined]
                clock.stop()

    async def complete(self, exchanges: Sequence[OutputProcessor]) -> None:
        """Run exchanges to their end."""
        async for _ in self.answer(exchanges):
            pass

    def took_step(self, stepped: Stepped) -> None:
        """News from the engine: figures for the gate and for /metrics."""
        if stepped.step_s is not None:
            tokens = stepped.computed_tokens - self._computed_tokens
            self.gate.rate.add(max(0, tokens), stepped.step_s)
        self._computed_tokens = stepped.computed_tokens
        self.metrics.took_step(stepped)


class Deadline:
    """Ends exchanges when their time is over, whatever their reader is doing."""

    def __init__(self, client: Supervised, exchanges: Sequence[OutputProcessor], seconds: float) -> None:
        self._client = client
        self._exchanges = exchanges
        self._seconds = seconds
        self._passed = False
        self._timer = asyncio.get_running_loop().call_later(seconds, self._pass)

    def _pass(self) -> None:
        self._passed = True
        for exchange in self._exchanges:
            for request_id in exchange.unfinished_ids:
                self._client.abort(request_id)

    def check(self) -> None:
        if self._passed:
            raise DeadlineExceeded(f"The request was ended after {self._seconds:g} s, the longest one may take here.")

    def cancel(self) -> None:
        self._timer.cancel()
