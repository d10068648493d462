"""Speculation on one GPU with drafts that are right by chance: Llama-3-8B's shapes, bf16, random weights.

    python benchmarks/speculation_gpu.py [--batches 1,16,64,256] [--chances 0.78,0,0.3,0.6,0.9] [--drafts device|host]
                                         [--repeats N] [--exact] [--json FILE]

Each request has a known answer of random tokens, and sampling is made to give it. So acceptance does not depend on the
weights. With `--drafts device` an EAGLE-3 head with random weights runs behind each step that the controller chooses,
and is charged for in full. Its drafts are then replaced by guesses of the known answer, each right with the given
chance if the one before is. With `--drafts host` the same guesses come from a plug-in, and no head runs. The times
contain what forced answers and guesses cost, those of plain decoding too.

Plain decoding is another engine without speculation. Both are measured in turns. Times are those from the moment when
all requests have some tokens to that when the first has all, relative to the tokens in between.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gpu
import torch
from arguments import count
from safetensors.torch import save_file
from traffic import random_prompt

from quire.config import EngineConfig
from quire.core.drafts import Drafts
from quire.core.params import SamplingParams
from quire.core.plan import Plan
from quire.core.request import Request
from quire.engine.client import InProcess
from quire.engine.gpu_runner import GpuRunner, GpuStep
from quire.engine.observer import PlanObserver
from quire.engine.speculation import FREE_DRAFTS, MAX_DRAFTS, MAX_GPU_TOKENS
from quire.speculative.controller import Controller
from quire.speculative.drafting import DEPTHS, Drafting
from quire.speculative.proposer import Context

PROMPT, ANSWER = 512, 320
FIRST_TOKENS = 32  # of each answer, before it is measured
MAX_DEPTH = 8
VOCAB_SIZE = gpu.LLAMA_3_8B["vocab_size"]
DRAFT_VOCAB_SIZE = 32_000
GOALS = {1: 2.4, 16: 2.0, 64: 1.6, 256: 1.0}  # at a chance of 0.78
WORST = 0.98  # times plain decoding, at any chance


def write_head(directory: Path) -> Path:
    """An EAGLE-3 head in the shapes of those that are published for this model."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 1,
        "vocab_size": VOCAB_SIZE, "draft_vocab_size": DRAFT_VOCAB_SIZE, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
    }  # fmt: skip
    shapes = {
        "fc.weight": (4096, 12288), "midlayer.self_attn.q_proj.weight": (4096, 8192),
        "midlayer.self_attn.k_proj.weight": (1024, 8192), "midlayer.self_attn.v_proj.weight": (1024, 8192),
        "midlayer.self_attn.o_proj.weight": (4096, 4096), "midlayer.mlp.gate_proj.weight": (14336, 4096),
        "midlayer.mlp.up_proj.weight": (14336, 4096), "midlayer.mlp.down_proj.weight": (4096, 14336),
        "lm_head.weight": (DRAFT_VOCAB_SIZE, 4096), "midlayer.hidden_norm.weight": (4096,),
        "midlayer.input_layernorm.weight": (4096,), "midlayer.post_attention_layernorm.weight": (4096,),
        "norm.weight": (4096,),
    }  # fmt: skip
    tensors = {name: torch.randn(shape, dtype=torch.bfloat16) * 0.02 for name, shape in shapes.items()}
    tensors |= {name: torch.ones_like(tensor) for name, tensor in tensors.items() if "norm" in name}
    tensors["d2t"] = torch.zeros(DRAFT_VOCAB_SIZE, dtype=torch.int64)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


