"""ChatTemplates: the model's chat template and those that requests bring, compiled once and rendered in threads.

A template is a program from a model file or a request. It may run for a second, so it never runs on the event loop, and
the templates of requests have threads of their own: a slow one delays no other request.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.errors import InvalidParams, TemplateError
from quire.text.templates.capabilities import TemplateCapabilities, detect_capabilities
from quire.text.templates.chat_template import ChatTemplate
from quire.text.templates.messages import prepare_messages
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.tools.definitions import Tool

Result = TypeVar("Result")

OWN_VARIABLES = frozenset({"self", "messages", "tools", "add_generation_prompt"})  # of a chat template
MAX_COMPILED = 16  # templates of requests that are kept


@dataclass(frozen=True, slots=True)
class Template:
    """A compiled chat template, how it writes tool calls, and the threads that it runs in."""

    chat_template: ChatTemplate
    capabilities: TemplateCapabilities
    threads: Executor

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation. `extra` are further variables of the template."""
        if taken := OWN_VARIABLES & set(extra or ()):
            name = f"chat_template_kwargs.{min(taken)}"
            raise InvalidParams(f"{name}: this has a field of its own; leave it out here.")

        def work() -> str:
            prepared = prepare_messages([known_role(message) for message in messages], tools, self.capabilities)
            return self.chat_template.render(
                prepared.messages, prepared.tools, add_generation_prompt=add_generation_prompt, **(extra or {})
            )

        return await run_in(self.threads, work)


class ChatTemplates:
    """Finds the template of a conversation."""

    def __init__(self, model: str, tokenizer: Tokenizer, *, allow_request_templates: bool) -> None:
        self._model = model
        self._source = tokenizer.chat_template
        self._special_tokens = tokenizer.special_tokens
        self._allow_request_templates = allow_request_templates
        self._threads = ThreadPoolExecutor(2, "quire-template")
        self._request_threads = ThreadPoolExecutor(2, "quire-request-template")
        self._own: Template | None = None
        self._of_requests: OrderedDict[str, Template] = OrderedDict()

    async def find(self, source: str | None) -> Template:
        """The template that a request brings, or else the model's own."""
        if source is not None:
            return await self._find_of_request(source)
        if self._source is None:
            raise TemplateError(f"{self._model} has no chat template; send chat_template, or use completions instead.")
        if self._own is None:
            self._own = await self._compile(self._source, self._threads)
        return self._own

    async def _find_of_request(self, source: str) -> Template:
        if not self._allow_request_templates:
            raise InvalidParams("chat_template: this server was not started with --allow-request-templates.")
        template = self._of_requests.get(source)
        if template is None:
            template = await self._compile(source, self._request_threads)
            self._of_requests[source] = template
        self._of_requests.move_to_end(source)
        if len(self._of_requests) > MAX_COMPILED:
            self._of_requests.popitem(last=False)
        return template

    async def _compile(self, source: str, threads: Executor) -> Template:
        def work() -> Template:
            compiled = ChatTemplate(source, self._special_tokens)
            return Template(compiled, detect_capabilities(compiled), threads)

        return await run_in(threads, work)

    def close(self) -> None:
        for threads in (self._threads, self._request_threads):
            threads.shutdown(wait=False, cancel_futures=True)


async def run_in(threads: Executor, work: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(threads, work)


def known_role(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Templates have no developer role: such a message counts as the system's."""
    is_developers = isinstance(message, Mapping) and message.get("role") == "developer"
    return {**message, "role": "system"} if is_developers else message
