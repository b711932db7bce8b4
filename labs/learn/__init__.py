"""Exercises: write the parts of an engine yourself, with a checker that explains what is wrong.

`exercise.py` says what an exercise is, and `exercises/` holds them. `checker.py` compares an answer with the right one
step by step, finds the smallest run in which they differ, and names the mistake. `check_process.py` runs the learner's
code in a process of its own. `folder.py` keeps the learner's files, and `learn_command.py` is the command line.
`simulation.py` runs schedulers and block managers without a network. `timetable.py` runs schedulers without blocks, and
`tensors.py` compares and draws tensors.
"""
