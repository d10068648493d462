"""Chat, as all APIs of the server share it: messages and tools to a prompt, answers to reasoning, text and calls.

A route makes a `ChatInput` from its fields. `ChatTemplates.prepare` finds the chat template, renders it and returns a
`ChatPrompt`. `Service.open_chat` tokenizes it. A `ChatParser` reads the generated text.

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

from quire.errors import InvalidParams, TemplateError, show
from quire.text.answer_format import AnswerFormat
from quire.text.detokenizer import TextEnd
from quire.text.templates.capabilities import TemplateCapabilities, detect_capabilities
from quire.text.templates.chat_template import ChatTemplate
from quire.text.templates.messages import prepare_messages
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.tools.definitions import NO_TOOLS, Tool, ToolChoice
from quire.text.tools.events import Event, ReasoningDelta, ToolCallStart

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
    reasoning_effort      how much the model reasons, if its template has a setting for that; "none": not at all
    """

    messages: Sequence[Mapping[str, Any]]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = NO_TOOLS
    structured_outputs: Mapping[str, Any] | None = None
    prefill: str = ""
    chat_template: str | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: Mapping[str, Any] | None = None
    reasoning_effort: str | None = None
    is_thinking_disabled: bool = False  # the same as an effort of "none"


@dataclass(frozen=True, slots=True)
class CompiledTemplate:
    """A compiled chat template, its format of tool calls, and the threads that render it."""

    template: ChatTemplate
    capabilities: TemplateCapabilities
    threads: Executor


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered ChatInput, and how the answer to it is written."""

    chat: ChatInput
    text: str
    format: AnswerFormat
    tokenizer: Tokenizer

    def sampling_params(self) -> dict[str, Any]:
        """The sampling parameters that follow from tools and structured outputs."""
        structured = self.format.structured_outputs(self.chat.structured_outputs, self.tokenizer)
        return {} if structured is None else {"structured_outputs": structured}

    def kept_token_ids(self) -> frozenset[int]:
        """Special tokens that mark reasoning and tool calls. They stay in the text, because the parser reads them."""
        return frozenset(self.format.special_markers(self.tokenizer).values())

    def parser(self) -> ChatParser:
        """A parser for one answer to this prompt."""
        return ChatParser(self.format)

    @property
    def make_text_end(self) -> Callable[[], TextEnd] | None:
        """If only one call is allowed, an answer ends with the token that completes it, however many tokens a step has
        made. So usage and log probabilities do not depend on drafts, or on when a request is aborted."""
        return self._text_end if self.format.has_tools and not self.chat.tool_choice.parallel else None

    def _text_end(self) -> TextEnd:
        parser = self.format.parser()

        def ends(text: str) -> bool:
            parser.push(text)
            return parser.finished

        return ends


class ChatParser:
    """Reads one answer as reasoning, text and tool calls while it grows."""

    def __init__(self, format: AnswerFormat) -> None:
        self._format = format
        self._parser = format.parser()
        self._num_chars = 0
        self._is_complete = False
        self.events: list[Event] = []
        self.has_calls = False

    @property
    def finished(self) -> bool:
        """The request allows one call, and that call is complete. What follows in the answer is ignored."""
        return self._parser.finished

    def push(self, text: str, *, is_last: bool) -> list[Event]:
        """The new events. `text` is the whole answer so far."""
        if self._is_complete:
            return []
        delta, self._num_chars, self._is_complete = text[self._num_chars :], len(text), is_last
        new = self._parser.push(delta) + (self._parser.finish() if is_last else [])
        self.has_calls = self.has_calls or any(isinstance(event, ToolCallStart) for event in new)
        self.events += new
        return new

    def count_reasoning_tokens(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> int:
        has_reasoning = any(isinstance(event, ReasoningDelta) for event in self.events)
        return self._format.count_reasoning_tokens(token_ids, tokenizer) if has_reasoning else 0


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
        """Render the prompt."""
        compiled, variables = await self.find(chat.chat_template), chat.chat_template_kwargs or {}
        if reserved := RESERVED_VARIABLES & set(variables):
            name = f"chat_template_kwargs.{min(reserved)}"
            raise InvalidParams(f"{name}: this has a field of its own; leave it out here.")
        effort = "none" if chat.is_thinking_disabled else chat.reasoning_effort
        variables = {**variables, **effort_variables(compiled.template.source, effort)}

        def work() -> str:
            shown = chat.tools if chat.tool_choice.mode != "none" else ()
            messages = [system_role(message) for message in chat.messages]
            prepared = prepare_messages(messages, shown, compiled.capabilities)
            return compiled.template.render(
                prepared.messages, prepared.tools, add_generation_prompt=chat.add_generation_prompt, **variables
            )

        text = await run_in(compiled.threads, work)
        format = AnswerFormat.of(compiled.capabilities, chat.tool_choice, text)
        if effort == "none" and format.phase != "answer":
            raise InvalidParams("This model's chat template has no way to turn reasoning off; leave that out.")
        prefill, format = format.after_prefill(chat.prefill)
        return ChatPrompt(chat, text + prefill, format, self._tokenizer)

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


def effort_variables(source: str, effort: str | None) -> dict[str, Any]:
    """The variables of a chat template that set how much the model reasons."""
    if effort is None:
        return {}
    if effort == "none":
        return {"enable_thinking": False} if "enable_thinking" in source else {}
    if "reasoning_effort" in source:
        return {"reasoning_effort": effort}
    raise InvalidParams(
        f"A reasoning_effort of {show(effort)} is not possible: the chat template has no setting for it; leave it out.",
        "reasoning_effort",
    )


def system_role(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Chat templates have no developer role: it becomes the system role."""
    is_developer = isinstance(message, Mapping) and message.get("role") == "developer"
    return {**message, "role": "system"} if is_developer else message
