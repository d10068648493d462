"""Which ops an engine computes with, decided while it is built: what they cannot serve is said here, not in a request.

`engine.py` calls `choose_ops` once it knows the model's shape.
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
GPU_HEAD_DIMS = range(16, 257)  # a tensor core takes no less, and a program's registers hold no more
MIN_CAPABILITY = (8, 0)  # what Triton compiles for, and the first with bfloat16
MAX_REQUESTS = {"cpu": 64, "cuda": 512}
STEP_TOKENS = {"cpu": 192, "cuda": 8192}
ITL_TARGET_MS = {"cpu": 50.0, "cuda": 26.5}
PLAIN_GPU_STEP_TOKENS = 1024  # torch's attention keeps a score for every pair of tokens


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
    """Each running request computes a token a step."""
    fitting = min(MAX_REQUESTS[device.type], config.max_tokens_per_step or MAX_REQUESTS[device.type])
    return config.max_requests or fitting


def choose_step_tokens(wanted: int | None, max_requests: int, ops: Kernels) -> int:
    """So few that a prompt which arrives does not hold up the running requests for long, and enough for full speed."""
    is_plain_gpu = ops.device.type == "cuda" and ops.fused is None
    return wanted or max(PLAIN_GPU_STEP_TOKENS if is_plain_gpu else STEP_TOKENS[ops.device.type], max_requests)


def choose_itl_target(wanted_ms: float | None, device: torch.device) -> float | None:
    """Seconds between two tokens of an answer that prompts beside it are to leave it; None if they need not."""
    target_ms = ITL_TARGET_MS[device.type] if wanted_ms is None else wanted_ms
    return target_ms / 1000 or None


def choose_ops(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> Kernels:
    """Our own kernels where they are there and fit, else torch's; `config.kernels` may insist on either.

    Torch is left one thread beside our own: its threads and ours would wait for the same cores.
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
    """Our own kernels for a GPU; there is no way around what they cannot do but to ask for torch's."""
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
    reason = unfit(model, dtype, device)
    found = Missing(reason) if reason else find(isa.prepare(), config.threads)
    if isinstance(found, Native):
        return found
    if config.kernels == "native":
        raise UnsupportedModel(f"kernels is 'native', but {found.reason}. Use 'auto' or 'torch'.")
    if device.type == "cpu":
        log.warning("%s; torch's are used, several times slower.", found.reason)
    return None


def unfit(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why our own CPU kernels cannot serve a model, as a clause, or None if they can."""
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
    """What the cache holds: half precision beside our own kernels, which read it as fast as they can."""
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
    """Our own int8 or int4 for matrices stored plainly; a file that has none cannot be rounded."""
    if wanted == "none":
        return None
    if not any(stored.panel_format in DENSE_FORMATS for stored in weights if stored.cols is not None):
        raise InvalidParams(f"quantize is {wanted!r}, but the model's matrices are quantized already; leave it out.")
    return wanted


def describe_ops(ops: Kernels, dtype: torch.dtype) -> str:
    """What computes, in words: 'own kernels (avx512) on 2 threads', 'own kernels in bfloat16 on cuda', 'torch ...'."""
    if ops.native is not None:
        threads = ops.native.threads
        return f"own kernels ({ops.native.isa}) on {threads} thread{'s' if threads > 1 else ''}"
    whose = "torch" if ops.fused is None else "own kernels"
    return f"{whose} in {str(dtype).removeprefix('torch.')} on {ops.device.type}"
