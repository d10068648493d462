"""LLM on the default model: what a user of the offline API sees."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from quire import LLM, SamplingParams
from quire.beam_search import BeamSearchParams
from quire.core.plan import Update
from quire.errors import (
    DeviceLost,
    EmptyPrompt,
    EngineClosed,
    InvalidParams,
    ModelNotFound,
    PromptTooLong,
    TemplateError,
    UnknownField,
)
from quire.text.input_processor import InputProcessor

pytestmark = pytest.mark.model

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
FRANCE = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]


def test_it_knows_the_capital_of_france(llm: LLM) -> None:
    (out,) = llm.chat(FRANCE, GREEDY)
    assert "Paris" in out.outputs[0].text
    assert out.outputs[0].finish_reason == "stop"
    assert out.prompt is not None
    assert "<|im_start|>user" in out.prompt
    assert out.finished


def test_answers_that_are_taken_whole_have_no_target_between_tokens(llm: LLM) -> None:
    assert llm.config.itl_target_ms == 0.0
    assert llm._client.engine.scheduler.pace.target_s is None


def test_prompts_come_back_in_their_order(llm: LLM) -> None:
    prompts = ["One, two, three,", {"prompt_token_ids": llm.get_tokenizer().encode("The sky is")}, "Water boils at"]
    outs = llm.generate(prompts, GREEDY)
    assert [out.prompt for out in outs] == ["One, two, three,", None, "Water boils at"]
    assert "four" in outs[0].outputs[0].text
    assert llm.generate("One, two, three,", GREEDY)[0].outputs[0].text == outs[0].outputs[0].text


def test_parameters_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=length) for length in (3, 7)]
    outs = llm.generate(["a b c", "a b c"], params)
    assert [len(out.outputs[0].token_ids) for out in outs] == [3, 7]
    assert {out.outputs[0].finish_reason for out in outs} == {"length"}
    with pytest.raises(InvalidParams, match="2 entries for 1 prompts"):
        llm.generate(["a"], params)


def test_a_stop_string_ends_the_answer_before_it(llm: LLM) -> None:
    whole = llm.generate("One, two, three,", GREEDY)[0].outputs[0]
    cut = llm.generate("One, two, three,", SamplingParams(temperature=0.0, max_tokens=16, stop=[" five"]))[0].outputs[0]
    kept = llm.generate(
        "One, two, three,",
        SamplingParams(temperature=0.0, max_tokens=16, stop=" five", include_stop_str_in_output=True),
    )[0].outputs[0]
    assert cut.text == whole.text.split(" five")[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", " five")
    assert kept.text == cut.text + " five"
    assert whole.token_ids[: len(cut.token_ids)] == cut.token_ids


def test_a_stop_token_ends_the_answer_and_is_named(llm: LLM) -> None:
    whole = llm.generate("One, two, three,", GREEDY)[0].outputs[0]
    token = whole.token_ids[2]
    cut = llm.generate("One, two, three,", SamplingParams(temperature=0.0, stop_token_ids=[token]))[0].outputs[0]
    assert cut.token_ids == whole.token_ids[:3]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", token)
    assert whole.text.startswith(cut.text)


def test_min_tokens_and_ignore_eos(llm: LLM) -> None:
    short = llm.chat(FRANCE, GREEDY)[0].outputs[0]
    longer = llm.chat(FRANCE, SamplingParams(temperature=0.0, max_tokens=30, min_tokens=20))[0].outputs[0]
    full = llm.chat(FRANCE, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))[0].outputs[0]
    assert len(short.token_ids) < 20 <= len(longer.token_ids)
    assert (len(full.token_ids), full.finish_reason) == (30, "length")


def test_allowed_and_banned_words(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    yes_no = [tokenizer.encode(word)[0] for word in (" yes", " no")]
    out = llm.generate("Is water wet? Answer:", SamplingParams(max_tokens=4, allowed_token_ids=yes_no, seed=1))[0]
    assert set(out.outputs[0].token_ids) <= set(yes_no)
    banned = SamplingParams(temperature=0.0, max_tokens=16, bad_words=["four", "five"])
    text = llm.generate("One, two, three,", banned)[0].outputs[0].text
    assert "four" not in text
    assert "five" not in text


def test_samples_differ_share_the_prompt_and_repeat_with_the_seed(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, max_tokens=12, seed=7)
    first, again = (llm.generate("My favourite animal is", params)[0] for _ in range(2))
    texts = [answer.text for answer in first.outputs]
    assert [answer.index for answer in first.outputs] == [0, 1, 2, 3]
    assert len(set(texts)) > 1
    assert texts == [answer.text for answer in again.outputs]
    other = llm.generate("My favourite animal is", SamplingParams(n=4, max_tokens=12, seed=8))[0]
    assert texts != [answer.text for answer in other.outputs]


def test_without_a_seed_answers_differ_from_run_to_run(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=16)
    assert len({llm.generate("Once upon a time", params)[0].outputs[0].text for _ in range(3)}) > 1


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=3, prompt_logprobs=2)
    (out,) = llm.generate("The capital of France is", params)
    answer = out.outputs[0]
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 5
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert entry[token].rank == 1
        assert len(entry) == 3
        ranked = sorted(entry.values(), key=lambda one: one.rank)
        assert all(a.logprob >= b.logprob for a, b in pairwise(ranked))
    assert answer.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(answer.token_ids, answer.logprobs, strict=True))
    )
    assert out.prompt_logprobs is not None
    assert len(out.prompt_logprobs) == len(out.prompt_token_ids)
    assert out.prompt_logprobs[0] is None
    assert all(
        token in entry for token, entry in zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:], strict=True) if entry
    )


def test_a_prompt_seen_before_comes_from_the_cache(llm: LLM) -> None:
    prompt = "Quires are gatherings of pages, " * 8
    first = llm.generate(prompt, GREEDY)[0]
    again = llm.generate(prompt, GREEDY)[0]
    assert again.num_cached_tokens == len(again.prompt_token_ids) - 1
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_streaming_grows_to_the_same_text(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm._client.engine, "controller", None)  # a token a step
    pieces = list(llm.stream("One, two, three,", GREEDY))
    texts = [piece.outputs[0].text for piece in pieces]
    assert len(pieces) > 5
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert texts[-1] == llm.generate("One, two, three,", GREEDY)[0].outputs[0].text


def test_leaving_a_stream_frees_its_blocks(llm: LLM) -> None:
    scheduler = llm._client.engine.scheduler
    stream = llm.stream("Once upon a time", SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    assert scheduler.has_work
    stream.close()
    assert not scheduler.has_work
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks


def pool_is_whole(llm: LLM) -> bool:
    pool = llm._client.engine.scheduler.kv.pool
    return pool.num_free == pool.num_blocks


def test_streams_that_are_open_together_share_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm._client.engine, "controller", None)  # a token a step
    prompts = ["One, two, three,", "The sky is", "Water boils at"]
    alone = [llm.generate(prompt, GREEDY)[0].outputs[0].text for prompt in prompts]
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    rounds = [[piece and piece.outputs[0].text for piece in pieces] for pieces in itertools.zip_longest(*streams)]
    assert len(rounds) > 5
    assert [[text for text in column if text is not None][-1] for column in zip(*rounds, strict=True)] == alone
    assert pool_is_whole(llm)


def test_generate_while_a_stream_is_open(llm: LLM) -> None:
    alone = llm.generate("The sky is", GREEDY)[0].outputs[0].text
    stream = llm.stream("The sky is", GREEDY)
    next(stream)
    assert "four" in llm.generate("One, two, three,", GREEDY)[0].outputs[0].text
    assert [piece.outputs[0].text for piece in stream][-1] == alone
    assert pool_is_whole(llm)


def test_leaving_one_stream_leaves_the_others(llm: LLM) -> None:
    long = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0.0)
    left, kept = llm.stream("Once upon a time", long), llm.stream("One, two, three,", GREEDY)
    next(left)
    next(kept)
    left.close()
    assert "four" in list(kept)[-1].outputs[0].text
    assert pool_is_whole(llm)


def test_threads_that_use_one_llm_are_all_served(llm: LLM) -> None:
    prompts = [f"{number} and {number} is" for number in range(12)]
    alone = [out.outputs[0].text for out in llm.generate(prompts, GREEDY)]
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(lambda prompt: llm.generate(prompt, GREEDY)[0], prompts))
    assert [out.outputs[0].text for out in together] == alone
    assert len({out.request_id for out in together}) == len(prompts)
    assert pool_is_whole(llm)


def test_a_stream_that_is_dropped_while_a_step_runs_is_aborted(llm: LLM, monkeypatch) -> None:
    """Python may clean a generator up at any time, in the middle of planning as well."""
    engine = llm._client.engine
    dropped = [llm.stream("Once upon a time", SamplingParams(max_tokens=200, ignore_eos=True))]
    next(dropped[0])
    step = engine.step

    def drop_and_step() -> list[Update]:
        dropped.clear()
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", drop_and_step)
        assert "four" in llm.generate("One, two, three,", GREEDY)[0].outputs[0].text
    assert not engine.has_work
    assert pool_is_whole(llm)


def test_requests_are_made_as_the_engine_gets_to_them(default_model, monkeypatch) -> None:
    with LLM(max_len=128, num_blocks=64, max_requests=3) as small:
        num_open, seen = [0], []
        make, run = InputProcessor.process, small._client.receive

        def counted(*args, **options):
            num_open[0] += 1
            return make(*args, **options)

        def receive(inbox):
            updates = run(inbox)
            num_open[0] -= sum(update.finish is not None for update in updates)
            seen.append(num_open[0])
            return updates

        monkeypatch.setattr(InputProcessor, "process", counted)
        monkeypatch.setattr(small._client, "receive", receive)
        outs = small.generate([f"{number} is" for number in range(40)], SamplingParams(max_tokens=3, temperature=0.0))
    assert [out.prompt for out in outs] == [f"{number} is" for number in range(40)]
    assert [int(out.request_id) for out in outs] == list(range(40))
    assert max(seen) <= 6


def test_priorities_hold_among_prompts_that_wait(default_model, monkeypatch) -> None:
    """Also for those that are not in the engine's queue yet."""
    with LLM(max_len=128, num_blocks=64, max_requests=1, order="priority") as small:
        admitted, allocate = [], small._client.engine.scheduler._allocate

        def noted(request, *args):
            admitted.append(request.id)
            return allocate(request, *args)

        monkeypatch.setattr(small._client.engine.scheduler, "_allocate", noted)
        small.generate(["a", "b", "c", "d", "e"], SamplingParams(max_tokens=1), priority=[0, 0, 0, 0, -1])
    assert admitted == ["4", "0", "1", "2", "3"]


