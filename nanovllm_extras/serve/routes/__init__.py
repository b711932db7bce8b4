"""The routes of the HTTP server, and the application that has them. Read `app.py` first, then `chat_route.py`.

`POST /v1/responses`, OpenAI's newer interface, is implemented with the same chats: `responses_conversation.py` converts
a request to a chat, and `responses_items.py` converts the chat's answer to items and events. `POST /v1/messages`,
Anthropic's interface, has the same parts: `messages_conversation.py` and `messages_blocks.py`.
"""
