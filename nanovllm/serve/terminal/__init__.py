"""`nanovllm chat`: a conversation in the terminal, with an engine of its own or with a running server.

Read `conversation.py` first: what is said, and what it cost. `answerers.py` says where the answers come from,
`screen.py` how they look, `session.py` what each line that is typed does, `cli.py` reads the options.
"""
