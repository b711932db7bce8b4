"""The HTTP server and the asynchronous engine: HTTP → async engine → engine. The engine does not depend on them.

Read `async_llm.py` first: it lets many consumers in an event loop share one engine in a thread. Then read `app.py`,
which lists the routes, and `chat_route.py`, one of them. `serve_command.py` is the command `nanovllm serve`, and
`batch/` answers files of requests. The clients are in `terminal/` (`nanovllm chat`) and `bench/`
(`nanovllm bench serve`); they do not import this folder.
"""
