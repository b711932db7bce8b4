"""The parts of an answer: reasoning, content and calls, and the bytes and offsets of its tokens.

The server and the chat client use these files. `reasoning.py` parses tags in the text, `harmony.py` special tokens. The
formats of tool calls are in `serve/parsers/`.
"""