def test_scores(llm: LLM) -> None:
    good, bad = llm.score(["The capital of France is"] * 2, [" Paris.", " Banana."])
    assert good.total > bad.total + 3
    whole = llm.score(["The capital of France is Paris."])[0]
    tokens = llm.get_tokenizer().encode("The capital of France is Paris.")
    assert whole.token_ids == tokens[1:]
    assert whole.logprobs[-2:] == pytest.approx(good.logprobs, abs=1e-3)


def test_a_text_that_fills_the_context_is_scored(llm: LLM) -> None:
    text = {"prompt_token_ids": [100 + index % 50 for index in range(llm.info.max_len)]}
    (scored,) = llm.score([text])
    assert len(scored.logprobs) == llm.info.max_len - 1
    (out,) = llm.generate([text], SamplingParams(max_tokens=0))
    assert (out.outputs[0].token_ids, out.outputs[0].text, out.outputs[0].finish_reason) == ([], "", "length")


def test_beam_search_finds_what_greedy_does_not(llm: LLM) -> None:
    prompt = "The best thing about winter is"
    (out,) = llm.beam_search([prompt], BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True))
    assert len(out.sequences) == 4
    totals = [beam.cum_logprob for beam in out.sequences]
    assert totals == sorted(totals, reverse=True)
    best = out.sequences[0]
    text = llm.get_tokenizer().decode(best.tokens)
    assert text == best.text
    greedy = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0))[
        0
    ].outputs[0]
    assert greedy.cumulative_logprob is not None
    assert best.cum_logprob >= greedy.cumulative_logprob - 1e-3
    scored = llm.score([prompt], [text])[0]
    if scored.token_ids == best.tokens:
        assert scored.total == pytest.approx(best.cum_logprob, abs=1e-2)


