"""Every bad value is refused by name, with the range that it may have."""

import math

import pytest

from quire.config import EngineConfig
from quire.core.params import SamplingParams
from quire.errors import InvalidParams, InvalidRequest, QuireError, UnknownField

pytestmark = pytest.mark.core

BAD = [
    {"n": 0},
    {"n": 1.5},
    {"n": True},
    {"n": 1000},
    {"temperature": -0.1},
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"temperature": "hot"},
    {"top_p": 0.0},
    {"top_p": 1.1},
    {"top_k": -1},
    {"min_p": -0.1},
    {"presence_penalty": 2.1},
    {"frequency_penalty": math.nan},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": 1e-300},
    {"max_tokens": -1},
    {"min_tokens": -1},
    {"min_tokens": 20, "max_tokens": 10},
    {"seed": 1.5},
    {"logprobs": -1},
    {"prompt_logprobs": 100_000},
    {"stop": ""},
    {"stop": ["ok", 3]},
    {"stop": ["x"] * 65},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": ["a"]},
    {"allowed_token_ids": []},
    {"logit_bias": {1: math.inf}},
    {"logit_bias": {-3: 1.0}},
    {"logit_bias": {5: "x"}},
    {"logit_bias": [1]},
    {"bad_words": [""]},
    {"bad_words": None},
    {"bad_words": ["x"] * 257},
    {"stop": 5},
    {"stop_token_ids": 3},
    {"stop_token_ids": "12"},
    {"allowed_token_ids": 5},
    {"stop_token_ids": list(range(17)), "use_beam_search": True, "temperature": 0.0},
    {"ignore_eos": 1},
]


@pytest.mark.parametrize("options", BAD, ids=repr)
def test_bad_values(options) -> None:
    with pytest.raises(InvalidParams) as caught:
        SamplingParams(**options)
    assert next(iter(options)) in str(caught.value)
    assert caught.value.param == next(iter(options))
    assert caught.value.status == 400


def test_an_unknown_field_is_named_with_the_one_that_was_meant() -> None:
    with pytest.raises(UnknownField, match=r"no field 'temprature': did you mean 'temperature'\?"):
        SamplingParams.of({"temprature": 1.0})
    with pytest.raises(UnknownField, match="EngineConfig has no field 'quantum'"):
        EngineConfig.of({"quantum": 1})


def test_good_values_are_kept_and_frozen() -> None:
    params = SamplingParams.of({"stop": "end", "stop_token_ids": [1, 2], "logit_bias": {3: 1}, "seed": 2**64 - 1})
    assert params.stop_strings == ("end",)
    assert params.stop_token_ids == (1, 2)
    assert params.logit_bias == {3: 1.0}
    with pytest.raises(AttributeError):
        params.n = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    "options",
    [
        {"max_requests": 0},
        {"max_tokens_per_step": 8, "max_requests": 9},
        {"block_size": -16},
        {"kv_memory": 0.0},
        {"kv_memory": math.nan},
        {"batch_wait": math.inf, "batching": "dynamic"},
        {"waiting_served_ratio": 0.5},
        {"max_waiting_tokens": 5, "batching": "static"},
        {"waiting_served_ratio": -1.0, "batching": "ratio"},
        {"batch_size": 4},
        {"batch_size": 4, "batching": "ratio"},
        {"batch_wait": 0.1, "batching": "static"},
        {"itl_target_ms": math.nan},
        {"itl_target_ms": "25"},
        {"itl_target_ms": [1]},
        {"itl_target_ms": True},
        {"itl_target_ms": 10**400},
        {"swap_memory": "8"},
        {"kv_memory": "8"},
        {"max_tokens_per_step": 2**64},
        {"max_waiting_tokens": 2**64, "batching": "ratio"},
        {"device": "tpu"},
        {"dtype": "int3"},
        {"batching": "psychic"},
        {"order": "random"},
        {"threads": 0},
        {"num_blocks": 2.5},
    ],
    ids=repr,
)
def test_bad_engine_options(options) -> None:
    with pytest.raises(InvalidParams):
        EngineConfig.of(options)


def test_every_error_has_a_status_and_a_place_in_the_tree() -> None:
    def walk(kind: type) -> list[type]:
        return [kind, *(deeper for child in kind.__subclasses__() for deeper in walk(child))]

    for kind in walk(QuireError):
        assert kind.__doc__
        assert (kind.status == 400) == issubclass(kind, InvalidRequest)


def test_more_threads_than_a_process_can_have_are_refused() -> None:
    with pytest.raises(InvalidParams, match="threads is 100,000; give at most 1,024"):
        EngineConfig(threads=100_000)


def test_a_width_that_is_too_large_is_told_apart_from_one_that_is_too_small() -> None:
    with pytest.raises(InvalidParams, match="width 65 is too wide"):
        SamplingParams(use_beam_search=True, temperature=0.0, best_of=65)
    with pytest.raises(InvalidParams, match="width 2 cannot return n = 3"):
        SamplingParams(use_beam_search=True, temperature=0.0, best_of=2, n=3)
