"""ModelConfig from the metadata of a GGUF file, for the families of `models/transformer.py`.

Converters write q, k and v of a fused matrix one after the other, and nothing transposed. `gguf_config.py` calls the
readers in `GGUF_FAMILIES` with the function that reads what all architectures share.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from quire.models.config import ModelConfig, RopeScaling
from quire.models.structure import Structure
from quire.weights.fields import Fields
from quire.weights.json_classics import NO_ROPE, alibi_slopes
from quire.weights.json_modern import with_multipliers
from quire.weights.json_plain import Windows

Shapes = Mapping[str, tuple[int, ...]]
Divisors = Sequence[float] | None
Plain = Callable[..., ModelConfig]
Reader = Callable[[Plain, Fields, Shapes, Divisors], ModelConfig]

EPS = "attention.layer_norm_epsilon"
GEMMA2_27B_LAYERS = 46


def read_classic(
    family: str, structure: Structure, plain: Plain, fields: Fields, shapes: Shapes, divisors: Divisors
) -> ModelConfig:
    """LayerNorms, an MLP without a gate, and GPT-2's gelu. Which matrices have biases follows from the tensors."""
    config: ModelConfig = plain(fields, shapes, family, divisors, eps_key=EPS)
    fused = int("blk.0.attn_qkv.weight" in shapes)
    structure = replace(
        structure, norm="layer", norm_bias="output_norm.bias" in shapes, gated=False, qkv_groups=fused,
        head_bias="output.bias" in shapes,
    )  # fmt: skip
    return replace(config, activation="gelu_tanh", structure=structure)


def read_gpt2(family: str, plain: Plain, fields: Fields, shapes: Shapes, divisors: Divisors) -> ModelConfig:
    """GPT-2 and StarCoder. The table of positions has as many rows as the context is long."""
    config = read_classic(family, Structure(), plain, fields, shapes, divisors)
    structure = replace(config.structure, num_positions=config.max_len)
    return replace(config, rope=NO_ROPE, structure=structure)


def read_bloom(plain: Plain, fields: Fields, shapes: Shapes, divisors: Divisors) -> ModelConfig:
    structure = Structure(embedding_norm=True, slopes=alibi_slopes(fields.count("attention.head_count")))
    return replace(read_classic("bloom", structure, plain, fields, shapes, divisors), rope=NO_ROPE)


def read_mpt(plain: Plain, fields: Fields, shapes: Shapes, divisors: Divisors) -> ModelConfig:
    if fields.has("attention.clamp_kqv"):
        raise fields.unsupported("attention.clamp_kqv is set, which quire does not support.")
    if "blk.0.attn_q_norm.weight" in shapes or "position_embd.weight" in shapes:
        raise fields.unsupported("quire has MPT with ALiBi and without norms of queries and keys only.")
    slopes = alibi_slopes(fields.count("attention.head_count"), fields.number("attention.max_alibi_bias"))
    config = read_classic("mpt", Structure(slopes=slopes), plain, fields, shapes, divisors)
    return replace(config, activation="gelu", rope=NO_ROPE)


def read_falcon(plain: Plain, fields: Fields, shapes: Shapes, divisors: Divisors) -> ModelConfig:
    two_norms = "blk.0.attn_norm_2.weight" in shapes
    structure = Structure(parallel=True, shared_norm=not two_norms)
    family = "falcon_40b" if two_norms else "falcon"
    return replace(read_classic(family, structure, plain, fields, shapes, divisors), activation="gelu")


def read_gpt_neox(plain: Plain, fields: Fields, shapes: Shapes, divisors: Divisors) -> ModelConfig:
    structure = Structure(parallel=fields.flag("use_parallel_residual", True))
    return replace(read_classic("gpt_neox", structure, plain, fields, shapes, divisors), activation="gelu")


def read_modern(
    family: str, structure: Structure, plain: Plain, fields: Fields, shapes: Shapes, divisors: Divisors
) -> ModelConfig:
    """As Llama, with switches. q, k and v may be one tensor."""
    fused = int("blk.0.attn_qkv.weight" in shapes)
    config: ModelConfig = plain(fields, shapes, family, divisors)
    return replace(config, structure=replace(structure, qkv_groups=fused))


def read_interleaved(
    family: str, structure: Structure, plain: Plain, fields: Fields, shapes: Shapes, divisors: Divisors
) -> ModelConfig:
    """The same, with rotated dimensions as neighbours."""
    config = read_modern(family, structure, plain, fields, shapes, divisors)
    return replace(config, rope=replace(config.rope, interleaved=True))


def read_gemma2(plain: Plain, fields: Fields, shapes: Shapes, divisors: Divisors) -> ModelConfig:
    """Norm weights are stored with the 1 added. Only the 27B model's scale is not head_dim ** -0.5."""
    config = read_modern("gemma2", Structure(norms="both"), plain, fields, shapes, divisors)
    large = config.num_layers == GEMMA2_27B_LAYERS
    return replace(
        config,
        windows=periodic_windows(fields, config.num_layers, 2),
        activation="gelu_tanh",
        attention_scale=(config.hidden_size / config.num_heads) ** -0.5 if large else None,
        attention_softcap=fields.number("attn_logit_softcapping", 50.0),
        logit_softcap=fields.number("final_logit_softcapping", 30.0),
        structure=replace(config.structure, embedding_scale=config.hidden_size**0.5),
    )


