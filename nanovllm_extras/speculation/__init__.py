"""Speculative decoding: tokens that somebody proposes cheaply are verified by one forward pass, several at a time.

`scheduling/drafter.py` says why outputs stay the same; read it first. `ngram.py`, `draft_model.py` and
`mtp_drafts.py` propose, `patience.py` decides which sequences are worth it, `start_speculation.py` measures how many
tokens a step verifies almost for nothing, and `speculation_options.py` is what a user may set.
"""
