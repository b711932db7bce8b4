"""A request: its prompt, its text and what ends it, and its outputs. Read `full_request.py` first."""
