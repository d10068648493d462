"""Accepts drafts on the device: which were sampled, and what each request's last token is. After the sampler.

The walk is that of `accept` in `engine/runner.py`: from the root to the child that has the sampled token, as long as
there is one. The host repeats it when it has read the tokens. The device knows sooner what the next kernels need.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.cuda.launch.pdl import launch_dependents, pdl_options, wait_for_previous

# Of a row: its index, the index of its first sample, that of its first token in the step, its drafts, the number of
# tokens for which it has blocks, and the tokens of the rows listed before it.
FIELDS = 6
MAX_NODES = 64  # of a row, its first token included


@triton.jit
def _accept(
    rows, parents, step_tokens, tokens, max_logits, entries, last_tokens, num_accepted, paths, path_row,
    FIELDS: tl.constexpr, NODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    wait_for_previous(PDL)
    fields = rows + tl.program_id(0) * FIELDS
    row, first = tl.load(fields).to(tl.int64), tl.load(fields + 1).to(tl.int64)
    first_token, count = tl.load(fields + 2).to(tl.int64), tl.load(fields + 3)
    nodes = tl.arange(0, NODES)  # 0 is the root
    is_draft = (nodes > 0) & (nodes <= count)
    parent = tl.load(parents + first + nodes, mask=is_draft, other=-1)
    draft = tl.load(step_tokens + first_token + nodes, mask=is_draft, other=-1)
    entry = tl.load(entries + first)
    node, accepted = 0, 0
    for _ in range(count + 1):
        if node >= 0:
            parent_node = node
            node = -1
            if tl.abs(tl.load(max_logits + first + parent_node)) < float("inf"):  # otherwise the request ends here
                token = tl.load(tokens + first + parent_node)
                tl.store(last_tokens + entry, token)
                is_right = is_draft & (parent == parent_node) & (draft == token)
                child = tl.min(tl.where(is_right, nodes, NODES), axis=0)
                if child < NODES:
                    tl.store(paths + row * path_row + accepted, child - 1)
                    node = child
                    accepted += 1
    tl.store(num_accepted + row, accepted)


def accept_drafts(
    rows: Tensor, parents: Tensor, step_tokens: Tensor, tokens: Tensor, max_logits: Tensor, entries: Tensor,
    last_tokens: Tensor, num_accepted: Tensor, paths: Tensor,
) -> None:  # fmt: skip
    """rows [n, FIELDS] int32; parents [samples] int32: of each draft the index of its parent in its row, 0 the root;
    step_tokens: the step's input; tokens, max_logits, entries: of the samples -> num_accepted [row], the accepted
    nodes paths [row, depth] from 0, and last_tokens[entry] of these rows."""
    _accept[(rows.shape[0],)](
        rows, parents, step_tokens, tokens, max_logits, entries, last_tokens, num_accepted, paths, paths.stride(0),
        FIELDS=FIELDS, NODES=MAX_NODES, num_warps=2, **pdl_options(),
    )  # fmt: skip
