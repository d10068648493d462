"""Offline batch: several prompts through one engine in this process, sampled twice each.

python examples/offline_batch.py
"""

from quire import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "A haiku about the sea:\n",
]


def main() -> None:
    params = SamplingParams(n=2, temperature=0.8, top_p=0.95, max_tokens=24, seed=7)
    with LLM("smollm2:135m", max_len=2048) as llm:
        for output in llm.generate(PROMPTS, params):
            for answer in output.outputs:
                print(f"{output.prompt!r} -> {answer.text!r} ({answer.finish_reason})")


if __name__ == "__main__":
    main()
