"""AsyncLLM: a model for asyncio. The engine runs in a thread of its own; many coroutines share its batch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from quire.config import DEFAULT_MODEL, EngineConfig
from quire.core.outputs import RequestOutput
from quire.core.params import SamplingParams
from quire.engine.async_client import AsyncClient
from quire.engine.client import no_garbage_collection
from quire.errors import InvalidParams
from quire.store import resolve
from quire.text.grammar.constraint import GrammarBackend
from quire.text.input_processor import InputProcessor, Prompt
from quire.text.output_processor import OutputProcessor
from quire.text.tokenizers.tokenizer import Tokenizer, load_tokenizer


class AsyncLLM:
    """Options are EngineConfig's fields. The constructor blocks until the model is loaded."""

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        self.config = EngineConfig.of({"model": model, **options})
        files = resolve(self.config.model)
        with no_garbage_collection():
            self._tokenizer = load_tokenizer(files.path)
            self._client = AsyncClient(self.config, files.path)
        self._open: dict[str, OutputProcessor] = {}
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

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yields the output whenever it has new tokens. Closing the iterator aborts the request.

        Without sampling_params the model's own defaults apply.
        """
        if request_id in self._open:
            raise InvalidParams(f"A request with the id {request_id!r} is running already; choose another id.")
        params = sampling_params or self.get_default_sampling_params()
        processor = self._input_processor.process(prompt, params, request_id, priority=priority)
        while processor.output.request_id in self._open:  # a caller used a number as an id
            processor = self._input_processor.process(prompt, params, priority=priority)
        updates = self._client.submit(processor.requests)
        self._open[processor.output.request_id] = processor
        try:
            async for batch in updates:
                for update in batch:
                    if processor.process(update):
                        self._client.abort(update.id)
                yield processor.snapshot()
                if processor.finished:
                    return
        finally:
            del self._open[processor.output.request_id]
            await updates.aclose()  # type: ignore[attr-defined]

    async def abort(self, request_id: str) -> None:
        """End a request with all its samples; its iterator ends with finish_reason "abort"."""
        if processor := self._open.get(request_id):
            for one_id in processor.unfinished_ids:
                self._client.abort(one_id)

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters that the model's files name; quire's own where they name none."""
        return SamplingParams.of(self.info.config.sampling.as_params())

    def health(self) -> bool:
        return self._client.health()

    def shutdown(self) -> None:
        """Stop the engine's thread. Unfinished requests raise EngineClosed."""
        self._client.close()
