"""ModelSize: what a model costs an engine: bytes of weights and cache, and the multiplications of a step.

`engine/sizing.py` makes it from a model's headers. The calculators beside this file take it.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.capacity.step_cost import StepShape


@dataclass(frozen=True, slots=True)
class ExpertSize:
    """The experts of all layers together. A token is multiplied with `top_k` of every `num_experts`."""

    num_bytes: int
    num_values: int
    num_experts: int
    top_k: int

    def touched(self, num_tokens: int) -> float:
        """Share of the experts that a step reads, if tokens choose evenly: 1 - (1 - top_k / num_experts) ** tokens."""
        return 1 - (1 - self.top_k / self.num_experts) ** num_tokens


@dataclass(frozen=True, slots=True)
class ModelSize:
    """One model with the options of one engine. Values are numbers in matrices."""

    model: str
    weight_bytes: int  # all weights, as they are held
    read_bytes: int  # weights that every step reads: without experts, and without an embedding that is only looked up
    num_layers: int
    num_values: int  # multiplied with every token, without experts and head
    head_values: int  # multiplied with sampled rows only
    windows: tuple[int | None, ...]  # of the cache groups
    pair_flops: tuple[float, ...]  # of one pair of query and key in all layers of a cache group
    block_bytes: int
    block_size: int
    max_len: int  # that the model was made for
    vocab_size: int
    table_bytes: int  # of positions, for `max_len` tokens
    row_bytes: int  # memory of activations for each token of a step
    num_fixed_blocks: int = 0  # of a request, for states and encoders
    experts: ExpertSize | None = None

    @property
    def key_bytes(self) -> float:
        """Bytes of the cache that one key and its value take in the layers of one group."""
        return self.block_bytes / self.block_size

    def product_flops(self, shape: StepShape) -> float:
        """2 x values x tokens: layers for every token, the head for sampled rows, top_k of the experts."""
        flops = 2.0 * self.num_values * shape.tokens + 2.0 * self.head_values * shape.sampled
        if self.experts is not None:
            flops += 2.0 * self.experts.num_values * self.experts.top_k / self.experts.num_experts * shape.tokens
        return flops

    def attention_flops(self, shape: StepShape) -> float:
        """4 x heads x head_dim x layers for each pair of query and key."""
        columns = zip(self.pair_flops, shape.keys, shape.pairs, strict=True)
        return sum(flops * (keys + pairs) for flops, keys, pairs in columns)

    def weights_read(self, shape: StepShape) -> float:
        """Bytes of weights that a step reads."""
        experts = self.experts
        return self.read_bytes + (experts.num_bytes * experts.touched(shape.tokens) if experts is not None else 0.0)

    def keys_read(self, shape: StepShape) -> float:
        """Bytes of the cache that rows of one token read. Prompts read keys once for many queries: not counted."""
        return self.key_bytes * sum(shape.keys)
