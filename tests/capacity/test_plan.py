"""Plans: the calculators by hand, against the simulator, against measured GPUs, and against engines that are built."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from quire.capacity.figures import Load, batch_figures, best_batch, prompt_steps, token_prices, tokens_per_verified_step
from quire.capacity.memory import engine_memory, kv_bytes_per_token, longest_request, request_blocks
from quire.capacity.model_size import ExpertSize, ModelSize
from quire.capacity.plan import PlannedEngine, plan_speed
from quire.capacity.profile import CapacityProfile, EngineSizes
from quire.capacity.roofline import Rates, Roofline, find_gpu, rates_of
from quire.capacity.simulator import Arrival, Simulation
from quire.capacity.step_cost import StepShape, decode_shape, prompt_shape
from quire.cli.main import main
from quire.config import EngineConfig
from quire.engine.client import InProcess
from quire.engine.sizing import measure_on_cpu
from quire.errors import InvalidParams
from tests.tools.tiny_models import FAMILIES, tiny_directory

pytestmark = pytest.mark.cpu

LAYER = 4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336  # of Llama-3-8B
LLAMA_8B = ModelSize(
    model="8b",
    weight_bytes=2 * (32 * LAYER + 2 * 128256 * 4096),
    read_bytes=2 * (32 * LAYER + 128256 * 4096),
    num_layers=32,
    num_values=32 * LAYER,
    head_values=128256 * 4096,
    windows=(None,),
    pair_flops=(4.0 * 4096 * 32,),
    block_bytes=16 * 2 * 2 * 1024 * 32,
    block_size=16,
    max_len=131072,
    vocab_size=128256,
    table_bytes=131072 * 512,
    row_bytes=100_000,
)
H200 = EngineSizes(50_000, 16, 8192, 512, 131072, (None,), row_unit=128, depth=2)
SMALL = replace(LLAMA_8B, block_bytes=160, block_size=4, max_len=100)


@pytest.mark.parametrize(
    ("batch", "context", "measured_ms"), [(1, 576, 3.856), (16, 576, 4.491), (64, 640, 5.865), (256, 576, 12.292)]
)
def test_decoding_on_a_gpu_is_as_measured(batch, context, measured_ms):
    cost = Roofline(LLAMA_8B, find_gpu("H200").rates())
    assert 1e3 * cost.seconds(decode_shape(batch, context, (None,))) == pytest.approx(measured_ms, rel=0.06)


@pytest.mark.parametrize(("count", "measured_ms"), [(2048, 43.4), (8192, 201.9), (16000, 459.0)])
def test_prompts_on_a_gpu_are_as_measured(count, measured_ms):
    cost = Roofline(LLAMA_8B, find_gpu("h200").rates())
    sizes = replace(H200, max_tokens_per_step=8192)
    assert 1e3 * batch_figures(cost, sizes, Load(count, 2), 1).ttft_s == pytest.approx(measured_ms, rel=0.06)


def test_a_step_is_bound_by_what_takes_longest():
    cost = Roofline(LLAMA_8B, Rates(1e12, 1e14, 1e14, step_s=1.0))
    assert cost.parts(decode_shape(1, 100, (None,))).bound == "host"
    quick = replace(cost, rates=replace(cost.rates, step_s=0.0))
    assert quick.parts(decode_shape(1, 100, (None,))).bound == "memory"
    assert quick.parts(prompt_shape(4096, 0, (None,))).bound == "compute"
    low, high = cost.range(decode_shape(1, 100, (None,)))
    assert low < cost.seconds(decode_shape(1, 100, (None,))) < high


def test_experts_are_read_as_far_as_tokens_choose_them():
    experts = ExpertSize(num_bytes=800, num_values=400, num_experts=8, top_k=2)
    size = replace(LLAMA_8B, read_bytes=100, num_values=10, head_values=5, experts=experts)
    assert size.weights_read(decode_shape(1, 1, (None,))) == pytest.approx(100 + 800 / 4)
    assert size.weights_read(decode_shape(64, 1, (None,))) == pytest.approx(900, rel=1e-4)
    assert size.product_flops(StepShape(3, 1, (0.0,), (0.0,))) == 2 * (10 * 3 + 5 + 400 / 4 * 3)


def test_the_rates_of_a_machine_are_found_in_its_steps():
    rates = Rates(2e11, 5e12, 5e12, step_s=1e-3, row_s=1e-5)
    sizes = replace(H200, max_tokens_per_step=512, max_requests=64, max_len=2048)
    found = rates_of(Roofline(LLAMA_8B, rates), LLAMA_8B, sizes, rates.step_s, rates.row_s)
    assert found.bytes_per_s == pytest.approx(rates.bytes_per_s, rel=0.02)
    assert found.flops_per_s == pytest.approx(rates.flops_per_s, rel=0.02)


def test_blocks_and_bytes_by_hand():
    assert kv_bytes_per_token(SMALL) == 40
    assert request_blocks(SMALL, 9, 16) == 3
    windowed = replace(SMALL, windows=(None, 8), pair_flops=(1.0, 1.0))
    assert kv_bytes_per_token(windowed) == 80
    assert request_blocks(windowed, 100, 5) == 25 + 4
    assert longest_request(SMALL, 7, 16) == 28
    assert longest_request(SMALL, 10**6, 16) == 100
    memory = engine_memory(SMALL, replace(H200, num_blocks=10, max_tokens_per_step=20, max_requests=3), 1000)
    assert memory.cache == 1600
    assert memory.activations == 20 * 100_000 + 4 * 128256 * 3
    assert memory.most == memory.idle + 1600


def test_a_batch_takes_as_long_as_in_the_simulator():
    """A steady load of answers of different lengths, one request after another: throughput agrees within 5%."""
    cost = Roofline(LLAMA_8B, find_gpu("h200").rates())
    sizes = replace(H200, max_requests=16, depth=1)
    load = Load(600, 100)
    figures = batch_figures(cost, sizes, load, 16)
    profile = CapacityProfile("m", "here", sizes, cost, 0.0, 0.0)
    outputs = [60 + 80 * (n * 7 % 16) // 15 for n in range(400)]  # 100 in the mean
    arrivals = [Arrival(0.0, list(range(n << 20, (n << 20) + 600)), count) for n, count in enumerate(outputs)]
    simulation = Simulation(profile)
    found = simulation.run(arrivals)
    assert sum(outputs) / simulation.now_s == pytest.approx(figures.output_tokens_per_s, rel=0.05)
    (alone,) = Simulation(profile).run(arrivals[:1])
    assert alone.ttft_s == pytest.approx(batch_figures(cost, sizes, load, 1).ttft_s, rel=0.01)
    assert len(found) == 400


def test_prompts_are_cut_into_chunks_beside_decoding_rows():
    steps = prompt_steps(Load(100, 20), 9, 48, (None,))
    assert [step.tokens for step in steps] == [48, 48, 28]
    assert [step.sampled for step in steps] == [8, 8, 9]
    assert all(step.keys == (8 * 110.0,) for step in steps)
    assert sum(step.pairs[0] for step in steps) == 100 * 101 / 2


def test_the_best_batch_is_the_smallest_that_is_nearly_fastest():
    cost = Roofline(LLAMA_8B, find_gpu("h200").rates())
    rows = [batch_figures(cost, H200, Load(512, 128), batch) for batch in (1, 8, 64, 256, 512)]
    best = best_batch(rows)
    assert best.output_tokens_per_s >= 0.95 * max(row.output_tokens_per_s for row in rows)
    assert all(row.output_tokens_per_s < 0.95 * rows[-1].output_tokens_per_s for row in rows if row.batch < best.batch)


def test_speculation_pays_where_rows_are_few():
    assert tokens_per_verified_step(0.5, 2) == 1.75
    cost = Roofline(LLAMA_8B, find_gpu("h200").rates())
    planned = PlannedEngine(LLAMA_8B, H200, cost, cost.rates)
    document = plan_speed(planned, Load(512, 128), acceptance=0.8, price_per_hour=3.6)
    gains = {row["batch"]: row for row in document["speculation"]}
    assert gains[1]["speedup"] > 2
    assert gains[1]["speedup"] > gains[256]["speedup"] >= 1
    none = plan_speed(planned, Load(512, 128), acceptance=0.0)
    assert {(row["speedup"], row["num_drafts"]) for row in none["speculation"]} == {(1.0, 0)}
    assert document["price"]["output"] > document["price"]["input"] > document["price"]["cached"] > 0


def test_prices_are_those_of_the_seconds():
    """Prompts and answers of a saturated engine together cost what its hours cost."""
    cost, load = Roofline(LLAMA_8B, find_gpu("h200").rates()), Load(512, 128)
    prices = token_prices(cost, H200, load, 64, 3600.0)
    figures = batch_figures(cost, H200, load, 64)
    of_request = (512 * prices.input + 128 * prices.output) / 1e6
    assert of_request * figures.requests_per_s == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_those_of_an_engine(tmp_path, family):
    """Weights, blocks and tables from headers, against the engine that is built."""
    tiny_directory(tmp_path, family)
    config = EngineConfig(model=str(tmp_path), device="cpu", num_blocks=64)
    size, sizes = measure_on_cpu(config, tmp_path)
    engine = InProcess(config, tmp_path).engine
    assert size.weight_bytes == engine.info.weight_bytes
    assert (size.block_bytes, sizes.num_blocks) == (engine.info.cache.block_bytes, engine.info.cache.num_blocks)
    assert sizes.windows == engine.scheduler.kv.windows
    assert (sizes.max_requests, sizes.max_tokens_per_step) == (
        engine.scheduler.max_requests,
        engine.scheduler.max_tokens_per_step,
    )
    assert sizes.max_len == engine.info.max_len
    is_tied = engine.info.config.tie_embeddings
    assert size.weight_bytes - size.read_bytes == (0 if is_tied else 96 * 64 * 4)
    assert size.head_values == 96 * 64
    per_layer = 64 * (64 + 2 * 32 + 64) + 3 * 64 * 96
    assert size.num_values == size.num_layers * per_layer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "h300"], "--gpu is 'h300'; give one of"),
        (["--prompt-tokens", "0"], "--prompt-tokens is 0"),
        (["--price", "-1"], "--price is -1"),
        (["--acceptance", "1.5"], "--acceptance is 1.5"),
        (["--gpu", "h200", "--profile", "x"], "leave one out"),
    ],
)
def test_what_cannot_be_planned_is_refused(monkeypatch, capsys, options, message):
    monkeypatch.setattr(sys, "argv", ["quire", "plan", *options])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--price", "--acceptance"])
def test_what_needs_the_speed_of_a_machine_is_refused_before_it_is_measured(monkeypatch, capsys, tmp_path, option):
    tiny_directory(tmp_path)
    monkeypatch.setattr(sys, "argv", ["quire", "plan", str(tmp_path), "--device", "cpu", option, "0.5"])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2
    assert f"{option} needs the speed" in capsys.readouterr().err


def test_the_command_prints_one_document(monkeypatch, capsys, tmp_path):
    tiny_directory(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["quire", "plan", str(tmp_path), "--gpu", "l40s", "--json", "--prompt-tokens", "50",
                      "--output-tokens", "20"],
    )  # fmt: skip
    main()
    document = json.loads(capsys.readouterr().out)
    assert document["origin"]["kind"] == "extrapolated"
    assert document["memory"]["longest_request"] == 128
    assert [row["batch"] for row in document["batches"]][:3] == [1, 2, 4]


def test_an_unknown_gpu_is_named():
    with pytest.raises(InvalidParams, match="h200"):
        find_gpu("gtx")
