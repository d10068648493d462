"""Recorded traffic, and the prompts written for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.bench.serve.traces import TraceRequest, read_trace, slice_trace
from quire.bench.serve.workload import TOKEN_IDS, WORDS, PromptGenerator, TokenRatio, segments
from quire.errors import InvalidParams

pytestmark = pytest.mark.core

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "traces"
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
    "2023-11-16 18:16:00,91,16"
)


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, newline="")
    return path


def cut(entries: list[TraceRequest], **more) -> object:
    options = {"num_requests": None, "max_prompt_tokens": None, "max_output_tokens": None, "speed": 1.0}
    return slice_trace(entries, **{**options, **more})


class TestReading:
    def test_azure(self, tmp_path):
        entries = read_trace(write(tmp_path, AZURE))
        assert [(entry.prompt_tokens, entry.output_tokens, entry.blocks) for entry in entries] == [
            (374, 44, ()), (396, 109, ()), (91, 16, ())
        ]  # fmt: skip
        begin = entries[0].at_s
        assert [entry.at_s - begin for entry in entries] == pytest.approx([0.0, 4.314579, 13.31941], abs=1e-6)

    def test_azure_with_a_zone_and_out_of_order(self, tmp_path):
        rows = [
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "2024-05-10 00:00:01.5+00:00,1,2",
            "2024-05-10 00:00:00Z,3,4",
        ]
        entries = read_trace(write(tmp_path, "\n".join(rows)))
        assert [entry.prompt_tokens for entry in entries] == [3, 1]
        assert entries[1].at_s - entries[0].at_s == pytest.approx(1.5)

    def test_mooncake(self, tmp_path):
        rows = [
            {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
            {"timestamp": 2500, "input_length": 600, "output_length": 7, "hash_ids": [0, 3]},
        ]
        entries = read_trace(write(tmp_path, "\n".join(json.dumps(row) for row in rows) + "\n\n"))
        assert entries == [TraceRequest(0.0, 1100, 5, (0, 1, 2)), TraceRequest(2.5, 600, 7, (0, 3))]

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "neither"),
            ("a,b,c\n1,2,3", "neither"),
            ('{"timestamp": NaN, "input_length": 5, "output_length": 5, "hash_ids": [0]}', "line 1"),
            ('{"timestamp": Infinity, "input_length": 5, "output_length": 5, "hash_ids": [0]}', "line 1"),
            ('{"timestamp": 0, "input_length": 1e300, "output_length": 5, "hash_ids": []}', "line 1"),
            ('{"timestamp": 0, "input_length": Infinity, "output_length": 5, "hash_ids": []}', "line 1"),
            ('{"timestamp": 0, "input_length": 0, "output_length": 5, "hash_ids": []}', "line 1"),
            ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
            ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,x,4", "line 2"),
            ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,4", "line 2"),
            ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,4,4", "line 2"),
            ('{"timestamp": 0, "input_length": 4, "output_length": 5, "hash_ids": []}\n{"a"}', "line 2"),
            ('{"timestamp": 0, "input_length": 4, "output_length": 5}', "hash_ids"),
            ('{"timestamp": 0, "input_length": 0, "output_length": 5, "hash_ids": []}', "0 prompt tokens"),
        ],
    )
    def test_what_is_no_trace_is_said(self, tmp_path, text, words):
        with pytest.raises(InvalidParams, match=words):
            read_trace(write(tmp_path, text))

    def test_a_file_that_is_not_there(self, tmp_path):
        with pytest.raises(InvalidParams, match="cannot be read"):
            read_trace(tmp_path / "nothing")

    @pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published traces are not here")
    @pytest.mark.parametrize(
        ("name", "count", "tokens"),
        [
            ("AzureLLMInferenceTrace_code.csv", 8_819, None),
            ("AzureLLMInferenceTrace_conv.csv", 19_366, None),
            ("mooncake_conversation.jsonl", 12_031, 512),
        ],
    )
    def test_published_traces(self, name, count, tokens):
        entries = read_trace(PUBLISHED / name)
        assert len(entries) == count
        if tokens:
            assert all(-(-entry.prompt_tokens // tokens) == len(entry.blocks) for entry in entries)


ENTRIES = [
    TraceRequest(10.0, 900, 5),
    TraceRequest(12.0, 100, 50),
    TraceRequest(13.0, 100, 0),
    TraceRequest(16.0, 200, 9),
    TraceRequest(20.0, 50, 9),
]


class TestExcerpts:
    def test_everything(self):
        part = cut(ENTRIES)
        assert [entry.at_s for entry in part.entries] == [0.0, 2.0, 6.0, 10.0]
        assert (part.num_read, part.num_too_long, part.num_shortened, part.num_empty) == (5, 0, 0, 1)

    def test_limits_and_speed(self):
        part = cut(ENTRIES, num_requests=2, max_prompt_tokens=200, max_output_tokens=8, speed=4.0)
        assert part.entries == [TraceRequest(0.0, 100, 8), TraceRequest(1.0, 200, 8)]
        assert (part.num_read, part.num_too_long, part.num_shortened, part.num_empty) == (4, 1, 2, 1)

    def test_nothing_fits(self):
        with pytest.raises(InvalidParams, match="5 have prompts longer than --max-prompt-tokens 10"):
            cut(ENTRIES, max_prompt_tokens=10)


class TestPrompts:
    def test_words_are_random_seeded_and_unlike(self):
        writer = PromptGenerator(1)
        prompts = [writer.words(f"request {number}", 115) for number in range(300)]
        assert all(len(prompt.split()) == 115 for prompt in prompts)
        assert len({" ".join(prompt.split()[:4]) for prompt in prompts}) == 300
        assert PromptGenerator(1).words("request 7", 115) == prompts[7]
        assert PromptGenerator(2).words("request 7", 115) != prompts[7]
        assert len(set(WORDS)) == len(WORDS)

    def test_token_ids_have_the_exact_number(self):
        ids = PromptGenerator(1).token_ids("request 0", 777)
        assert len(ids) == 777
        assert set(ids) <= set(TOKEN_IDS)

    @pytest.mark.parametrize("ratio", [TokenRatio(0.0, 1.0), TokenRatio(12.0, 1.37), TokenRatio(1.0, 3.0)])
    def test_shared_blocks_are_shared_text_and_nothing_else_is(self, ratio):
        writer = PromptGenerator(3)
        first = writer.trace_words("a", TraceRequest(0, 1200, 1, (0, 1, 2)), ratio).split()
        other = writer.trace_words("b", TraceRequest(0, 1500, 1, (0, 1, 9)), ratio).split()
        shared = round(2 * 512 / ratio.per_word)
        assert first[:shared] == other[:shared]
        assert first[shared : shared + 8] != other[shared : shared + 8]
        again = writer.trace_words("c", TraceRequest(0, 1300, 1, (0, 1, 2)), ratio).split()
        assert again[: len(first)] == first

    def test_shared_blocks_as_ids(self):
        writer = PromptGenerator(3)
        first = writer.trace_ids("a", TraceRequest(0, 1200, 1, (0, 1, 2)))
        other = writer.trace_ids("b", TraceRequest(0, 700, 1, (0, 1)))
        assert (len(first), len(other)) == (1200, 700)
        assert other == first[:700]
        assert len(writer.trace_ids("c", TraceRequest(0, 700, 1))) == 700

    def test_what_blocks_do_not_cover_is_the_requests_own(self):
        assert segments("r", [7, 8], 1100, 512) == [("block 7", 512), ("block 8", 512), ("r", 76)]
        assert segments("r", [7, 8, 9], 600, 512) == [("block 7", 512), ("block 8", 88)]
        assert segments("r", [], 5, 512) == [("r", 5)]

    def test_a_ratio_meets_lengths(self):
        ratio = TokenRatio.from_two((50, 103), (550, 1103))
        assert ratio == TokenRatio(3.0, 2.0)
        assert 3 + 2 * ratio.words(1001) == 1001
        assert ratio.words(1) == 1


def test_burst_gpt_is_read(tmp_path):
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,100,0,100,API log\n"
    )
    assert [(entry.at_s, entry.prompt_tokens, entry.output_tokens) for entry in read_trace(path)] == [
        (5.0, 472, 18), (45.5, 100, 0),
    ]  # fmt: skip
