"""Runs OpenVINO GenAI in its environment. Its continuous-batching pipeline reads the GGUF file."""

from __future__ import annotations

import numpy as np
import openvino
import openvino_genai
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

from peers.workload import Answer, Job, serve


def load(job: Job) -> tuple[str, Answer]:
    scheduler = SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_seqs = job.max_batch
    properties = {"INFERENCE_NUM_THREADS": job.threads}
    pipeline = ContinuousBatchingPipeline(job.model, scheduler, "CPU", properties)

    def answer(prompts: list[list[int]], output_tokens: int) -> int:
        config = GenerationConfig(max_new_tokens=output_tokens, ignore_eos=True, do_sample=False)
        tensors = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        results = pipeline.generate(tensors, [config] * len(prompts))
        return sum(len(result.m_generation_ids[0]) for result in results)

    return openvino_genai.__version__.partition("-")[0], answer


if __name__ == "__main__":
    serve(load)
