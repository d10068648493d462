"""The command as a person or a script meets it: real processes, their output, their exit status."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire.cli.main import main
from quire.core.outputs import CompletionOutput, RequestOutput
from quire.core.params import SamplingParams
from tests.server.running import Running

pytestmark = pytest.mark.model

QUIRE = str(Path(sys.executable).parent / "quire")
SMALL = ["--max-len", "512", "--num-blocks", "64"]


def quire(*arguments: str, stdin: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [QUIRE, *arguments], input=stdin, capture_output=True, text=True, timeout=120, env=os.environ | variables
    )


def test_generate_prints_the_answer_on_stdout_and_the_rest_on_stderr(default_model) -> None:
    done = quire("generate", "-p", "One, two, three,", "--max-tokens", "8", "--temperature", "0", *SMALL)
    assert done.returncode == 0
    assert done.stdout.strip().startswith("four")
    assert "64 blocks of 16" in done.stderr


def test_generate_json_is_one_document(default_model) -> None:
    arguments = ["-p", "One, two,", "-p", "The sky is", "--max-tokens", "4", "--seed", "3", "--json", *SMALL]
    first, again = (quire("generate", *arguments) for _ in range(2))
    document = json.loads(first.stdout)
    assert [out["prompt"] for out in document["outputs"]] == ["One, two,", "The sky is"]
    for out in document["outputs"]:
        (answer,) = out["outputs"]
        assert len(answer["token_ids"]) == 4
        assert answer["finish_reason"] == "length"
    assert json.loads(again.stdout) == document


def test_generate_reads_the_prompt_from_a_pipe_and_can_use_the_template(default_model) -> None:
    done = quire("generate", "--chat", "--temperature", "0", "--max-tokens", "16", *SMALL, stdin="What is 2+2?")
    assert "4" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["generate", "nonsense-model", "-p", "hi"], 1, "smollm2:135m"),
        (["generate", "-p", "hi", "--temperature", "-1"], 2, "temperature is -1"),
        (["generate", "-p", "hi", "--temperature", "nan"], 2, "temperature is NaN"),
        (["generate", "-p", "hi", "-n", "0"], 2, "n is 0"),
        (["generate", "-p", "", *SMALL], 2, "prompt is empty"),
        (["generate", "-p", "hi", "--max-tokens", "100000", *SMALL], 2, "Lower max_tokens"),
        (["generate", "-p", "hi", "--block-size", "0"], 2, "block_size is 0"),
        (["generate", "-p", "hi", "--nope"], 2, "unrecognized arguments: --nope"),
        (["generate", "-p", "hi", "--max-len", "9999999"], 2, "made for 8,192"),
        (["bench", "offline", "--batch", "many"], 2, "whole numbers with commas"),
        (["pull", "nonsense-model"], 1, "smollm2:135m"),
        (["info", "/does/not/exist.gguf"], 1, "exist.gguf"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_wrong_is_said_in_one_line(default_model, arguments: list[str], status: int, words: str) -> None:
    done = quire(*arguments, COLUMNS="200")
    assert done.returncode == status
    assert done.stdout == ""
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_info(default_model) -> None:
    document = json.loads(quire("info", "--json").stdout)
    assert document["machine"]["amx"] in ("absent", "runs", "faults")
    assert document["machine"]["cores"] >= 1
    assert document["model"]["family"] == "llama"
    assert document["model"]["context"] == 8192
    assert document["machine"]["kernels"]
    if document["machine"]["kernels"].startswith("own"):
        assert 0.9 < document["model"]["packed_bytes"] / document["model"]["file_bytes"] < 1.1
        matrices = json.loads(quire("info", "--json", "--matrices").stdout)["matrices"]
        assert {row["panels"] for row in matrices} == {"q4_1", "q8_0"}
        assert sum(row["bytes"] for row in matrices) < document["model"]["packed_bytes"]
        assert "q4_1" in quire("info", "--matrices").stdout
    text = quire("info").stdout
    assert "amx" in text
    assert "instructions" in text


def test_models_and_pull(default_model) -> None:
    rows = {row["name"]: row for row in json.loads(quire("models", "--json").stdout)["models"]}
    default, gated = rows["smollm2:135m"], rows["llama3.2:1b"]
    assert (default["cached"], default["path"]) == (True, str(default_model))
    assert (default["estimated"], default["repository"]) == (False, None)
    assert (gated["gated"], gated["repository"]) == (True, "meta-llama/Llama-3.2-1B-Instruct")
    assert gated["size_bytes"] == gated["memory_bytes"] == 2 * 1_235_814_400
    text = quire("models").stdout
    assert "about 2.30 GiB" in text
    assert "hf auth login" in text
    done = quire("pull", "smollm2:135m")
    assert done.returncode == 0
    assert str(default_model) in done.stderr


def test_bench_offline_prints_the_agreed_document(default_model) -> None:
    done = quire(
        "bench", "offline", "--batch", "1,2", "--prompt-tokens", "8", "--output-tokens", "3", "--repeats", "1", "--json"
    )
    document = json.loads(done.stdout)
    agreed = {"machine", "model", "rows", "start_s"}
    assert set(document) == agreed | {"bench", "command", "engine", "quire", "time"}
    assert document["command"].startswith("quire bench offline --batch 1,2 ")
    assert [row["batch"] for row in document["rows"]] == [1, 2]
    for row in document["rows"]:
        assert set(row) == {
            "batch", "prompt_tokens", "output_tokens", "prefill_tokens_per_s", "decode_tokens_per_s", "ttft_ms",
            "tpot_ms", "total_s",
        }  # fmt: skip
        assert all(value > 0 for value in row.values())


@pytest.mark.parametrize(
    "command",
    [[], ["generate"], ["chat"], ["bench", "offline"], ["compare"], ["train-draft"], ["info"], ["pull"], ["models"]],
)
def test_help(command: list[str]) -> None:
    done = quire(*command, "--help", COLUMNS="100")
    assert done.returncode == 0
    assert "usage: quire" in done.stdout
    assert "Traceback" not in done.stderr


class Terminal:
    """A program on a terminal of its own, typed at and read from."""

    def __init__(self, *command: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        self.seen = ""

    def read_until(self, words: str, timeout_s: float = 20.0) -> str:
        """What appears from now on, up to and with `words`."""
        end = time.monotonic() + timeout_s
        while words not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{words!r} did not appear; this did: {self.seen!r}"
            self.seen += os.read(self.master, 4096).decode(errors="replace")
        before, self.seen = self.seen.split(words, 1)
        return before + words

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def wait(self) -> int:
        return self.process.wait(30)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


def test_a_conversation(default_model) -> None:
    with Terminal(QUIRE, "chat", "--temperature", "0", *SMALL) as terminal:
        terminal.read_until("Ctrl-D leaves.")
        terminal.read_until("> ")
        terminal.type("/help\n")
        assert "/reset" in terminal.read_until("Ctrl-C          stop the answer")
        terminal.read_until("> ")
        terminal.type("My name is Ada. Say hello.\n")
        terminal.read_until("Say hello.\r\n")
        answer = terminal.read_until("\n> ").removesuffix("\n> ").strip()
        assert len(answer) > 10
        terminal.type("/history\n")
        assert f"assistant: {answer}" in terminal.read_until("\n> ")
        terminal.type("Write a very long story about a dragon.\n")
        terminal.read_until("a dragon.\r\n")
        terminal.read_until(" ")
        terminal.interrupt()
        terminal.read_until("[stopped]")
        terminal.read_until("> ")
        terminal.type("/nonsense\n")
        terminal.read_until("There is no /nonsense")
        terminal.read_until("> ")
        terminal.type("/reset\n")
        terminal.read_until("> ")
        time.sleep(0.5)  # a signal between showing the prompt and waiting for a key is seen only with the next key
        terminal.interrupt()
        terminal.read_until("Ctrl-D or /exit leaves.")
        terminal.read_until("> ")
        terminal.type("What is 2 + 2?\n")
        terminal.read_until("2 + 2?\r\n")
        assert "4" in terminal.read_until("\n> ")
        terminal.type("/exit\n")
        assert terminal.wait() == 0


def test_ctrl_c_ends_generate_quietly(default_model) -> None:
    command = [QUIRE, "generate", "-p", "Once upon a time", "--max-tokens", "400", *SMALL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.read(5)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert "Traceback" not in process.stderr.read()


def test_a_reader_that_leaves_is_no_error(default_model) -> None:
    command = f"{QUIRE} generate -p 'Once upon a time' --max-tokens 60 {' '.join(SMALL)} | head -c 3"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert len(done.stdout) == 3
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_help_names_what_an_option_takes() -> None:
    said = quire("serve", "--help", COLUMNS="200").stdout
    for flag in ("--host HOST", "--port PORT", "--api-key-file FILE", "--request-timeout SECONDS", "--kv-memory GIB",
                 "--max-len N", "--max-body-bytes BYTES", "--cors-origins ORIGIN,..."):  # fmt: skip
        assert flag in said
    assert "$QUIRE_API_KEY" in said


@pytest.mark.server
def test_the_api_key_may_come_from_the_environment(default_model, monkeypatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "key-from-environment")
    with Running("--max-len", "64", "--kv-memory", "0.1") as running, running.client() as http:
        assert http.get("/v1/models").status_code == 401
        headers = {"authorization": "Bearer key-from-environment"}
        assert http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("options", [[], ["--json"], ["-n", "2"]])
def test_an_answer_that_failed_is_a_status(options: list[str], monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    failed = RequestOutput("0", "hi", [1], [CompletionOutput(0, "", [], finish_reason="error", error="It broke.")])

    class Failing:
        info = SimpleNamespace(summary="")

        def __init__(self, **config: object) -> None:
            pass

        def get_default_sampling_params(self) -> SamplingParams:
            return SamplingParams()

        def generate(self, *_: object) -> list[RequestOutput]:
            return [failed]

        def stream(self, *_: object) -> Iterator[RequestOutput]:
            yield failed

    monkeypatch.setattr("quire.llm.LLM", Failing)
    monkeypatch.setattr(sys, "argv", ["quire", "generate", "-p", "hi", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "It broke." in "".join(capsys.readouterr())