def read_olmo2(plain: Plain, fields: Fields, shapes: Shapes, divisors: Divisors) -> ModelConfig:
    """OLMo 3 is this architecture with windows, whose layers do not stretch the rope."""
    config = read_modern("olmo2", Structure(norms="after", qk_norm="whole"), plain, fields, shapes, divisors)
    if not fields.has("attention.sliding_window"):
        return config
    windows = periodic_windows(fields, config.num_layers, 4)
    return replace(config, family="olmo3", windows=windows, local_rope=replace(config.rope, scaling=None))


def read_phi3(plain: Plain, fields: Fields, shapes: Shapes, divisors: Divisors) -> ModelConfig:
    config = read_modern("phi3", Structure(fused_gate_up=True), plain, fields, shapes, divisors)
    window = fields.count("attention.sliding_window", 0, least=0) or None
    return replace(config, windows=(window,) * config.num_layers)


def with_longrope(config: ModelConfig, fields: Fields, short: Sequence[float], long: Sequence[float]) -> ModelConfig:
    """LongRoPE, whose divisors are the tensors rope_factors_short and rope_factors_long."""
    half, original = config.rope.dim // 2, fields.count("rope.scaling.original_context_length", config.max_len)
    if len(short) != half or len(long) != half:
        raise fields.bad(f"rope_factors_short and rope_factors_long must have {half} values each")
    scaling = RopeScaling(
        "longrope",
        config.max_len / original,
        original,
        attention_factor=fields.optional_number("rope.scaling.attn_factor"),
        short_divisors=tuple(short),
        long_divisors=tuple(long),
    )
    return replace(config, rope=replace(config.rope, scaling=scaling))


def read_granite(plain: Plain, fields: Fields, shapes: Shapes, divisors: Divisors) -> ModelConfig:
    config = read_interleaved("granite", Structure(), plain, fields, shapes, divisors)
    return with_multipliers(
        replace(config, attention_scale=fields.optional_number("attention.scale")),
        residual=fields.number("residual_scale", 1.0),
        embedding=fields.number("embedding_scale", 1.0),
        logits=fields.number("logit_scale", 1.0),
    )


def read_cohere(family: str, plain: Plain, fields: Fields, shapes: Shapes, divisors: Divisors) -> ModelConfig:
    if "blk.0.attn_q_norm.weight" in shapes:
        raise fields.unsupported("its queries and keys are normed, which quire does not support in this family.")
    structure = Structure(norm="layer", parallel=True, shared_norm=True, logit_scale=fields.number("logit_scale"))
    config: ModelConfig = plain(fields, shapes, family, divisors, interleaved=True, eps_key=EPS)
    if family == "cohere":
        return replace(config, structure=structure)
    windows = periodic_windows(fields, config.num_layers, 4)
    unrotated = tuple(index for index, window in enumerate(windows) if window is None)
    return replace(config, windows=windows, structure=replace(structure, unrotated=unrotated))


def read_smollm3(plain: Plain, fields: Fields, shapes: Shapes, divisors: Divisors) -> ModelConfig:
    """Every fourth layer does not rotate: the metadata do not say so."""
    config = read_interleaved("smollm3", Structure(), plain, fields, shapes, divisors)
    unrotated = tuple(range(3, config.num_layers, 4))
    return replace(config, structure=replace(config.structure, unrotated=unrotated))


GGUF_FAMILIES: dict[str, Reader] = {
    "bloom": read_bloom,
    "chatglm": partial(read_interleaved, "glm", Structure(fused_gate_up=True)),
    "cohere2": partial(read_cohere, "cohere2"),
    "command-r": partial(read_cohere, "cohere"),
    "falcon": read_falcon,
    "gemma2": read_gemma2,
    "glm4": partial(read_interleaved, "glm4", Structure(norms="both", fused_gate_up=True)),
    "gpt2": partial(read_gpt2, "gpt2"),
    "gptneox": read_gpt_neox,
    "granite": read_granite,
    "mpt": read_mpt,
    "olmo2": read_olmo2,
    "phi2": partial(read_classic, "phi", Structure(parallel=True, shared_norm=True)),
    "phi3": read_phi3,
    "seed_oss": partial(read_modern, "seed_oss", Structure()),
    "smollm3": read_smollm3,
    "starcoder": partial(read_gpt2, "gpt_bigcode"),
    "starcoder2": partial(read_classic, "starcoder2", Structure()),
}


def periodic_windows(fields: Fields, num_layers: int, period: int) -> Windows:
    """Windows of all layers but the last of each period. A list of bools may say which layers have one."""
    window, pattern = fields.count("attention.sliding_window"), fields.get("attention.sliding_window_pattern")
    if isinstance(pattern, list | array):
        if len(pattern) != num_layers:
            raise fields.bad(f"attention.sliding_window_pattern has {len(pattern)} entries for {num_layers} layers")
        return tuple(window if local else None for local in pattern)
    return tuple(window if (index + 1) % period else None for index in range(num_layers))
