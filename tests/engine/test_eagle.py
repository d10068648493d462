"""EAGLE heads: what they compute against plain torch, and that answers with them are those without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.engine.speculation import LoadedHead
from quire.speculative.suffix import SuffixProposer
from quire.weights.eagle import load_eagle
from quire.weights.heads import Target
from tests.engine.test_speculation import CONFIGS, ENGINES, MODELS, OPS, make_engine, make_requests, run
from tests.tools.eagle import KINDS, eagle_config, eagle_tensors
from tests.tools.heads import build_engine, write_head

pytestmark = pytest.mark.cpu


def make_head(kind: str, family: str, directory: Path, seed: int = 0) -> tuple[dict[str, LoadedHead], dict[str, Any]]:
    """A head with random weights, loaded from its files, and its tensors."""
    target = Target(MODELS[family], CONFIGS[family])
    config = eagle_config(kind, target)
    tensors = eagle_tensors(kind, config, target.config, seed)
    return {"eagle": load_eagle(write_head(directory, config, tensors), target, OPS)}, tensors


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", ENGINES)
def test_answers_are_the_same(kind: str, family: str, settings: str, tmp_path: Path) -> None:
    """Greedy, sampled, grammars, n, log probabilities, penalties, prefix hits and preemption, in batches of 7."""
    config, count = CONFIGS[family], 27
    heads, _ = make_head(kind, family, tmp_path)
    kv_dtype = {name: value for name, value in ENGINES[settings].items() if name == "kv_dtype"}
    expected = run(make_engine(config, 32, kv_dtype), make_requests(11, count))
    for batch, proposers in ((7, []), (7, [SuffixProposer()]), (1, [])):
        engine, models = build_engine(
            config, MODELS[family], OPS, heads, list(proposers), max_requests=batch, **ENGINES[settings]
        )
        found = run(engine, make_requests(11, count))
        assert found == expected
        assert engine.controller is not None
        assert engine.controller.models == models, "the head failed"
        assert engine.controller.drafted["eagle"] > 50