class Answers:
    """Known answers by request, and guesses of them, also as tables on the device: [requests, positions]."""

    def __init__(self, requests: Sequence[Request], chance: float, seed: int) -> None:
        rng, length = random.Random(seed), PROMPT + ANSWER + 2 * MAX_DEPTH
        self.index = {request.id: nth for nth, request in enumerate(requests)}
        self.tokens = [[rng.randrange(10, VOCAB_SIZE) for _ in range(length)] for _ in requests]
        self.guesses = [
            [token if rng.random() < chance else (token + 1) % VOCAB_SIZE for token in tokens] for tokens in self.tokens
        ]
        self.table, self.guess_table = (torch.tensor(each, device="cuda") for each in (self.tokens, self.guesses))
        self._rows: list[tuple[list[Request], torch.Tensor]] = []  # of the last steps

    def rows(self, requests: Sequence[Request]) -> torch.Tensor:
        """The rows of the tables."""
        for known, rows in self._rows:
            if known == requests:
                return rows
        numbers = torch.tensor([self.index[request.id] for request in requests])
        self._rows = [(list(requests), numbers.pin_memory().cuda(non_blocking=True)), *self._rows[:3]]
        return self._rows[0][1]


def force(runner: GpuRunner, answers: Answers) -> None:
    """Make the sampler give the known answers, and the drafter the guesses. Both run as they do otherwise."""
    sampler, drafter = runner.sampler, runner._drafter
    sample, draft = type(sampler).sample, type(runner).draft

    def sample_known(samples: Any, hidden: torch.Tensor) -> Any:
        output = sample(sampler, samples, hidden)
        number = len(samples)
        if number:
            lengths = runner.buffers.sample_lengths.view(number).long()
            output.tokens.copy_(answers.table[answers.rows(samples.requests), lengths])
            sampler.last_tokens[runner.buffers.sample_entries.view(number).long()] = output.tokens
        return output

    def draft_guesses(step: GpuStep) -> None:
        draft(runner, step)
        if step.plan.drafted and step.key is not None and drafter is not None:
            depth, number = max(step.plan.drafted.values()), len(step.plan)
            places = drafter._find_places(min(step.key.size, runner.max_rows), depth)
            rows, first = answers.rows(step.plan.requests), places.positions[0, :number] + 1
            for nth in range(depth):
                drafter.drafts[nth, places.entries[:number]] = answers.guess_table[rows, first + nth]

    sampler.sample = sample_known  # type: ignore[method-assign]
    runner.draft = draft_guesses  # type: ignore[method-assign]


class Guesser:
    """The guesses as a plug-in."""

    name = "guesser"

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def propose(self, contexts: Sequence[Context], max_drafts: Sequence[int]) -> list[Drafts | None]:
        found: list[Drafts | None] = []
        for context, most in zip(contexts, max_drafts, strict=True):
            guesses, first = self._answers.guesses[self._answers.index[context.request_id]], len(context.tokens)
            tokens = guesses[first : first + min(most, DEPTHS[-1])]
            found.append(Drafts(tokens, None, [0.7] * len(tokens)))
        return found

    def finish(self, request_id: str) -> None:
        pass

    def reset(self) -> None:
        pass


class Measured(NamedTuple):
    ms: float  # for each token of a request
    tokens: float  # of a request, for each step
    chosen: str  # drafts of a row, with their share of the steps


def measure(client: InProcess, batch: int, chance: float, drafts: str | None, seed: int) -> Measured:
    engine = client.engine
    runner = engine.runner
    assert isinstance(runner, GpuRunner)
    rng = random.Random(seed)
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    requests = [Request(f"{seed} {nth}", random_prompt(rng, PROMPT), params, max_tokens=ANSWER) for nth in range(batch)]
    answers = Answers(requests, chance, seed)
    force(runner, answers)
    if engine.controller is not None and drafts == "host":
        engine.controller.proposers[:] = [Guesser(answers)]
    chosen, steps = Counter[int](), list[Plan]()
    engine.observers.append(PlanObserver(steps.append))
    for request in requests:
        client.add(request)
    begin_s, begin_tokens, begin_steps = None, 0, 0
    while engine.has_work:
        client.step()
        done = [request.num_output for request in requests]
        if begin_s is None and min(done) >= FIRST_TOKENS:
            begin_s, begin_tokens, begin_steps = time.perf_counter(), sum(done), len(steps)
        if begin_s is not None and max(done) >= ANSWER - DEPTHS[-1]:
            break
    assert begin_s is not None
    seconds, tokens = time.perf_counter() - begin_s, sum(done) - begin_tokens
    for plan in steps[begin_steps:]:
        chosen[round(sum(map(len, plan.drafts.values())) / len(plan))] += 1
    for request in [*engine.scheduler.running]:
        client.abort(request.id)
    while engine.has_work:
        client.step()
    engine.observers.pop()
    total = chosen.total()
    shares = ", ".join(f"{number}: {100 * times / total:.0f}%" for number, times in sorted(chosen.items()))
    return Measured(1e3 * seconds * batch / tokens, tokens / batch / max(1, total), shares)