# ── what is wrong with a request is said, and the next one works ──────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("prompt", "params", "error", "words"),
    [
        ("", GREEDY, EmptyPrompt, "at least one token"),
        ({"prompt_token_ids": []}, GREEDY, EmptyPrompt, "at least one token"),
        ("word " * 3000, GREEDY, PromptTooLong, "Shorten the prompt or raise max_len"),
        ("hi", SamplingParams(max_tokens=5000), PromptTooLong, "Lower max_tokens to 2,047"),
        ({"prompt_token_ids": [10**9]}, GREEDY, InvalidParams, "whole numbers from 0 to 49151"),
        ({"prompt_token_ids": [-1]}, GREEDY, InvalidParams, "prompt_token_ids holds -1"),
        ({"promt": "hi"}, GREEDY, UnknownField, "did you mean 'prompt'"),
        (42, GREEDY, InvalidParams, "A prompt is a string"),
        ("hi", SamplingParams(logit_bias={99999: 1.0}), InvalidParams, "logit_bias holds 99999"),
        ("hi", SamplingParams(allowed_token_ids=[99999]), InvalidParams, "allowed_token_ids"),
    ],
)
def test_bad_requests_are_refused_and_nothing_else_breaks(llm: LLM, prompt, params, error, words) -> None:
    with pytest.raises(error) as caught:
        llm.generate([prompt], params)
    assert words in str(caught.value)
    assert caught.value.status == 400
    assert "four" in llm.generate("One, two, three,", GREEDY)[0].outputs[0].text


