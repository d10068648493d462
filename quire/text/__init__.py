"""Text to tokens and back: tokenizers, chat templates, tool calls, grammars, and the processors of input and output."""
