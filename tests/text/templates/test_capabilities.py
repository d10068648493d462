"""TemplateCapabilities: what is detected for test templates and for real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.text.reasoning.formats import ReasoningFormat
from quire.text.templates.capabilities import TemplateCapabilities, detect_capabilities
from quire.text.templates.chat_template import ChatTemplate
from quire.text.tools.formats import HERMES, LLAMA, MISTRAL, MISTRAL_NAMED

pytestmark = pytest.mark.cpu

REAL = Path(__file__).parents[4] / "shared" / "data" / "chat-templates"


def choose(source: str) -> TemplateCapabilities:
    return detect_capabilities(ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}))


def template(calls: str, *, show: str = "{{ tools | tojson }}", result: str = "{{ m.content }}") -> str:
    """Roles and contents, with these parts for tools, calls and results."""
    return (
        f"{{% if tools %}}{show}{{% endif %}}{{% for m in messages %}}<|{{{{ m.role }}}}|>"
        f"{{% if m.tool_calls %}}{calls}{{% elif m.role == 'tool' %}}{result}"
        "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    )


def each(body: str) -> str:
    return "{% for c in m.tool_calls %}{% set f = c.function %}" + body + "{% endfor %}"


HERMES_CALL = '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>\n'
LLAMA_CALL = '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
FIRST_ONLY = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"


class TestChoosing:
    def test_hermes(self):
        assert choose(template(each(HERMES_CALL))) == TemplateCapabilities(format=HERMES, supports_tools=True)

    def test_arguments_as_text(self):
        source = template(each(HERMES_CALL.replace(" | tojson", "")).replace("{{ f.arg", "{{ '' + f.arg"))
        assert choose(source) == TemplateCapabilities(format=HERMES, supports_tools=True, requires_text_arguments=True)

    def test_llama(self):
        source = template(FIRST_ONLY + each(LLAMA_CALL))
        assert choose(source) == TemplateCapabilities(format=LLAMA, supports_tools=True, single_tool_call=True)

    def test_mistral(self):
        listed = (
            '{{ "," if not loop.first }}{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "1"}'
        )
        assert choose(template("[TOOL_CALLS] [" + each(listed) + "]")).format == MISTRAL
        assert (
            choose(template(each("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"))).format == MISTRAL_NAMED
        )

    @pytest.mark.parametrize(
        "source",
        [
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
            template(each(HERMES_CALL), show=""),
            template(each(HERMES_CALL), result=""),
            template(each("<function={{ f.name }}>{{ f.arguments | tojson }}</function>")),
            template("<calls>" + each(LLAMA_CALL) + "</calls>"),
            template("{{ raise_exception('no tools here') }}"),
        ],
        ids=["no tools", "does not show them", "loses results", "other syntax", "other markers", "refuses"],
    )
    def test_a_template_that_does_not_speak_of_tools(self, source):
        assert choose(source) == TemplateCapabilities(format=HERMES)

    def test_a_template_without_a_system_message(self):
        source = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        assert choose(source + "{{ m.content }}{% endfor %}") == TemplateCapabilities(
            format=HERMES, supports_system_role=False
        )

    def test_no_template(self):
        assert detect_capabilities(None) == TemplateCapabilities(format=HERMES)


def reasoning(opening, closing):
    return ReasoningFormat(opening, closing, (opening, closing))


@pytest.mark.skipif(not REAL.exists(), reason="the collection of real templates is not here")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen-Qwen2.5-7B-Instruct", TemplateCapabilities(format=HERMES, supports_tools=True)),
        (
            "Qwen-Qwen3-0.6B",
            TemplateCapabilities(format=HERMES, supports_tools=True, reasoning=reasoning("<think>", "</think>")),
        ),
        ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", TemplateCapabilities(format=HERMES, supports_tools=True)),
        (
            "meta-llama-Llama-3.1-8B-Instruct",
            TemplateCapabilities(format=LLAMA, supports_tools=True, single_tool_call=True),
        ),
        (
            "meta-llama-Llama-3.2-3B-Instruct",
            TemplateCapabilities(format=LLAMA, supports_tools=True, single_tool_call=True),
        ),
        ("mistralai-Mistral-Nemo-Instruct-2407", TemplateCapabilities(format=MISTRAL, supports_tools=True)),
        ("Mistral-Small-3.2-24B-Instruct-2506", TemplateCapabilities(format=MISTRAL_NAMED, supports_tools=True)),
        (
            "mistralai-Ministral-3-14B-Reasoning-2512",
            TemplateCapabilities(format=MISTRAL_NAMED, supports_tools=True, reasoning=reasoning("[THINK]", "[/THINK]")),
        ),
        ("Qwen3-Coder", TemplateCapabilities(format=HERMES)),
        ("google-gemma-2-2b-it", TemplateCapabilities(format=HERMES, supports_system_role=False)),
        ("microsoft-Phi-3.5-mini-instruct", TemplateCapabilities(format=HERMES)),
    ],
)
def test_real_templates(name, expected):
    assert choose((REAL / f"{name}.jinja").read_text()) == expected
