"""Target: the model that a head is trained for, as tensors. It runs in the engine, on quire's kernels or on torch's.

What differs between a CPU and a GPU is here: numpy arrays become tensors, and the device and the types of the training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.engine.backend import choose_kv_dtype
from quire.engine.runner import ModelRunner
from quire.engine.text_states import TextStates, find_model
from quire.kernels import Kernels, reference
from quire.llm import LLM
from quire.models.config import ModelConfig
from quire.models.decoder import Decoder

STORED = torch.bfloat16  # features in memory: half of float32, and the head's own inputs are no more precise


class Target:
    """`kv_dtype` is the engine's option."""

    def __init__(self, model: Decoder, config: ModelConfig, ops: Kernels, kv_dtype: str = "auto") -> None:
        self.model = model
        self.config = config
        self.ops = ops
        self.device = torch.device(ops.device)
        self._kv_dtype = kv_dtype
        self._is_native = ops.native is not None

    @classmethod
    def of(cls, llm: LLM) -> Target:
        """The model of an LLM, which must have no requests meanwhile."""
        runner = llm._client.engine.runner
        assert isinstance(runner, ModelRunner)
        return cls(find_model(runner), llm.info.config, runner.ops, llm.config.kv_dtype)

    @property
    def is_gpu(self) -> bool:
        return self.ops.device == "cuda"

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def softcap(self) -> float | None:
        return self.model.head.softcap

    def text_states(self, tap_layers: Sequence[int], max_tokens: int) -> TextStates:
        dtype = "float32" if self._is_native else str(self._model_type).removeprefix("torch.")
        kv_dtype = choose_kv_dtype(self._kv_dtype, dtype, self.ops)
        return TextStates(self.model, self.ops, kv_dtype, tap_layers, max_tokens=max_tokens)

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [...] int64 -> [..., hidden_size] float32"""
        rows = self.model.embedding(self._as_array(tokens.flatten()))
        return self.as_tensor(rows).float().view(*tokens.shape, -1)

    @torch.no_grad()
    def head_rows(self, ids: Tensor) -> Tensor:
        """Rows of the output matrix, [n, hidden_size], in the type of products."""
        return self.as_tensor(self.model.head.weight.rows(self._as_array(ids))).to(self.product_type)

    @torch.no_grad()
    def top_tokens(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size] -> the likeliest tokens of the whole vocabulary [n]"""
        indices, _ = self.model.head.weight.argmax(self._as_states(hidden), range(len(hidden)))
        return torch.tensor(indices, device=self.device)

    @torch.no_grad()
    def keys_values(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What a layer stores. x [tokens, hidden_size], its input -> keys and values [tokens, heads, dim]"""
        module: Any = self.model.layers[layer]
        attention = module.attention
        states = self._as_states(x)
        states = states if module.input_norm is None else module.input_norm(states)
        qkv = self.as_tensor(attention.qkv(states))
        _, k, v = torch.split(qkv.view(len(x), -1, attention.head_dim), attention.heads, dim=1)
        if attention.qk_norm is not None:
            norm, shape = attention.qk_norm[1], k.shape
            k = k.flatten(1) if attention.wide_norm else k
            k = torch.as_tensor(reference.rms_norm(k, self.as_tensor(norm.weight), norm.eps)).view(shape)
        if attention.rotary is not None:
            table = self.as_tensor(attention.rotary.table)
            k, _ = reference.rope(k, k, positions.to(self.device), table, attention.rotary.interleaved)
        return k, v

    def as_tensor(self, array: Any) -> Tensor:
        return array if isinstance(array, Tensor) else torch.from_numpy(np.asarray(array))

    @property
    def product_type(self) -> torch.dtype:
        """Of the products with the output matrix."""
        return torch.bfloat16 if self.is_gpu else torch.float32

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Products in bfloat16 on a GPU."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_gpu):
            yield

    @property
    def _model_type(self) -> torch.dtype:
        weight = self.as_tensor(self.model.norm.weight)
        return weight.dtype

    def _as_array(self, ids: Tensor) -> Any:
        return ids.cpu().numpy() if self._is_native else ids.to(self.device)

    def _as_states(self, x: Tensor) -> Any:
        if self._is_native:
            return np.ascontiguousarray(x.float().cpu().numpy())
        return x.to(self.device, self._model_type)
