"""Converts a GGUF to bf16 safetensors, for peers that do not read GGUF. Runs in the environment of transformers.

python -m peers.make_safetensors MODEL.gguf FOLDER
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main() -> None:
    source, folder = map(Path, sys.argv[1:])
    unfinished = folder.with_name(folder.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(unfinished)
    unfinished.rename(folder)


if __name__ == "__main__":
    main()
