"""ChatTemplate: renders a conversation to a prompt with the model's Jinja template.

A template is compiled once and rendered many times. Each rendering has hard limits on time and size (`sandbox.py`). It
does not tokenize.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any, cast

import jinja2
from jinja2 import nodes

from quire.errors import InvalidParams, TemplateError, kind, show
from quire.text.templates.filters import bounded_filters
from quire.text.templates.sandbox import BoundExceeded, RaisedByTemplate, RenderBudget, Sandbox

MAX_SECONDS = 1.0
MAX_CHARS = 4 * 1024 * 1024
MAX_SOURCE_CHARS = 64 * 1024

_FILENAME = "<chat template>"
_MAX_REASON = 400


class ChatTemplate:
    """A compiled template. Safe to share between threads."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        max_seconds: float = MAX_SECONDS,
        max_chars: int = MAX_CHARS,
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._max_seconds = max_seconds
        self._max_chars = max_chars
        sandbox = self._make_sandbox()
        tree = self._parse(source, sandbox)
        self._accepts_parts = _accepts_parts(tree)
        self._accepts_none = _accepts_none(tree)
        self._code = self._compile(tree)
        self._idle = [self._load(sandbox)]  # a rendering pops one and appends it again

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """The prompt of a conversation. `extra` are further variables of the template."""
        check_messages(messages)
        conversation = [{**message, "content": self._plain(message.get("content"))} for message in messages]
        variables = {
            **self._special_tokens,
            "documents": None,
            **extra,
            "messages": conversation,
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._run(variables)
        except Exception as error:
            raise TemplateError(_explain(error)) from error

    def _plain(self, content: Any) -> Any:
        """A message's content in a form that the template accepts.

        A list of text parts becomes lines of text if the template expects a string. Missing content becomes an empty
        string if the template does not test for none.
        """
        if content is None:
            return None if self._accepts_none else ""
        if isinstance(content, str) or self._accepts_parts:
            return content
        return "\n".join(part["text"] for part in content)

    def _run(self, variables: Mapping[str, Any]) -> str:
        try:
            template = self._idle.pop()
        except IndexError:
            template = self._load(self._make_sandbox())
        budget = cast(Sandbox, template.environment).budget
        budget.reset()
        chunks, num_chars = [], 0
        for chunk in template.generate(variables):
            num_chars += len(chunk)
            if num_chars > self._max_chars:
                raise BoundExceeded(f"its output is longer than {self._max_chars} characters")
            chunks.append(chunk)
        budget.reset()  # drops references to the conversation
        self._idle.append(template)  # not after an error, which may leave it in any state
        return "".join(chunks)

    def _make_sandbox(self) -> Sandbox:
        budget = RenderBudget(self._max_seconds, self._max_chars)
        return Sandbox(budget, bounded_filters(budget))

    def _load(self, sandbox: Sandbox) -> jinja2.Template:
        """The compiled template in an environment of its own, because an environment holds one budget."""
        return jinja2.Template.from_code(sandbox, self._code, sandbox.make_globals(None))

    def _parse(self, source: str, sandbox: Sandbox) -> nodes.Template:
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateError(f"The chat template has {len(source)} characters; at most {MAX_SOURCE_CHARS} are read.")
        try:
            return sandbox.parse_guarded(source)
        except Exception as error:
            raise TemplateError(_explain(error)) from error

    def _compile(self, tree: nodes.Template) -> CodeType:
        assert tree.environment is not None
        try:
            return tree.environment.compile(tree, "chat template", _FILENAME)
        except Exception as error:
            raise TemplateError(_explain(error)) from error


def check_messages(messages: object) -> None:
    """Refuse messages that no template can render."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise InvalidParams("messages must be a list with at least one message in it.", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidParams(
                f"messages[{index}] is {kind(message)}; a message is an object with a role.", f"messages[{index}]"
            )
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise InvalidParams(
                f"messages[{index}].role is {show(role)}; give a role such as 'user'.", f"messages[{index}].role"
            )
        _check_content(message, f"messages[{index}].content")


def _check_content(message: Mapping[str, Any], where: str) -> None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return
    if not isinstance(content, Sequence):
        raise InvalidParams(f"{where} is {kind(content)}; give text or a list of text parts.", where)
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidParams(
                f'{where}[{index}] is not a text part; give {{"type": "text", "text": ...}}.', f"{where}[{index}]"
            )


def _accepts_parts(tree: nodes.Template) -> bool:
    """Whether the template iterates over the parts of a message's content."""
    return any(_last_name(loop.iter) == "content" for loop in tree.find_all(nodes.For))


def _accepts_none(tree: nodes.Template) -> bool:
    """Whether the template tests a message's content for none."""
    return any(test.name == "none" and _last_name(test.node) == "content" for test in tree.find_all(nodes.Test))


def _last_name(node: nodes.Node) -> str | None:
    match node:
        case nodes.Name():
            return node.name
        case nodes.Getattr():
            return node.attr
        case nodes.Getitem(arg=nodes.Const(value=str(key))):
            return key
    return None


def _explain(error: Exception) -> str:
    """One sentence: what happened, and in which line of the template."""
    line = error.lineno if isinstance(error, jinja2.TemplateSyntaxError) else _line_of(error)
    where = f" in line {line}" if line else ""
    reason = (str(error) or type(error).__name__).strip().rstrip(".")[:_MAX_REASON]
    match error:
        case BoundExceeded():
            return f"The chat template was stopped{where}: {reason}."
        case RaisedByTemplate():
            return f"The chat template refused the conversation{where}: {reason}."
        case RecursionError() | SyntaxError():  # raised by Python's own limits on nesting
            return f"The chat template was stopped{where}: it is nested too deeply."
        case jinja2.TemplateSyntaxError():
            return f"The chat template is not valid{where}: {reason}."
    return f"The chat template failed{where}: {reason}."


def _line_of(error: BaseException) -> int | None:
    """The innermost line of the template in the error's traceback."""
    line = None
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == _FILENAME:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line
