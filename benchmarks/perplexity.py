"""Perplexity of a model on the first windows of a text, in quire and, with --peer, in transformers (float32).

    python benchmarks/perplexity.py TEXT [--model smollm2:135m] [--windows 40] [--window 512] [--kv-dtype int8] [--peer]

Each window is scored separately, from its second token on. --peer needs transformers and a model in a GGUF file.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

from quire import LLM, SamplingParams
from quire.store import resolve


def windows_of(llm: LLM, text: str, size: int, count: int) -> list[list[int]]:
    tokens = llm.get_tokenizer().encode(text, add_special_tokens=False)
    windows = [tokens[start : start + size] for start in range(0, size * count, size)]
    if len(windows[-1]) < size:
        raise SystemExit(f"The text has {len(tokens)} tokens, fewer than {count} windows of {size}.")
    return windows


def score(llm: LLM, windows: list[list[int]]) -> float:
    """Sum of the negative log probabilities of all tokens except the first of each window."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    total = 0.0
    for out in llm.generate([{"prompt_token_ids": window} for window in windows], params):
        entries = zip(out.prompt_token_ids[1:], (out.prompt_logprobs or [])[1:], strict=True)
        total -= sum(entry[token].logprob for token, entry in entries if entry)
    return total


def score_with_transformers(path: Path, windows: list[list[int]]) -> float:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    total = 0.0
    with torch.inference_mode():
        for window in windows:
            tokens = torch.tensor([window])
            logprobs = torch.log_softmax(model(tokens).logits[0, :-1].float(), -1)
            total -= float(logprobs.gather(1, tokens[0, 1:, None]).double().sum())
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2:135m")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--peer", action="store_true", help="also score with transformers")
    options = parser.parse_args()
    options_of_engine = {"kernels": options.kernels, "kv_dtype": options.kv_dtype, "prefix_cache": False}
    llm = LLM(options.model, max_len=options.window + 1, max_requests=8, **options_of_engine)
    windows = windows_of(llm, options.text.read_text(), options.window, options.windows)
    count = sum(len(window) - 1 for window in windows)
    begin = time.perf_counter()
    result = {"model": options.model, "tokens": count, "perplexity": math.exp(score(llm, windows) / count)}
    result["seconds"] = time.perf_counter() - begin
    if options.peer:
        llm.close()
        path = resolve(options.model).path
        result["transformers_perplexity"] = math.exp(score_with_transformers(path, windows) / count)
        result["ratio"] = result["perplexity"] / result["transformers_perplexity"]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
