"""Reasoning: what a model writes before its answer. Start at `formats.py`; Harmony's channels are `harmony.py`."""
