"""Runs transformers in its environment: the GGUF dequantized to fp32, and a loop over the forward pass.

The loop does the same as `generate` for a greedy batch of prompts of equal length, without its checks at every token.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, GgufConfig

from peers.workload import Answer, Job, serve


def load(job: Job) -> tuple[str, Answer]:
    torch.set_num_threads(job.threads)
    path = Path(job.model)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )

    @torch.inference_mode()
    def answer(prompts: list[list[int]], output_tokens: int) -> int:
        cache = DynamicCache(config=model.config)
        tokens = torch.tensor(prompts)
        count = 0
        for _ in range(output_tokens):
            logits = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            tokens = logits[:, -1].argmax(-1, keepdim=True)
            count += tokens.numel()
        return count

    return transformers.__version__, answer


if __name__ == "__main__":
    serve(load)
