"""Tokenizers of all checkpoint formats. Start at `tokenizer.py`."""
