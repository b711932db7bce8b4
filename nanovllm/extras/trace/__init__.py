"""Recordings of what the engine did, and a page that replays them. Nothing below knows of this folder.

Read `recorder.py` first, which writes a line of events for each step; `replay.py` makes the state of every step of
these lines again, and `view.py` the page. docs/trace.md explains the format.
"""
