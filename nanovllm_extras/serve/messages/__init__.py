"""The fields of the JSON that clients send and get: Chat Completions, Completions, Responses and Messages."""
