"""Handle `POST /v1/responses`: OpenAI's newer interface, implemented with the same chats.

`responses_protocol.py` defines the fields, `responses_conversation.py` converts them to a chat, and `items.py` converts
the chat's answer to items and events. Read `route.py` first.
"""
