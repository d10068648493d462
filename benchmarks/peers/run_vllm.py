"""Runs vLLM's CPU build in its environment, on bf16 safetensors that were made from the GGUF."""

from __future__ import annotations

import os

import vllm
from vllm import LLM, SamplingParams

from peers.workload import Answer, Job, serve


def load(job: Job) -> tuple[str, Answer]:
    assert job.folder
    cores = sorted(os.sched_getaffinity(0))[: job.threads]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    llm = LLM(
        model=job.folder,
        dtype="bfloat16",
        max_model_len=job.max_len,
        max_num_seqs=job.max_batch,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )

    def answer(prompts: list[list[int]], output_tokens: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(result.outputs[0].token_ids) for result in results)

    return vllm.__version__, answer


if __name__ == "__main__":
    serve(load)
