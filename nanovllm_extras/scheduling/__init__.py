"""Which sequence computes how many tokens in the next step, with all options.

`scheduler.py` has the engine's scheduler, and the other files what it is made of: `ordered_queues.py` and `policies.py`
(who comes first), `pending.py` (tokens that are not known yet: in flight, or drafts), `drafter.py` (who gets drafts),
`roll_back.py` (a step has failed).
"""
