"""Chat, as all APIs of the server share it: messages and tools to a prompt, generated text to text and tool calls.

A route makes a `ChatInput` from its fields. `ChatTemplates.prepare` finds the chat template and returns a `ChatPrompt`.
`Service.open_chat` renders and tokenizes it. A `ChatParser` reads the generated text.

A chat template is a program from a model file or from a request. It may run for a second, so it runs in a thread and
never on the event loop. Templates from requests have their own threads: a slow one delays no other request.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.errors import InvalidParams, TemplateError
from quire.text.detokenizer import TextEnd
from quire.text.templates.capabilities import TemplateCapabilities, detect_capabilities
from quire.text.templates.chat_template import ChatTemplate
from quire.text.templates.messages import prepare_messages
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.tools.definitions import NO_TOOLS, Tool, ToolChoice
from quire.text.tools.events import Event, TextDelta, ToolCallStart
from quire.text.tools.formats import ToolFormat, special_markers
from quire.text.tools.grammar import tool_call_grammar
from quire.text.tools.parser import ToolParser

Result = TypeVar("Result")

RESERVED_VARIABLES = frozenset({"self", "messages", "tools", "add_generation_prompt"})  # set by the server
MAX_REQUEST_TEMPLATES = 16  # compiled templates from requests that are cached


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """
    messages              in the form of OpenAI's chat completions
    tools, tool_choice    the tools that the prompt shows, and which of them may be called
    structured_outputs    the format of the answer, where it is not a tool call
    prefill               the beginning of the answer; the model continues it
    chat_template         the template of the request; None is the model's
    add_generation_prompt, chat_template_kwargs   further variables of the template
    """

    messages: Sequence[Mapping[str, Any]]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = NO_TOOLS
    structured_outputs: Mapping[str, Any] | None = None
    prefill: str = ""
    chat_template: str | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CompiledTemplate:
    """A compiled chat template, its format of tool calls, and the threads that render it."""

    template: ChatTemplate
    capabilities: TemplateCapabilities
    threads: Executor


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A ChatInput and the template that renders it."""

    chat: ChatInput
    compiled: CompiledTemplate
    tokenizer: Tokenizer

    @property
    def tool_format(self) -> ToolFormat:
        return self.compiled.capabilities.format

    @property
    def has_tools(self) -> bool:
        return self.chat.tool_choice.mode != "none"

    def sampling_params(self) -> dict[str, Any]:
        """The sampling parameters that follow from tools and structured outputs."""
        structured = self.chat.structured_outputs
        if not self.has_tools:
            return {} if structured is None else {"structured_outputs": structured}
        if structured is not None and not self.chat.tool_choice.is_forced:
            raise InvalidParams(
                "The answer is to be JSON and may be a call of a tool as well; ask for one of the two: set tool_choice "
                "so that there must be a call, or none, or leave the format out."
            )
        markers = special_markers(self.tool_format, self.tokenizer)
        grammar = tool_call_grammar(self.tool_format, self.chat.tool_choice, markers)
        return {} if grammar is None else {"structured_outputs": {"grammar": grammar}}

    def kept_token_ids(self) -> frozenset[int]:
        """Special tokens that mark tool calls. They stay in the text, because the parser reads them."""
        if not self.has_tools:
            return frozenset()
        return frozenset(special_markers(self.tool_format, self.tokenizer).values())

    def parser(self) -> ChatParser:
        """A parser for one answer to this prompt."""
        return ChatParser(ToolParser(self.tool_format, self.chat.tool_choice) if self.has_tools else None)

    @property
    def make_text_end(self) -> Callable[[], TextEnd] | None:
        """If only one call is allowed, an answer ends with the token that completes it, however many tokens a step has
        made. So usage and log probabilities do not depend on drafts, or on when a request is aborted."""
        return self._text_end if self.has_tools and not self.chat.tool_choice.parallel else None

    def _text_end(self) -> TextEnd:
        parser = ToolParser(self.tool_format, self.chat.tool_choice)

        def ends(text: str) -> bool:
            parser.push(text)
            return parser.finished

        return ends

    async def render(self) -> str:
        """The text of the prompt."""
        chat, variables = self.chat, self.chat.chat_template_kwargs or {}
        if reserved := RESERVED_VARIABLES & set(variables):
            name = f"chat_template_kwargs.{min(reserved)}"
            raise InvalidParams(f"{name}: this has a field of its own; leave it out here.")

        def work() -> str:
            shown = chat.tools if self.has_tools else ()
            messages = [system_role(message) for message in chat.messages]
            prepared = prepare_messages(messages, shown, self.compiled.capabilities)
            return self.compiled.template.render(
                prepared.messages, prepared.tools, add_generation_prompt=chat.add_generation_prompt, **variables
            )

        return await run_in(self.compiled.threads, work) + chat.prefill


