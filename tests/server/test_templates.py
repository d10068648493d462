"""Chat templates as a server runs them: the model's own, and those of requests."""

from __future__ import annotations

import asyncio
import threading

import pytest

from quire.errors import InvalidParams, TemplateError
from quire.server.chat import MAX_REQUEST_TEMPLATES, ChatInput, ChatTemplates
from quire.text.templates.chat_template import ChatTemplate
from quire.text.tokenizers.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level

pytestmark = pytest.mark.cpu

HELLO = [{"role": "user", "content": "hello"}]
PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def make(source=None, *, allow=True):
    tokenizer = Tokenizer.from_gguf(byte_level() | ({"tokenizer.chat_template": source} if source else {}))
    return ChatTemplates("tiny", tokenizer, allow_request_templates=allow)


def render(templates, source=None, messages=HELLO, **options):
    async def work():
        return (await templates.prepare(ChatInput(messages=messages, chat_template=source, **options))).text

    try:
        return asyncio.run(work())
    finally:
        templates.close()


def test_a_request_brings_a_template_to_a_model_that_has_none():
    assert render(make(), PLAIN) == "user: hello\n"
    assert render(make(), PLAIN, [{"role": "developer", "content": "x"}, *HELLO]) == "system: x\nuser: hello\n"
    with pytest.raises(TemplateError, match="tiny has no chat template; send chat_template"):
        render(make())


def test_a_request_may_bring_one_only_where_the_server_allows_it():
    with pytest.raises(InvalidParams, match="--allow-request-templates"):
        render(make(PLAIN, allow=False), PLAIN)
    assert render(make(PLAIN, allow=False)) == "user: hello\n"


THINKS = PLAIN + "{{ '<think></think>' if enable_thinking is defined and not enable_thinking else '<think>' }}"


def test_a_prefill_closes_reasoning_that_the_template_has_opened():
    assert render(make(THINKS), prefill="Yes").endswith("<think>\n</think>\n\nYes")


def test_reasoning_is_set_by_the_variables_of_the_template():
    assert render(make(THINKS), reasoning_effort="none").endswith("</think>")
    assert render(make(THINKS), is_thinking_disabled=True).endswith("</think>")
    assert render(make(PLAIN), is_thinking_disabled=True) == "user: hello\n"
    assert render(make(PLAIN + "{{ reasoning_effort }}"), reasoning_effort="low").endswith("low")
    with pytest.raises(InvalidParams, match="no setting for it"):
        render(make(THINKS), reasoning_effort="low")
    with pytest.raises(InvalidParams, match="no way to turn reasoning off"):
        render(make(THINKS.replace("enable_thinking", "other")), reasoning_effort="none")


def test_variables_of_its_own_cannot_be_replaced():
    with pytest.raises(InvalidParams, match=r"chat_template_kwargs\.messages"):
        render(make(PLAIN), chat_template_kwargs={"messages": []})


@pytest.mark.parametrize("source", [None, PLAIN + "x"])
def test_no_template_is_compiled_or_rendered_on_the_event_loop(monkeypatch, source):
    used = []
    for name in ("__init__", "render"):
        real = getattr(ChatTemplate, name)

        def spy(*args, real=real, **options):
            used.append(threading.get_ident())
            return real(*args, **options)

        monkeypatch.setattr(ChatTemplate, name, spy)
    render(make(PLAIN), source)
    assert used
    assert threading.get_ident() not in used


def test_a_few_templates_of_requests_are_kept():
    templates, made = make(), []

    async def work():
        for number in range(MAX_REQUEST_TEMPLATES + 1):
            made.append(await templates.find(f"{number}"))
        assert await templates.find(f"{MAX_REQUEST_TEMPLATES}") is made[-1]
        assert await templates.find("0") is not made[0]

    asyncio.run(work())
    templates.close()
