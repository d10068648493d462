"""A script: the kernel of the training's loss by Triton's interpreter, beside torch. `test_interpreted.py` runs it."""

from __future__ import annotations

import torch
from triton.runtime import interpreter

from quire.train.heads.block import BlockModule
from quire.train.loop import find_bigrams
from quire.train.vocabulary import DraftVocabulary, SoftCrossEntropy, find_gradients
from tests.kernels.interpreted import patch_index
from tests.train.test_heads import batch_of, disturb, generator, make_target, texts

interpreter._patch_lang_tensor = patch_index


def check_loss(lengths: list[int], stride: int) -> None:
    """The draft vocabulary has every `stride`th id, and dialogues have own tokens if that is more than 1."""
    target = make_target()
    vocabulary = DraftVocabulary(target, torch.arange(0, target.config.vocab_size, stride))
    module = BlockModule(target, 3, 1, len(vocabulary), generator())
    disturb(module)
    batch = batch_of(target, module.inputs, texts(lengths))
    states = module(batch).detach()
    before, after = (each.detach() for each in find_bigrams(module, states, batch, vocabulary))
    parts = [each.requires_grad_() for each in (states, before, after)]
    loss = SoftCrossEntropy.apply(*parts, batch, vocabulary, 0.8)
    loss.backward()
    with torch.no_grad():
        own = vocabulary.own_tokens(batch.dialogues)
        found, *gradients = find_gradients(states, before, after, batch, vocabulary, own, 0.8)
    torch.testing.assert_close(found, loss.detach())
    for part, gradient in zip(parts, gradients, strict=True):
        assert part.grad is not None
        assert part.grad.abs().max() > 0
        torch.testing.assert_close(gradient, part.grad)


def main() -> None:
    check_loss([40, 7, 30], 3)
    check_loss([12], 1)


if __name__ == "__main__":
    main()
