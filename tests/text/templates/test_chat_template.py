"""ChatTemplate: rendered prompts and errors."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire.errors import InvalidParams, TemplateError
from quire.text.templates import chat_template
from quire.text.templates.chat_template import ChatTemplate
from quire.text.templates.sandbox import Sandbox

pytestmark = pytest.mark.cpu

USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages=USER, **options) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


class TestRendering:
    def test_a_conversation(self):
        source = (
            "{{ bos_token }}{% for m in messages %}\n"
            "    [{{ m.role }}] {{ m['content'] | trim }}\n"
            "{% endfor %}\n"
            "{% if add_generation_prompt %}[assistant]{% endif %}"
        )
        messages = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi"}]
        assert render(source, messages) == "<s>    [system] Be brief.\n    [user] Hi\n[assistant]"
        assert render(source, messages, add_generation_prompt=False) == "<s>    [system] Be brief.\n    [user] Hi\n"

    def test_tools_and_further_variables(self):
        tools = [{"type": "function", "function": {"name": "f"}}]
        source = "{% if tools %}{{ tools[0].function.name }}{% endif %}{{ think is defined and think }}"
        assert render(source, tools=tools, think=True) == "fTrue"
        assert render(source) == "False"

    def test_json_is_left_as_it_is(self):
        value = {"b": "<é> & \"'", "a": [1, None]}
        assert render("{{ v | tojson }}", v=value) == '{"b": "<é> & \\"\'", "a": [1, null]}'
        assert render("{{ v | tojson(indent=2) }}", v={"a": [1]}) == '{\n  "a": [\n    1\n  ]\n}'
        assert render(
            "{{ v | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}", v={"é": 1, "a": 2}
        ) == ('{"a":2,"\\u00e9":1}')

    @pytest.mark.parametrize(
        ("source", "expected"),
        [
            ("{% for i in 'abc' %}{% if i == 'b' %}{% continue %}{% endif %}{{ i }}{% endfor %}", "ac"),
            ("{% for i in 'abc' %}{% if i == 'b' %}{% break %}{% endif %}{{ i }}{% endfor %}", "a"),
            ("{% for x in 'abc' if x != 'b' %}{{ x }}{{ loop.index }}/{{ loop.length }} {% endfor %}", "a1/2 c2/2 "),
            ("{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
            ("{% for k, v in {'a': 1}.items() %}{{ k ~ v }}{% endfor %}", "a1"),
            ("{% set n = namespace(i=1) %}{% for x in [2, 3] %}{% set n.i = n.i * x %}{% endfor %}{{ n.i }}", "6"),
            ("{% macro f(x, y='b') %}{{ x }}{{ y }}{{ caller() }}{% endmacro %}{% call f('a') %}c{% endcall %}", "abc"),
            ("{% set x %}a{{ 1 + 1 }}{% endset %}{{ x * 2 }}", "a2a2"),
            ("{% generation %}kept{% endgeneration %}", "kept"),
            ("{{ '%s-%03d' % ('a', 7) }} {{ '{:>3}|{}'.format('x', {'k': 1}) }}", "a-007   x|{'k': 1}"),
            ("{{ 'a,b'.split(',')[1:] }}{{ 'x'.join(['1', '2']) }}{{ [3, 1] | sort | join('-') }}", "['b']1x21-3"),
            ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}", "['Hi']"),
            ("{{ missing }}{{ missing | default('d') }}{{ messages[0].missing is defined }}", "dFalse"),
            ("{{ dict(a=1).a }}{{ cycler('x', 'y').next() }}{{ 3.7 | round | int }}", "1x4"),
            ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
            ("{{ strftime_now('%Y') | length }}", "4"),
        ],
    )  # fmt: skip
    def test_the_language(self, source, expected):
        assert render(source) == expected

    def test_parts_are_joined_for_a_template_that_expects_text(self):
        parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
        assert render("{{ messages[0].content + '!' }}", parts) == "a\nb!"
        assert render("{% for p in messages[0].content %}<{{ p.text }}>{% endfor %}", parts) == "<a><b>"

    def test_no_content_is_empty_unless_the_template_asks(self):
        calls = [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
        assert render("{{ messages[0].content }}|", calls) == "|"
        assert render("{{ messages[0].content is none }}", calls) == "True"

    def test_messages_are_not_touched(self):
        messages = [{"role": "assistant", "tool_calls": [1]}]
        render("{{ messages }}", messages)
        assert messages == [{"role": "assistant", "tool_calls": [1]}]

    def test_many_threads_share_a_template(self):
        template = ChatTemplate("{% for i in range(200) %}{{ messages[0].content }}{% endfor %}", {})
        with ThreadPoolExecutor(4) as pool:
            texts = pool.map(lambda i: template.render([{"role": "user", "content": str(i)}]), range(40))
        assert list(texts) == [str(i) * 200 for i in range(40)]


class TestFailures:
    @pytest.mark.parametrize(
        ("source", "words"),
        [
            ("ok\n{% for %}", r"not valid in line 2"),
            ("{{ x", r"not valid in line 1"),
            ("{{ 1 | nothing }}", r"No filter named 'nothing'"),
            ("\n\n{{ raise_exception('only users here') }}", r"refused the conversation in line 3: only users here\."),
            ("{{ a.b.c }}", r"failed in line 1: 'a' is undefined"),
            ("{{ messages[0]['content'] + 1 }}", r"failed in line 1: can only concatenate str"),
            ("{{ 1 / 0 }}", r"division by zero"),
            ("{{ {} | tojson }}{{ missing | tojson }}", r"not JSON serializable"),
            ("{% include 'x' %}", r"no loader"),
        ],
    )
    def test_say_what_and_where(self, source, words):
        with pytest.raises(TemplateError, match=words):
            render(source)

    @pytest.mark.parametrize(
        "messages",
        [
            None,
            [],
            "Hi",
            {"role": "user"},
            ["Hi"],
            [{"content": "Hi"}],
            [{"role": "", "content": "Hi"}],
            [{"role": 1, "content": "Hi"}],
            [{"role": "user"}],
            [{"role": "user", "content": None}],
            [{"role": "user", "content": 3}],
            [{"role": "user", "content": ["Hi"]}],
            [{"role": "user", "content": [{"type": "text"}]}],
            [{"role": "user", "content": [{"type": "image", "text": "Hi"}]}],
        ],
    )
    def test_of_messages(self, messages):
        with pytest.raises(InvalidParams, match="messages"):
            render("{{ messages }}", messages)


class TestEnvironments:
    """Making Jinja's environment costs several times what a rendering does, so it is made once."""

    @pytest.fixture
    def made(self, monkeypatch) -> list[Sandbox]:
        made: list[Sandbox] = []

        class Counted(Sandbox):
            def __init__(self, *args) -> None:
                super().__init__(*args)
                made.append(self)

        monkeypatch.setattr(chat_template, "Sandbox", Counted)
        return made

    def test_one_serves_all_renderings_that_follow_each_other(self, made):
        template = ChatTemplate("{{ messages[0].content }}", {})
        assert [template.render(user(text)) for text in ("a", "b", "c")] == ["a", "b", "c"]
        assert len(made) == 1

    def test_renderings_at_the_same_time_have_one_each(self, made):
        template = ChatTemplate("{{ messages[0].content }}{{ again() if again }}", {})

        def again() -> str:
            return template.render(user("inner"), again=None)

        assert template.render(user("outer "), again=again) == "outer inner"
        assert len(made) == 2
        assert template.render(user("more "), again=again) == "more inner"
        assert len(made) == 2

    def test_every_rendering_has_a_budget_of_its_own(self):
        template = ChatTemplate("{{ messages[0].content * 60 }}", {}, max_chars=100)
        assert [len(template.render(user("x"))) for _ in range(100)] == [60] * 100

    def test_one_that_failed_is_not_used_again(self, made):
        template = ChatTemplate("{{ raise_exception('no') if messages[0].content == 'x' else 'yes' }}", {})
        for _ in range(3):
            with pytest.raises(TemplateError, match="no"):
                template.render(user("x"))
            assert template.render(user("y")) == "yes"

    def test_nothing_of_a_conversation_is_kept(self):
        class Text(str):
            pass

        text = Text("a secret")
        reference = weakref.ref(text)
        template = ChatTemplate("{{ messages | length }}{{ [messages[0].content] | join }}", {})
        template.render(user(text))
        del text
        gc.collect()
        assert reference() is None


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
