"""Chat templates: rendering within limits, and messages with tools. Start at `chat_template.py`."""
