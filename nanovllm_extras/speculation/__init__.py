"""Speculative decoding: one forward pass verifies several tokens that a proposer has guessed.

`scheduling/drafter.py` says why outputs stay the same; read it first. `ngram.py`, `draft_model.py` and `mtp_drafts.py`
propose drafts. `patience.py` decides how many drafts a sequence gets. `start_speculation.py` measures how many tokens a
step verifies at little cost, and `speculation_options.py` checks what a user may set.
"""
