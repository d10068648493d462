"""The families of `models/transformer.py` against transformers, from files that transformers writes, on every CPU
backend; and files that do not fit, which are refused with a name."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels import Fused, select_torch
from quire.models.config import ModelConfig
from quire.weights.loader import load_model
from tests.tools import family_gguf
from tests.tools.family_cases import CASES, LENGTH, VOCAB, expected_logits, reference, save
from tests.tools.native import NativePagedCache, RecordedOnTensors, kernels_of, ops_of
from tests.tools.paged import PagedCache

pytestmark = pytest.mark.cpu

TOLERANCE = 1e-3
STEPS = [[(0, 13), (1, 1)], [(1, 17), (0, 1)], [(0, 1), (1, 1)], [(0, 21), (1, 3)]]
TOKENS = torch.randint(3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def run(model: Any, cache: PagedCache, steps: list[list[tuple[int, int]]]) -> dict[int, Tensor]:
    """The logits of each sequence, computed in these steps."""
    found: dict[int, list[Tensor]] = {}
    for rows in steps:
        starts = {sequence: cache.lengths.get(sequence, 0) for sequence, _ in rows}
        paging = cache.step(rows)
        tokens = torch.cat([TOKENS[sequence, starts[sequence] :][:count] for sequence, count in rows])
        hidden = model(tokens, cache.positions(rows), paging, cache.layers)
        for (sequence, _), part in zip(rows, hidden.clone().split([count for _, count in rows]), strict=True):
            found.setdefault(sequence, []).append(part)
    return {sequence: torch.cat(parts) for sequence, parts in found.items()}


def layout(config: ModelConfig) -> dict[str, Any]:
    windows = sorted(set(config.windows), key=lambda window: window or 0)
    groups = [windows.index(window) for window in config.windows]
    return {"kv_heads": config.num_kv_heads, "head_dim": config.head_dim, "groups": groups, "windows": windows}


def assert_agrees(name: str, found: dict[int, Tensor]) -> None:
    for sequence, logits in found.items():
        expected = expected_logits(name, TOKENS[sequence, : len(logits)])
        assert expected.std() > 0.05
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Any:
    saved: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in saved:
            saved[name] = save(name, tmp_path_factory.mktemp("model"))
        return saved[name]

    return directory


def steps_of(name: str) -> list[list[tuple[int, int]]]:
    """Sequences stay below the length up to which Phi-3 uses its short factors, or transformers its long ones."""
    if name == "phi3-short":
        return [[(0, 13), (1, 1)], [(1, 5), (0, 1)]]
    return [[(0, 40), (1, 1)], [(1, 39), (0, 3)]] if name == "phi3-long" else STEPS


@pytest.mark.parametrize("name", CASES)
def test_torch_agrees_with_transformers(directories: Any, name: str) -> None:
    loaded = load_model(directories(name), dtype="float32", ops=select_torch("cpu"))
    assert not loaded.unused
    with torch.inference_mode():
        found = run(loaded.model, PagedCache(**layout(loaded.config)), steps_of(name))
        logits = {sequence: loaded.model.head(hidden) for sequence, hidden in found.items()}
    assert_agrees(name, logits)


@pytest.mark.parametrize("name", ["bloom", "cohere2", "gemma2", "gpt2", "granite", "olmo2", "phi"])
def test_bfloat16_is_as_good_as_that_of_transformers(directories: Any, name: str) -> None:
    loaded = load_model(directories(name), dtype="bfloat16", ops=select_torch("cpu"))
    with torch.inference_mode():
        cache = PagedCache(**layout(loaded.config), dtype=torch.bfloat16)
        ours = loaded.model.head(run(loaded.model, cache, [[(0, 40)]])[0])
        theirs = deepcopy(reference(name)).to(torch.bfloat16)(TOKENS[:1, :40], use_cache=False).logits[0].float()
    exact = expected_logits(name, TOKENS[0, :40])
    error, their_error = ((logits - exact).square().mean().sqrt() for logits in (ours, theirs))
    assert 0 < error < 1.25 * their_error


@pytest.mark.parametrize("name", ["gpt2", "bloom"])
def test_ops_that_rotate_are_not_called(directories: Any, name: str) -> None:
    """Where a backend has them: they would rotate, and take no slopes."""

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError

    ops = replace(select_torch("cpu"), fused=Fused(fail, fail, fail, fail))
    loaded = load_model(directories(name), dtype="float32", ops=ops)
    with torch.inference_mode():
        found = run(loaded.model, PagedCache(**layout(loaded.config)), STEPS)
    assert_agrees(name, {sequence: loaded.model.head(hidden) for sequence, hidden in found.items()})


@pytest.mark.parametrize("name", family_gguf.ARCHITECTURES)
def test_gguf_files_agree_with_transformers(tmp_path: Path, name: str) -> None:
    loaded = load_model(family_gguf.write(name, tmp_path / "model.gguf"), dtype="float32", ops=select_torch("cpu"))
    with torch.inference_mode():
        found = run(loaded.model, PagedCache(**layout(loaded.config)), steps_of(name))
        logits = {sequence: loaded.model.head(hidden) for sequence, hidden in found.items()}
    assert_agrees(name, logits)


@pytest.mark.parametrize("name", [name for name in CASES if "narrow" not in name])
def test_our_own_kernels_agree_with_transformers(directories: Any, name: str) -> None:
    ops = kernels_of()
    loaded = load_model(directories(name), dtype="float32", ops=ops)
    cache = NativePagedCache(ops_of(), "float32", **layout(loaded.config))
    found = run(RecordedOnTensors(ops, loaded.model, cache, 64), cache, steps_of(name))
    head = {sequence: torch.from_numpy(loaded.model.head(hidden.numpy())) for sequence, hidden in found.items()}
    assert_agrees(name, head)
