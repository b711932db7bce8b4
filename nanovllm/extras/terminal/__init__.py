"""`nanovllm chat`: a conversation in the terminal, with an engine of its own or with a running server.

Read `conversation.py` first: what is said, and what it cost. `answerers.py` gets the answers, `screen.py` draws them,
`session.py` reads lines and commands, `chat.py` is the command: its options, and its answer in a pipe.
"""
