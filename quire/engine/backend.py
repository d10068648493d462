"""Choice of device, dtype and kernels. Raises for models and options that the kernels do not support.

`build.py` calls this while it builds an engine.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from quire.config import EngineConfig
from quire.errors import EngineError, InvalidParams, UnsupportedModel
from quire.kernels import Kernels, isa, select_native, select_torch
from quire.kernels.cpu.native import DENSE_FORMATS, Missing, Native, find
from quire.kernels.cuda_driver import find_capability
from quire.models.config import ExpertsConfig, LatentConfig, ModelConfig
from quire.weights.checkpoint import StoredPart

log = logging.getLogger("quire.engine")

INSTALL_TORCH = "Install it with: pip install 'quire[torch]'"


class LatentSize(NamedTuple):
    rank: int
    rotated: int


MAX_HEAD_DIM = 512
MAX_LATENT_DIM = 576
HEAD_DIM_UNIT = 16
EXPERT_UNIT = 32
MAX_GPU_LATENT = LatentSize(512, 64)  # the room of a program in shared memory and registers
GPU_HEAD_DIMS = range(16, 257)  # from the minimum of a tensor core to the maximum of a program's registers
MIN_CAPABILITY = (8, 0)  # the minimum of Triton, and the first with bfloat16
MAX_REQUESTS = {"cpu": 64, "cuda": 512}
STEP_TOKENS = {"cpu": 192, "cuda": 8192}
ITL_TARGET_MS = {"cpu": 50.0, "cuda": 26.5}
PLAIN_GPU_STEP_TOKENS = 1024  # torch's attention stores a score for every pair of tokens


def choose_device(device: str) -> str:
    """cpu or cuda. torch is imported only if the driver has a GPU, or if the configuration asks for one."""
    if device == "cpu" or (device == "auto" and find_capability() is None):
        return "cpu"
    if not is_installed("torch"):
        if device == "auto":
            log.warning("There is a GPU, but torch is not installed, so the CPU is used. %s", INSTALL_TORCH)
            return "cpu"
        raise InvalidParams(f"device is 'cuda', which needs torch, and torch is not installed. {INSTALL_TORCH}")
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if device == "auto":
        return "cpu"
    raise InvalidParams("device is 'cuda', but torch sees no GPU; use 'cpu' or 'auto'.")


def is_installed(package: str) -> bool:
    """Whether it can be imported. A package that is there and broken is not installed; the log has its error."""
    if package in sys.modules:
        return sys.modules[package] is not None
    if find_spec(package) is None:
        return False
    try:
        import_module(package)
    except (ImportError, OSError) as error:
        log.warning("%s is there, but it cannot be imported: %s", package, error)
        return False
    return True


def choose_dtype(dtype: str, device: str) -> str:
    if dtype != "auto":
        return dtype
    if device != "cuda":
        return "float32"
    import torch

    return "bfloat16" if torch.cuda.get_device_capability() >= MIN_CAPABILITY else "float16"


def choose_max_requests(config: EngineConfig, device: str) -> int:
    """At most `max_tokens_per_step`: each running request computes a token a step."""
    fitting = min(MAX_REQUESTS[device], config.max_tokens_per_step or MAX_REQUESTS[device])
    return config.max_requests or fitting


def choose_step_tokens(wanted: int | None, max_requests: int, ops: Kernels) -> int:
    """Small enough that a prompt does not delay running requests for long, and large enough for full throughput."""
    is_plain_gpu = ops.device == "cuda" and ops.fused is None
    return wanted or max(PLAIN_GPU_STEP_TOKENS if is_plain_gpu else STEP_TOKENS[ops.device], max_requests)


def choose_itl_target(wanted_ms: float | None, device: str) -> float | None:
    """The target for the seconds between two tokens (inter-token latency). None is no target."""
    target_ms = ITL_TARGET_MS[device] if wanted_ms is None else wanted_ms
    return target_ms / 1000 or None


def choose_ops(config: EngineConfig, model: ModelConfig, dtype: str, device: str) -> Kernels:
    """quire's own kernels if they are built and support the model, else torch's. `config.kernels` may name one."""
    if device == "cuda" and config.threads is not None:
        raise InvalidParams(
            f"threads is {config.threads}, but the model runs on a GPU, where no CPU threads compute; leave it out, or "
            "set device to 'cpu'."
        )
    found = find_native(config, model, dtype, device)
    if isinstance(found, Native):
        if config.quantize in ("fp8", "nf4"):
            raise InvalidParams(f"quantize is {config.quantize!r}, which needs a GPU; on a CPU use 'int8' or 'int4'.")
        return select_native(found)
    if config.quantize != "none" and (device != "cuda" or config.kernels == "torch" or dtype == "float32"):
        raise InvalidParams(
            f"quantize is {config.quantize!r}, which needs quire's own kernels, and on a GPU bfloat16 or float16; "
            "leave it out."
        )
    if device == "cuda" and config.kernels != "torch":
        return select_on_gpu(model, device, config.exact)
    if config.exact:
        raise InvalidParams(
            "exact needs quire's own kernels, and torch's are used here: their products differ in the last bit with "
            "the number of rows. Leave exact out, or set kernels to 'auto' where quire's own are built."
        )
    return select_torch_ops(config, device, found.reason)


def select_torch_ops(config: EngineConfig, device: str, reason: str) -> Kernels:
    """torch's ops. `reason` is why quire's own kernels are not used, as a clause."""
    if not is_installed("torch"):
        raise UnsupportedModel(f"torch is needed, because {reason}, and it is not installed. {INSTALL_TORCH}")
    import torch

    if device == "cpu":
        torch.set_num_threads(config.threads or isa.prepare().cores)
        if config.kernels != "torch":
            log.warning("%s; torch's are used, several times slower.", reason)
    return select_torch(device, plain=config.kernels == "torch")


def select_on_gpu(model: ModelConfig, device: str, exact: bool) -> Kernels:
    """Quire's GPU kernels. Raises if they do not support the GPU or the model."""
    import torch

    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        raise UnsupportedModel(
            f"quire's own GPU kernels need a compute capability of {_version(MIN_CAPABILITY)}, and this GPU has "
            f"{_version(capability)}. Set kernels to 'torch', which is slower."
        )
    if model.latent is not None:
        check_gpu_latent(model.latent)
    elif odd := [dim for dim in sorted(model.head_dims) if dim not in GPU_HEAD_DIMS]:
        raise UnsupportedModel(
            f"quire's own GPU kernels need heads of {GPU_HEAD_DIMS[0]} to {GPU_HEAD_DIMS[-1]} dimensions, and this "
            f"model's have {odd[0]}. Set kernels to 'torch', which is slower."
        )
    try:
        return select_torch(device, exact=exact)
    except ImportError as error:
        raise EngineError(
            f"quire's own GPU kernels need the package triton, which cannot be used here: {error}. Install the version "
            "that belongs to this torch, or set kernels to 'torch', which is slower."
        ) from error


