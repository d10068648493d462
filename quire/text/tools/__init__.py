"""Tool calls: definitions, formats, parser and grammar. Start at `parser.py`."""
