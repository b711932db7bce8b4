"""Parse the tool calls in the text of answers, in the formats of different model families.

`parser_registry.py` has the names of `--tool-call-parser` and `--reasoning-parser`. Each format has its own file. Read
`tool_parser.py`, then `hermes.py`. The parsers of reasoning, and the one of gpt-oss, are in `answer_parts/`.
"""
