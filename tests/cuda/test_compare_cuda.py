"""`quire compare` on a GPU: the same numbers as on a CPU, and none between a model and itself."""

from __future__ import annotations

import pytest

from tests.cuda.gpu import DEVICE  # skips this module where there is no GPU

from quire.bench.compare import compare_models  # isort: skip
from quire.config import EngineConfig
from tests.tools.tiny_models import tiny_text_gguf

pytestmark = pytest.mark.cuda

TEXT = "hello world, hello 12 worlds; the quick brown fox says hello again and again. " * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_text_gguf(tmp_path_factory.mktemp("model") / "model.gguf"))


def test_a_model_does_not_differ_from_itself(model: str) -> None:
    config = EngineConfig(model=model, device=DEVICE.type)
    found = compare_models(config, config, TEXT, window=100)
    assert (found.kl.mean, found.kl_max, found.top1_agreement.mean) == (0.0, 0.0, 1.0)


def test_in_float32_it_is_near_the_cpu(model: str) -> None:
    on_gpu = EngineConfig(model=model, device=DEVICE.type, dtype="float32")
    on_cpu = EngineConfig(model=model, device="cpu", kernels="torch", kv_dtype="float32")
    found = compare_models(on_cpu, on_gpu, TEXT, window=100)
    rounded = compare_models(on_cpu, EngineConfig(model=model, device=DEVICE.type, dtype="bfloat16"), TEXT, window=100)
    assert found.kl_max < 1e-6
    assert found.kl.mean < rounded.kl.mean < 1e-2
