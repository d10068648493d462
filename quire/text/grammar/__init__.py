"""Structured outputs: grammars become token masks. Start at `constraint.py`."""
