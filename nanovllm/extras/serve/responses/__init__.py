"""`POST /v1/responses`: OpenAI's newer interface, over the same chats.

`protocol.py` has the fields, `conversation.py` makes a chat of them, `items.py` makes items and events of its answer.
Read `route.py` first.
"""
