"""Choice of device, dtype and kernels. Raises for models and options that the kernels do not support.

`build.py` calls this while it builds an engine.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from quire.config import EngineConfig
from quire.errors import EngineError, InvalidParams, UnsupportedModel
from quire.kernels import Kernels, isa, select
from quire.kernels.cpu.native import Missing, Native, find
from quire.kernels.cpu.tape import DENSE_FORMATS
from quire.models.config import ModelConfig
from quire.weights.checkpoint import StoredPart

log = logging.getLogger("quire.engine")

MAX_HEAD_DIM = 256
HEAD_DIM_UNIT = 16
GPU_HEAD_DIMS = range(16, 257)  # from the minimum of a tensor core to the maximum of a program's registers
MIN_CAPABILITY = (8, 0)  # the minimum of Triton, and the first with bfloat16
MAX_REQUESTS = {"cpu": 64, "cuda": 512}
STEP_TOKENS = {"cpu": 192, "cuda": 8192}
ITL_TARGET_MS = {"cpu": 50.0, "cuda": 26.5}
PLAIN_GPU_STEP_TOKENS = 1024  # torch's attention stores a score for every pair of tokens


def choose_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidParams("device is 'cuda', but torch sees no GPU; use 'cpu' or 'auto'.")
    return torch.device(device)


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto" and device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= MIN_CAPABILITY else torch.float16
    if dtype == "auto":
        return torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]


def choose_max_requests(config: EngineConfig, device: torch.device) -> int:
    """At most `max_tokens_per_step`: each running request computes a token a step."""
    fitting = min(MAX_REQUESTS[device.type], config.max_tokens_per_step or MAX_REQUESTS[device.type])
    return config.max_requests or fitting


def choose_step_tokens(wanted: int | None, max_requests: int, ops: Kernels) -> int:
    """Small enough that a prompt does not delay running requests for long, and large enough for full throughput."""
    is_plain_gpu = ops.device.type == "cuda" and ops.fused is None
    return wanted or max(PLAIN_GPU_STEP_TOKENS if is_plain_gpu else STEP_TOKENS[ops.device.type], max_requests)


def choose_itl_target(wanted_ms: float | None, device: torch.device) -> float | None:
    """The target for the seconds between two tokens (inter-token latency). None is no target."""
    target_ms = ITL_TARGET_MS[device.type] if wanted_ms is None else wanted_ms
    return target_ms / 1000 or None


def choose_ops(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> Kernels:
    """Quire's own kernels if they are built and support the model, else torch's. `config.kernels` may require either.

    Beside quire's CPU kernels torch has one thread, because both would use the same cores.
    """
    if device.type == "cuda" and config.threads is not None:
        raise InvalidParams(
            f"threads is {config.threads}, but the model runs on a GPU, where no CPU threads compute; leave it out, or "
            "set device to 'cpu'."
        )
    native = find_native(config, model, dtype, device)
    if native is not None:
        torch.set_num_threads(1)
    elif device.type == "cpu":
        torch.set_num_threads(config.threads or isa.prepare().cores)
    if native is None and config.quantize != "none":
        raise InvalidParams(f"quantize is {config.quantize!r}, which needs quire's own CPU kernels; leave it out.")
    if device.type == "cuda" and config.kernels != "torch":
        return select_on_gpu(model, device, config.exact)
    if config.exact and native is None:
        raise InvalidParams(
            "exact needs quire's own kernels, and torch's are used here: their products differ in the last bit with "
            "the number of rows. Leave exact out, or set kernels to 'auto' where quire's own are built."
        )
    return select(device, native, plain=config.kernels == "torch")


def select_on_gpu(model: ModelConfig, device: torch.device, exact: bool) -> Kernels:
    """Quire's GPU kernels. Raises if they do not support the GPU or the model."""
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        raise UnsupportedModel(
            f"quire's own GPU kernels need a compute capability of {_version(MIN_CAPABILITY)}, and this GPU has "
            f"{_version(capability)}. Set kernels to 'torch', which is slower."
        )
    if model.head_dim not in GPU_HEAD_DIMS:
        raise UnsupportedModel(
            f"quire's own GPU kernels need heads of {GPU_HEAD_DIMS[0]} to {GPU_HEAD_DIMS[-1]} dimensions, and this "
            f"model's have {model.head_dim}. Set kernels to 'torch', which is slower."
        )
    try:
        return select(device, exact=exact)
    except ImportError as error:
        raise EngineError(
            f"quire's own GPU kernels need the package triton, which cannot be used here: {error}. Install the version "
            "that belongs to this torch, or set kernels to 'torch', which is slower."
        ) from error


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def find_native(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> Native | None:
    if config.kernels == "torch":
        return None
    reason = find_obstacle(model, dtype, device)
    found = Missing(reason) if reason else find(isa.prepare(), config.threads)
    if isinstance(found, Native):
        return found
    if config.kernels == "native":
        raise UnsupportedModel(f"kernels is 'native', but {found.reason}. Use 'auto' or 'torch'.")
    if device.type == "cpu":
        log.warning("%s; torch's are used, several times slower.", found.reason)
    return None


def find_obstacle(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why quire's CPU kernels do not support a model, as a clause; None if they do."""
    if device.type != "cpu":
        return f"quire's own CPU kernels do not run on {device.type}"
    if dtype != torch.float32:
        name = str(dtype).removeprefix("torch.")
        return f"quire's own CPU kernels compute in float32, not in {name}"
    if model.head_dim % HEAD_DIM_UNIT or model.head_dim > MAX_HEAD_DIM:
        return (
            f"quire's own CPU kernels need heads of a multiple of {HEAD_DIM_UNIT} dimensions, at most {MAX_HEAD_DIM}, "
            f"and this model's have {model.head_dim}"
        )
    return None


def choose_kv_dtype(wanted: str, dtype: torch.dtype, ops: Kernels) -> str:
    """The cache's dtype. `auto` is bfloat16 with quire's CPU kernels, and the model's dtype otherwise."""
    name = str(dtype).removeprefix("torch.")
    if wanted == "auto":
        return "bfloat16" if ops.native else name
    if wanted == "int8" and ops.native is None:
        raise InvalidParams("kv_dtype is 'int8', which needs quire's own CPU kernels; use 'float32' or 'bfloat16'.")
    if wanted == "fp8" and ops.fused is None:
        raise InvalidParams("kv_dtype is 'fp8', which needs quire's own GPU kernels; use 'float32' or 'bfloat16'.")
    if wanted == "float16" and ops.native is not None:
        raise InvalidParams("kv_dtype is 'float16', which quire's own CPU kernels lack; use 'bfloat16' or 'float32'.")
    return wanted


def choose_quantize(wanted: str, weights: Sequence[StoredPart]) -> str | None:
    """int8 or int4 for matrices that are stored in full precision. Raises if the file has none."""
    if wanted == "none":
        return None
    if not any(stored.panel_format in DENSE_FORMATS for stored in weights if stored.cols is not None):
        raise InvalidParams(f"quantize is {wanted!r}, but the model's matrices are quantized already; leave it out.")
    return wanted


def describe_ops(ops: Kernels, dtype: torch.dtype) -> str:
    """For the summary: 'own kernels (avx512) on 2 threads', 'own kernels in bfloat16 on cuda', 'torch ...'."""
    if ops.native is not None:
        threads = ops.native.threads
        return f"own kernels ({ops.native.isa}) on {threads} thread{'s' if threads > 1 else ''}"
    whose = "torch" if ops.fused is None else "own kernels"
    return f"{whose} in {str(dtype).removeprefix('torch.')} on {ops.device.type}"
