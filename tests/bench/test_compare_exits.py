"""`quire compare` with an early exit on one side."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quire.bench.compare import Exits, compare_models
from quire.config import EngineConfig
from quire.errors import InvalidParams
from quire.text.tokenizers.tokenizer import load_tokenizer
from quire.weights.heads import Target
from quire.weights.loader import load_model
from tests.bench.test_compare import TEXT, run_command
from tests.tools.exits import exit_config, exit_tensors
from tests.tools.heads import Tensors, write_head
from tests.tools.native import kernels_of
from tests.tools.tiny_models import tiny_text_gguf

pytestmark = pytest.mark.cpu

CALIBRATIONS = {"sure": [[0.0, 1.0]], "unsure": [[0.0, 0.5]], "rising": [[0.0, 0.0], [1.0, 1.0]]}


class Heads:
    """A model, and exit heads with the same random weights and other calibrations."""

    def __init__(self, directory: Path) -> None:
        self.model = str(tiny_text_gguf(directory / "model.gguf"))
        loaded = load_model(Path(self.model), dtype="float32", ops=kernels_of())
        self.directory = directory
        self.tensors: Tensors = {}
        for name, points in CALIBRATIONS.items():
            config = exit_config(Target(loaded.model, loaded.config), calibration=points)
            self.tensors = exit_tensors(config, loaded.config, 40)
            write_head(directory / name, config, self.tensors)

    def sides(self, name: str) -> tuple[EngineConfig, EngineConfig]:
        return EngineConfig(model=self.model), EngineConfig(model=self.model, exit_head=str(self.directory / name))


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    return Heads(tmp_path_factory.mktemp("heads"))


def test_nothing_exits_without_confidence(heads: Heads) -> None:
    found = compare_models(*heads.sides("unsure"), TEXT, window=60, early_exit=0.6)
    assert found.kl_max == 0
    assert found.exits_a is None
    assert found.exits_b == Exits(1, 0.6, 0.0, 0.0)


def test_all_tokens_exit_and_know_only_the_text_before_them(heads: Heads) -> None:
    found = compare_models(*heads.sides("sure"), TEXT, window=60, early_exit=0.999)
    tokens = load_tokenizer(Path(heads.model)).encode(TEXT, add_special_tokens=False)
    ids, unreachable, count = set(heads.tensors["draft_ids"].tolist()), 0, 0
    for start in range(0, len(tokens), 60):
        window = tokens[start : start + 60]
        count += len(window) - 1
        unreachable += sum(token not in ids.union(window[: place + 1]) for place, token in enumerate(window[1:]))
    assert found.num_tokens == count
    assert 0 < unreachable < count
    assert found.exits_b == Exits(1, 0.999, 1.0, unreachable / count)
    assert found.kl.mean > 0.1
    assert found.top1_agreement.mean < 0.9
    assert found.perplexity_b > found.perplexity_a


def test_a_higher_threshold_differs_less(heads: Heads) -> None:
    shares, kls = [], []
    for threshold in (0.01, 0.05, 0.2, 0.9):
        found = compare_models(*heads.sides("rising"), TEXT, window=60, early_exit=threshold)
        assert found.exits_b is not None
        shares.append(found.exits_b.share)
        kls.append(found.kl.mean)
    assert shares == sorted(shares, reverse=True)
    assert kls == sorted(kls, reverse=True)
    assert shares[0] > shares[-2] > shares[-1] == 0 or shares[0] > shares[1]


def test_the_command(heads: Heads, tmp_path: Path, capsys, monkeypatch) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    side = f"{heads.model} --exit-head {heads.directory / 'sure'}"
    options = ["--text", str(tmp_path / "text.txt"), "--window", "60", "--early-exit", "0.5"]
    status, out, _ = run_command(capsys, monkeypatch, heads.model, side, *options)
    assert status == 0
    assert "tokens of B that exit     100.00%, after 1 layers" in out
    _, out, _ = run_command(capsys, monkeypatch, heads.model, side, *options, "--json")
    document = json.loads(out)
    assert document["exits_a"] is None
    assert document["exits_b"]["share"] == 1.0


def test_a_head_that_gives_no_numbers_lets_nothing_exit(heads: Heads, tmp_path: Path) -> None:
    config = json.loads((heads.directory / "sure" / "config.json").read_text())
    for value in (3e38, -3e38):  # finite, so it is loaded; what it gives is not
        bad = {**heads.tensors, "out_norm.weight": np.full_like(heads.tensors["out_norm.weight"], value)}
        side = EngineConfig(model=heads.model, exit_head=str(write_head(tmp_path / "bad", config, bad)))
        found = compare_models(heads.sides("sure")[0], side, TEXT, window=60, early_exit=0.5)
        assert found.kl_max == 0
        assert found.exits_b == Exits(1, 0.5, 0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "early_exit", "words"),
    [("sure", None, "give --early-exit C"), (None, 0.5, "neither side"), ("sure", 1.0, "no exit is sure")],
)
def test_what_is_refused(heads: Heads, name: str | None, early_exit: float | None, words: str) -> None:
    a, b = heads.sides(name or "sure")
    with pytest.raises(InvalidParams, match=words):
        compare_models(a, a if name is None else b, TEXT, early_exit=early_exit)
