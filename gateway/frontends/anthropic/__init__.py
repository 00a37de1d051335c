"""Anthropic's Messages API: bodies, answers and errors of ``/v1/messages``, over the HTTP frontend.

`openai.routes` serves the paths: a body becomes the same request of the core as a chat's
(`messages_request`), the core's output becomes content blocks (`messages_answer`), and errors get Anthropic's
shape (`errors`).

Source: https://docs.anthropic.com/en/api/messages, and the types of Anthropic's Python client.
"""
