"""Chat in the terminal (`nanovllm chat`), with an engine in this process or with a running server.

Read `chat_history.py` first: it holds the turns and their costs. `answerers.py` gets the answers, `screen.py` renders
them, `session.py` handles lines and commands, and `chat_command.py` is the command: its answer in a pipe, or a session.
`chat_arguments.py` defines its options.
"""
