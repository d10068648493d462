"""What an anonymous recording keeps of prompts, tenants and parameters: what is equal, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from quire.core.params import SamplingParams, StructuredOutputs
from quire.core.plan import Detail, Hypothesis, Plan, Sampled, Update
from quire.core.request import Finish, Request
from quire.engine import recorder as recorder_module
from quire.engine.recorder import Recorder
from quire.errors import InvalidParams
from quire.trace.anonymous import PRIVATE, describe_params, prompt_digests, restore_params, tenant_digest
from quire.trace.format import RecordingStart, decoder
from quire.trace.recording import Recording
from tests.tools.recordings import engine, header

pytestmark = pytest.mark.cpu

PROMPT = [54_321 + number for number in range(40)]
TEXTS = ("secret-stop", "secret-word", "secret-schema", "secret-prediction", "secret-tenant", "secret-message")
PARAMS = SamplingParams(
    temperature=0.7,
    stop=["secret-stop"],
    bad_words=["secret-word"],
    structured_outputs=StructuredOutputs(json={"title": "secret-schema"}),
    prediction="secret-prediction",
    logit_bias={54_322: 3.0},
    stop_token_ids=[54_323],
    allowed_token_ids=[54_324],
    seed=5,
    n=2,
)


def make_recorder(monkeypatch: pytest.MonkeyPatch, **options: object) -> Recorder:
    monkeypatch.setattr(recorder_module, "describe_engine", lambda *given: engine())
    start = RecordingStart(begin_s=0.0, key=b"k" * 32, **options)
    return Recorder(start, SimpleNamespace(), SimpleNamespace())


def make_request(name: str = "0", **more: object) -> Request:
    return Request(
        f"{name}:secret-name", PROMPT, PARAMS, end_token_ids=frozenset({54_325}), bad_word_ids=((54_326,),), seed=5,
        max_tokens=9, salt=b"secret-salt", tenant="secret-tenant", prediction=[54_327], **more,
    )  # fmt: skip


def run(recorder: Recorder) -> bytes:
    """Two answers to a prompt: one step each kind, one that resumes, a beam search, an error."""
    leader = make_request()
    follower = make_request("1", leader=leader)
    resumed = make_request("2", output=[54_328, 54_329])
    for request in (leader, follower, make_request("2"), resumed):
        recorder.on_add(request, 1.0)
    plan = Plan(1, [leader, follower, resumed], [0, 40, 41], [40, 1, 1], [1, 1, 1])
    updates = [
        Update("0:secret-name", [54_330]),
        Update("1:secret-name", [54_331], Finish.ERROR, Detail(message="secret-message")),
        Update("2:secret-name", [], Finish.LENGTH, Detail(beams=[Hypothesis([54_332, 54_333], 0.0, 0.0, Finish.STOP)])),
    ]
    recorder.on_commit(plan, Sampled([[54_330], [54_331], []], seconds=0.25), updates, 2.0)
    recorder.on_fail(Plan(2, [leader], [40], [1], [1]), [])
    recorder.on_reset([])
    recorder.on_abort("0:secret-name")
    recorder.on_abort("0:secret-name")
    return recorder.take()


def read(lines: bytes) -> Recording:
    made = Recording("made", header())
    for line in lines.splitlines():
        made.add(decoder.decode(line))
    return made


def test_a_recording_has_everything_but_the_name_of_the_tenant(monkeypatch):
    lines = run(make_recorder(monkeypatch))
    found = read(lines)
    assert found.requests["0"].prompt == PROMPT
    assert found.requests["1"].name == "secret-name"
    assert found.requests["0"].tokens == [54_330]
    assert found.requests["1"].tokens == [54_331]
    assert found.requests["1"].prompt == PROMPT
    assert found.requests["1"].end.message == "secret-message"
    assert found.requests["2"].answers == [[54_332, 54_333]]
    assert found.requests["0"].end.finish == "abort"
    assert restore_params(found.requests["0"].params) == SamplingParams(
        **{name: getattr(PARAMS, name) for name in PARAMS.__slots__ if name != "seed"}
    )
    assert [step.failed for step in found.steps] == [False, True]
    assert found.steps[0].seconds == 0.25
    assert len(found.resets) == 1
    assert lines.count(b'"end"') == 3, "a request that has ended ends once"
    assert b"secret-tenant" not in lines
    assert b"secret-salt" not in lines


def test_an_anonymous_recording_has_no_tokens_and_no_texts(monkeypatch):
    lines = run(make_recorder(monkeypatch, anonymous=True))
    assert b"543" not in lines, "no token id"
    for text in (*TEXTS, "secret"):
        assert text.encode() not in lines
    found = read(lines)
    assert found.requests["0"].num_prompt == 40
    assert len(found.requests["0"].blocks) == 3
    assert found.requests["0"].num_output == 1
    assert found.requests["2"].num_output == 2
    assert found.requests["2"].end.beam_lengths == [2]
    assert found.requests["0"].params == {"temperature": 0.7, "n": 2}


def test_digests_show_how_far_prompts_are_equal():
    key = b"a" * 32
    one, other = PROMPT, [*PROMPT[:35], 1, *PROMPT[36:]]
    assert prompt_digests(key, "t", one)[:2] == prompt_digests(key, "t", other)[:2]
    assert prompt_digests(key, "t", one)[2] != prompt_digests(key, "t", other)[2]
    assert prompt_digests(key, "t", one) != prompt_digests(key, "u", one)
    assert not set(prompt_digests(key, "t", one)) & set(prompt_digests(b"b" * 32, "t", one)), "without the key"
    assert prompt_digests(key, "t", [5] * 32)[0] != prompt_digests(key, "t", [5] * 32)[1], "what is before counts"


def test_tenants_are_digests_of_the_key():
    assert tenant_digest(b"a" * 32, "", b"") == ""
    assert tenant_digest(b"a" * 32, "me", b"s") == tenant_digest(b"a" * 32, "me", b"s")
    assert tenant_digest(b"a" * 32, "me", b"s") != tenant_digest(b"b" * 32, "me", b"s")
    assert tenant_digest(b"a" * 32, "me", b"s") != tenant_digest(b"a" * 32, "you", b"s")


def test_every_parameter_that_holds_a_text_or_a_token_is_left_out():
    """Also one that is added later: what an anonymous recording may keep are numbers and switches."""
    kept = describe_params(PARAMS, anonymous=True)
    assert all(isinstance(value, int | float | bool) for value in kept.values())
    hints = SamplingParams.__annotations__
    texts = {
        name
        for name, hint in hints.items()
        if any(word in hint for word in ("str", "Sequence", "Mapping", "Structured"))
    }
    assert texts - {"early_stopping"} == set(PRIVATE)


def test_a_bias_of_no_token_is_refused_in_words():
    with pytest.raises(InvalidParams, match="its names are token ids"):
        restore_params({"logit_bias": {"x": 1.0}})