def check_gpu_latent(latent: LatentConfig) -> None:
    """Raise for latents that quire's GPU kernels do not support."""
    if latent.rank > MAX_GPU_LATENT.rank or latent.rotated_dim > MAX_GPU_LATENT.rotated:
        raise UnsupportedModel(
            f"quire's own GPU kernels need latents of at most {MAX_GPU_LATENT.rank} + {MAX_GPU_LATENT.rotated} "
            f"dimensions, and this model's have {latent.rank} + {latent.rotated_dim}. Set kernels to 'torch', which is "
            "slower."
        )


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def find_native(config: EngineConfig, model: ModelConfig, dtype: str, device: str) -> Native | Missing:
    """quire's CPU kernels, or why they are not used."""
    if config.kernels == "torch":
        return Missing("kernels is 'torch'")
    reason = find_obstacle(model, dtype, device)
    found = Missing(reason) if reason else find(isa.prepare(), config.threads)
    if isinstance(found, Missing) and config.kernels == "native":
        raise UnsupportedModel(f"kernels is 'native', but {found.reason}. Use 'auto' or 'torch'.")
    return found


def find_obstacle(model: ModelConfig, dtype: str, device: str) -> str | None:
    """Why quire's CPU kernels do not support a model, as a clause; None if they do."""
    if device != "cpu":
        return f"quire's own CPU kernels do not run on {device}"
    if dtype != "float32":
        return f"quire's own CPU kernels compute in float32, not in {dtype}"
    if model.experts is not None and (size := find_odd_size(model, model.experts)):
        return f"quire's own CPU kernels need experts of multiples of {EXPERT_UNIT}, and this model's have {size}"
    if model.latent is not None:
        return find_latent_obstacle(model.latent)
    return next(filter(None, (find_head_obstacle(dim, "model") for dim in sorted(model.head_dims))), None)


