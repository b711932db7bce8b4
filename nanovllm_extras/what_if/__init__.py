"""What would another option have changed? Run the core's scheduler again, without the model (`nanovllm what-if`).

Read `engine.py` first: the core's own `Scheduler`, `BlockManager` and `PrefixCache` take the steps, and recorded tokens
replace the model. `recorded_run.py` reads a recording, `trace_requests.py` makes requests of a trace. `run.py` drives
the engine: by the recording's own step index (`replay`), or by a clock (`simulate`). `clock.py` says how long a step
takes, `figures.py` counts, and `journal.py` writes a simulated run as a recording. `report.py` and `command.py` are the
command. `answer.py` answers a page, and `server.py` serves that page for `view_command.py`. Except for the trace, the
commands and the server, the files import the standard library and the core's scheduling files only, so that they also
run in a browser, without torch and NumPy.
"""
