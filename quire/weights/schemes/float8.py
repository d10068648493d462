"""float8 checkpoints: `fp8` (with blocks as DeepSeek's, or one scale), `fbgemm_fp8` and ModelOpt's FP8 and NVFP4."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.weights.fields import Fields
from quire.weights.safetensors import SafetensorsFiles
from quire.weights.schemes.compressed import read_targets
from quire.weights.schemes.layouts import float8, nvfp4
from quire.weights.schemes.scheme import CodeMatrix, Module

UNREAD = re.compile(r".*\.(input_scale|input_scale_ub|activation_scale|[qkv]_scale)")


@dataclass(frozen=True, slots=True)
class Float8:
    """A matrix is float8 if its tensor is, so lists of modules that stay plain are not needed."""

    block: tuple[int, int] | None

    @classmethod
    def read(cls, fields: Fields) -> Float8:
        if fields.text("fmt", "e4m3") != "e4m3":
            raise fields.unsupported(f"float8 {fields.get('fmt')!r} is not supported; quire reads e4m3.")
        block = fields.get("weight_block_size")
        if block is None:
            return cls(None)
        if not isinstance(block, list) or len(block) != 2 or any(type(n) is not int or n < 1 for n in block):
            raise fields.bad(f"weight_block_size is {block!r}, and must be two numbers above 0")
        return cls((block[0], block[1]))

    def may_stay_unread(self, name: str, files: SafetensorsFiles) -> bool:
        return bool(UNREAD.fullmatch(name))

    def matrix(self, module: Module) -> CodeMatrix | None:
        is_inverse = self.block is not None or module.has("weight_scale_inv")  # Mistral's have it without blocks too
        scale = "weight_scale_inv" if is_inverse else "weight_scale"
        is_plain = module.has("weight") and not module.dtype("weight").startswith("F8")
        if is_plain and not module.has(scale):
            return None
        return float8(module, scale, self.block)


@dataclass(frozen=True, slots=True)
class ModelOpt:
    algorithm: str  # FP8 or NVFP4

    @classmethod
    def read(cls, fields: Fields) -> ModelOpt:
        inner = fields.section("quantization") or fields
        algorithm = inner.text("quant_algo").upper()
        if algorithm not in ("FP8", "NVFP4"):
            raise fields.unsupported(f"quant_algo {algorithm!r} is not supported; quire reads FP8 and NVFP4.")
        if algorithm == "NVFP4" and inner.count("group_size", 16) != 16:
            raise fields.bad(f"group_size is {inner.get('group_size')!r}, and NVFP4 has groups of 16")
        read_targets(inner, "ignore")
        return cls(algorithm)

    def may_stay_unread(self, name: str, files: SafetensorsFiles) -> bool:
        return bool(UNREAD.fullmatch(name))

    def matrix(self, module: Module) -> CodeMatrix | None:
        if not module.has("weight_scale") and not (
            module.has("weight") and module.dtype("weight") in ("F8_E4M3", "U8")
        ):
            return None
        if self.algorithm == "FP8":
            return float8(module, "weight_scale", None)
        return nvfp4(module, "weight", "weight_scale", "weight_scale_2", divide=False)