def test_a_priority_that_nobody_would_heed_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidParams, match="set order='priority'"):
        llm.generate(["hi"], GREEDY, priority=[3])


def test_one_bad_prompt_among_many_is_refused_before_any_runs(llm: LLM) -> None:
    with pytest.raises(EmptyPrompt):
        llm.generate(["good", ""], GREEDY)
    assert not llm._client.engine.scheduler.has_work


def test_when_every_token_is_banned_only_that_request_ends_with_an_error(llm: LLM) -> None:
    token = llm.get_tokenizer().encode(" yes")[0]
    impossible = SamplingParams(max_tokens=4, allowed_token_ids=[token], bad_words=["yes"])
    bad, good = llm.generate(["Is it?", "One, two, three,"], [impossible, GREEDY])
    assert bad.outputs[0].finish_reason == "error"
    assert "Loosen the restrictions" in (bad.outputs[0].error or "")
    assert "four" in good.outputs[0].text


def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on(llm: LLM, monkeypatch, caplog) -> None:
    runner = llm._client.engine.runner
    with monkeypatch.context() as patch:
        patch.setattr(runner, "launch", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("out of luck")))
        (out,) = llm.generate("hi", GREEDY)
    assert out.outputs[0].finish_reason == "error"
    assert "out of luck" in (out.outputs[0].error or "")
    assert "four" in llm.generate("One, two, three,", GREEDY)[0].outputs[0].text


def test_a_gpu_that_is_lost_is_the_caller_s_to_know(llm: LLM, monkeypatch) -> None:
    """Not an error of the requests alone: an engine in a process of its own ends with it, and is started again."""
    engine = llm._client.engine

    def fail(*_: object, **__: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "launch", fail)
        patch.setattr(torch.cuda, "synchronize", fail)
        patch.setattr(engine, "info", replace(engine.info, device="cuda"))
        with pytest.raises(DeviceLost, match=r"^The GPU failed: CUDA error: an illegal .* encountered\. .* a new one"):
            llm.generate(["hi", "ho"], GREEDY)
    scheduler = engine.scheduler
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks


def test_ctrl_c_leaves_the_engine_usable(llm: LLM, monkeypatch) -> None:
    runner = llm._client.engine.runner
    with monkeypatch.context() as patch:
        patch.setattr(runner, "launch", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], GREEDY)
    scheduler = llm._client.engine.scheduler
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks
    assert "four" in llm.generate("One, two, three,", GREEDY)[0].outputs[0].text


@pytest.mark.parametrize("where", ["_admit", "_advance"])
def test_ctrl_c_in_planning_ends_what_is_open_and_leaves_the_pool_whole(llm: LLM, monkeypatch, where) -> None:
    scheduler = llm._client.engine.scheduler
    stream = llm.stream("Once upon a time", SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    original = getattr(scheduler, where)

    def interrupted(*args: object) -> None:
        original(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], GREEDY)
    assert [piece.outputs[0].finish_reason for piece in stream] == ["abort"]
    assert pool_is_whole(llm)
    assert "four" in llm.generate("One, two, three,", GREEDY)[0].outputs[0].text


def test_a_broken_template_is_an_error_of_its_own(llm: LLM) -> None:
    with pytest.raises(TemplateError):
        llm.chat(FRANCE, GREEDY, chat_template="{% for x in %}")


def test_an_unknown_model_and_an_unknown_option() -> None:
    with pytest.raises(ModelNotFound, match="smollm2:135m"):
        LLM("smollm2:136m")
    with pytest.raises(UnknownField, match="did you mean 'max_len'"):
        LLM(max_length=10)


def test_more_context_than_the_model_has_is_refused(default_model) -> None:
    with pytest.raises(InvalidParams, match="made for 8,192 tokens"):
        LLM(max_len=100_000)


def test_after_closing_it_says_so(default_model) -> None:
    llm = LLM(max_len=64, num_blocks=8)
    assert math.isfinite(llm.score(["One, two"])[0].total)
    llm.close()
    with pytest.raises(EngineClosed):
        llm.generate("hi", GREEDY)


def test_one_prompt_is_one_prompt_everywhere(llm: LLM) -> None:
    assert len(llm.score("One, two")) == 1
    assert len(llm.beam_search("One,", BeamSearchParams(beam_width=2, max_tokens=2))) == 1
    with pytest.raises(InvalidParams, match="prompts is 5"):
        llm.generate(5)  # type: ignore[arg-type]
