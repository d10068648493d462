"""A script: engines with experts, sinks and latents on a simulated GPU, as `interpreted_speculation.py` has Llama:
captured steps, preemption, swap, prefix hits and drafts. `test_interpreted.py` runs it.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from tests.kernels import simulated_gpu  # before what imports Triton's kernels

from quire.kernels.routing import Routing  # isort: skip
from quire.models.config import ExpertsConfig, LatentConfig, Rope
from tests.kernels.interpreted_speculation import CONFIG, check_answers

EXPERTS = ExpertsConfig(Routing(6, 2), 32, (True,) * 2)
MIXTURE = replace(CONFIG, family="mixtral", experts=EXPERTS)
SINKS = replace(CONFIG, family="gpt_oss", experts=EXPERTS, attention_sinks=True, windows=(7, None))
LATENT = LatentConfig(rank=32, rotated_dim=16, key_dim=16, value_dim=16)
LATENTS = replace(
    CONFIG,
    family="deepseek",
    experts=replace(EXPERTS, layers=(False, True), shared_size=32, shared_name="shared_experts"),
    latent=LATENT,
    num_kv_heads=1,
    head_dim=LATENT.head_dim,
    attention_scale=LATENT.query_dim**-0.5,
    rope=Rope(16, interleaved=True),
)

if __name__ == "__main__":
    simulated_gpu.install()
    names = {"mixture": MIXTURE, "sinks": SINKS, "latents": LATENTS}
    check_answers(names[sys.argv[1]], exact="exact" in sys.argv, kinds=[1])