def find_odd_size(model: ModelConfig, experts: ExpertsConfig) -> int | None:
    """A size of the experts that quire's CPU kernels cannot compute."""
    return next((size for size in (model.hidden_size, experts.intermediate_size) if size % EXPERT_UNIT), None)


def find_latent_obstacle(latent: LatentConfig) -> str | None:
    sizes = latent.rank, latent.rotated_dim, latent.value_dim
    if all(size % HEAD_DIM_UNIT == 0 for size in sizes) and latent.head_dim <= MAX_LATENT_DIM:
        return None
    return (
        f"quire's own CPU kernels need latents of multiples of {HEAD_DIM_UNIT} dimensions, at most {MAX_LATENT_DIM}, "
        f"and this model's are {latent.rank} + {latent.rotated_dim}, with values of {latent.value_dim}"
    )


def find_head_obstacle(head_dim: int, whose: str) -> str | None:
    """Why quire's CPU kernels do not compute attention with heads of that size, as a clause; None if they do."""
    if head_dim % HEAD_DIM_UNIT == 0 and head_dim <= MAX_HEAD_DIM:
        return None
    return (
        f"quire's own CPU kernels need heads of a multiple of {HEAD_DIM_UNIT} dimensions, at most {MAX_HEAD_DIM}, "
        f"and this {whose}'s have {head_dim}"
    )


def choose_kv_dtype(wanted: str, dtype: str, ops: Kernels) -> str:
    """The cache's dtype. `auto` is bfloat16 with quire's CPU kernels, and the model's dtype otherwise."""
    if wanted == "auto":
        return "bfloat16" if ops.native else dtype
    if wanted == "int8" and ops.native is None:
        raise InvalidParams("kv_dtype is 'int8', which needs quire's own CPU kernels; use 'float32' or 'bfloat16'.")
    if wanted == "fp8" and ops.native is None and ops.fused is None:
        raise InvalidParams("kv_dtype is 'fp8', which needs quire's own kernels; use 'float32' or 'bfloat16'.")
    if wanted == "float16" and ops.native is not None:
        raise InvalidParams("kv_dtype is 'float16', which quire's own CPU kernels lack; use 'bfloat16' or 'float32'.")
    return wanted


def choose_quantize(wanted: str, weights: Sequence[StoredPart], *, tiled: bool = False) -> str | None:
    """How to round matrices that are stored in full precision. Raises if the file has none. `tiled`: on a GPU, where
    only matrices of layers are rounded."""
    if wanted == "none":
        return None
    matrices = [stored for stored in weights if stored.cols is not None]
    if tiled:
        from quire.weights.tiles import format_of

        plain = [each for each in matrices if not each.quantized]
        is_rounded = any(format_of(each.part, each, each.cols or 0, wanted) is not None for each in plain)
    else:
        is_rounded = any(stored.panel_format in DENSE_FORMATS for stored in matrices)
    if not is_rounded:
        raise InvalidParams(f"quantize is {wanted!r}, but the model's matrices are quantized already; leave it out.")
    return wanted


def describe_ops(ops: Kernels, dtype: str, rank_threads: Sequence[int] = ()) -> str:
    """For the summary: 'own kernels (avx512) on 2 threads', 'own kernels in bfloat16 on cuda', 'torch ...'."""
    if ops.native is not None:
        threads = sum(rank_threads) or ops.native.threads
        ranks = f" of {len(rank_threads)} ranks" if rank_threads else ""
        return f"own kernels ({ops.native.isa}) on {threads} thread{'s' if threads > 1 else ''}{ranks}"
    whose = "torch" if ops.fused is None else "own kernels"
    return f"{whose} in {dtype} on {ops.device}"