class ChatParser:
    """Reads one answer as text and tool calls while it grows."""

    def __init__(self, parser: ToolParser | None) -> None:
        self._parser = parser
        self._num_chars = 0
        self._is_complete = False
        self.events: list[Event] = []
        self.has_calls = False

    @property
    def finished(self) -> bool:
        """The request allows one call, and that call is complete. What follows in the answer is ignored."""
        return self._parser is not None and self._parser.finished

    def push(self, text: str, *, is_last: bool) -> list[Event]:
        """The new events. `text` is the whole answer so far."""
        if self._is_complete:
            return []
        delta, self._num_chars, self._is_complete = text[self._num_chars :], len(text), is_last
        if self._parser is None:
            new: list[Event] = [TextDelta(delta)] if delta else []
        else:
            new = self._parser.push(delta) + (self._parser.finish() if is_last else [])
            self.has_calls = self.has_calls or any(isinstance(event, ToolCallStart) for event in new)
        self.events += new
        return new


class ChatTemplates:
    """The chat templates of the model and of requests, compiled once."""

    def __init__(self, model: str, tokenizer: Tokenizer, *, allow_request_templates: bool) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._allow_request_templates = allow_request_templates
        self._threads = ThreadPoolExecutor(2, "quire-template")
        self._request_threads = ThreadPoolExecutor(2, "quire-request-template")
        self._model_template: CompiledTemplate | None = None
        self._request_templates: OrderedDict[str, CompiledTemplate] = OrderedDict()

    async def prepare(self, chat: ChatInput) -> ChatPrompt:
        return ChatPrompt(chat, await self.find(chat.chat_template), self._tokenizer)

    async def find(self, source: str | None) -> CompiledTemplate:
        """The compiled template of a request, or of the model if `source` is None."""
        if source is not None:
            return await self._find_request_template(source)
        if self._tokenizer.chat_template is None:
            raise TemplateError(f"{self._model} has no chat template; send chat_template, or use completions instead.")
        if self._model_template is None:
            self._model_template = await self._compile(self._tokenizer.chat_template, self._threads)
        return self._model_template

    async def _find_request_template(self, source: str) -> CompiledTemplate:
        if not self._allow_request_templates:
            raise InvalidParams("chat_template: this server was not started with --allow-request-templates.")
        compiled = self._request_templates.get(source)
        if compiled is None:
            compiled = await self._compile(source, self._request_threads)
            self._request_templates[source] = compiled
        self._request_templates.move_to_end(source)
        if len(self._request_templates) > MAX_REQUEST_TEMPLATES:
            self._request_templates.popitem(last=False)
        return compiled

    async def _compile(self, source: str, threads: Executor) -> CompiledTemplate:
        def work() -> CompiledTemplate:
            template = ChatTemplate(source, self._tokenizer.special_tokens)
            return CompiledTemplate(template, detect_capabilities(template), threads)

        return await run_in(threads, work)

    def close(self) -> None:
        for threads in (self._threads, self._request_threads):
            threads.shutdown(wait=False, cancel_futures=True)


async def run_in(threads: Executor, work: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(threads, work)


def system_role(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Chat templates have no developer role: it becomes the system role."""
    is_developer = isinstance(message, Mapping) and message.get("role") == "developer"
    return {**message, "role": "system"} if is_developer else message