def capture_missed(client: InProcess) -> None:
    """Capture the steps that were served by larger graphs, as an engine does when it is idle."""
    runner = client.engine.runner
    assert isinstance(runner, GpuRunner)
    while any(runner.graphs._num_missed[key] for key in runner.graphs._pending):
        runner.idle(float("inf"))


def start(options: argparse.Namespace, folder: Path, speculate: str) -> InProcess:
    (folder / "config.json").write_text(json.dumps(gpu.LLAMA_3_8B))
    config = EngineConfig(
        model="llama-3-8b, random weights", device="cuda", weights="random", exact=options.exact, speculate=speculate,
        prefix_cache=False, max_len=4096, kv_memory=40.0, itl_target_ms=0.0, max_requests=256,
        max_tokens_per_step=8192,
    )  # fmt: skip
    client = InProcess(config, folder)
    print(client.info.summary, file=sys.stderr)
    return client


def make_controller(drafts: str) -> Controller:
    """As the engine makes it, but without drafts from repeated text."""
    drafting = Drafting("eagle", DEPTHS[-1]) if drafts == "device" else None
    return Controller(
        [], MAX_GPU_TOKENS, VOCAB_SIZE, FREE_DRAFTS["cuda"], max_drafts=MAX_DRAFTS["cuda"], is_pipelined=True,
        drafting=drafting,
    )  # fmt: skip


def compare(options: argparse.Namespace, plain: InProcess, guessing: InProcess) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for batch in options.batches:
        for chance in options.chances:
            guessing.engine.controller = make_controller(options.drafts)
            found: dict[str, list[Measured]] = {"plain": [], "guessing": []}
            for repeat in range(options.repeats + 1):  # the first captures steps, and the controller learns
                for name, client in (("plain", plain), ("guessing", guessing)):
                    seed = 1000 * batch + 10 * repeat + (name == "plain")
                    drafts = options.drafts if name == "guessing" else None
                    measured = measure(client, batch, chance, drafts, seed)
                    capture_missed(client)
                    found[name] += [measured] if repeat else []
            plain_ms, ms = (statistics.median(each.ms for each in found[name]) for name in found)
            last = found["guessing"][-1]
            row = {
                "batch": batch, "chance": chance, "plain_ms": plain_ms, "ms": ms, "tokens_a_step": last.tokens,
                "speed_up": plain_ms / ms, "goal": GOALS.get(batch, WORST) if chance == 0.78 else WORST,
                "drafts": last.chosen,
            }  # fmt: skip
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| batch | chance | plain, ms a token | ms a token | tokens a step | speed-up | goal | drafts a row |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['batch']} | {row['chance']} | {row['plain_ms']:.3f} | {row['ms']:.3f} "
            f"| {row['tokens_a_step']:.2f} | {row['speed_up']:.3f} | {row['goal']} | {row['drafts']} |"
        )
    return "\n".join(lines)


def numbers(text: str) -> list[Any]:
    return [json.loads(each) for each in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=numbers, default=[1, 16, 64, 256])
    parser.add_argument("--chances", type=numbers, default=[0.78, 0.0, 0.3, 0.6, 0.9])
    parser.add_argument("--drafts", choices=("device", "host"), default="device")
    parser.add_argument("--repeats", type=count, default=3)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use")
    with tempfile.TemporaryDirectory() as folder:
        speculate = f"eagle:{write_head(Path(folder) / 'head')}" if options.drafts == "device" else "suffix"
        plain, guessing = start(options, Path(folder), "off"), start(options, Path(folder), speculate)
    with torch.inference_mode():
        rows = compare(options, plain, guessing)
    if options.json:
        options.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}, indent=1) + "\n")
    print(f"{torch.cuda.get_device_name()}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
