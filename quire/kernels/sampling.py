"""Sampling: how a token is chosen from a row of logits. The rule is implemented in torch (`reference_sampling.py`), in
C++ (`csrc/sample.cpp`) and in Triton (`cuda/sampling/`).

Temperature 0 takes the largest logit. Otherwise min-p, top-k and top-p select some of the ids. Of these the token is

    argmax(logit / temperature + gumbel(seed, length, id))

where `length` is the number of tokens before the sampled one. This draws from the softmax (the Gumbel-max trick). The
noise depends on the id. So a small change of the logits, by other kernels, number formats or a draft model, changes the
token only if two candidates have about equal scores.
"""

from __future__ import annotations

# Columns of `settings`, float64.
TEMPERATURE = 0  # 0 is greedy
TOP_K = 1  # 0 keeps all
TOP_P = 2
FLOOR = 3  # min-p as temperature * log(min_p), or -inf: the smallest allowed logit - largest logit
NUM_SETTINGS = 4

IN_PROMPT = 1 << 30  # added to the count of a token that occurs in the prompt
