"""The two storeys above the engine: HTTP → async engine → engine. Nothing below knows them.

Read `async_llm.py` first: how many consumers in an event loop share one engine in a thread. Then `app.py`, which lists
the routes, and `chat.py`, one of them. `launch.py` is the command `nanovllm serve`; `batch/` answers files of requests.
Clients live in `extras/terminal/` (`nanovllm chat`) and `extras/bench/` (`nanovllm bench serve`); they import nothing
of this folder.
"""
