"""Beam search: the likeliest completions that a search of fixed width finds.

`beam_params.py` says what a request may ask for and what comes back, `search.py` drives the beams.
Read `search.py` first.
"""
