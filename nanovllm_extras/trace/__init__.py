"""Record what the engine does in each step, and replay the recording on a page. The core does not use this folder.

Read `recorder.py` first: it writes a line of events for each step. `replay.py` reconstructs the state of every step
from these lines, and `view.py` makes the page. docs/trace.md explains the format.
"""
