"""OpenAI-compatible frontend: JSON over HTTP and server-sent events, over the same core as gRPC.

The path of a request: `routes` → `json_values` (bytes to members) → `completions_request` or
`chat_request` (members to `bodies`, and these to ``pb.GenerateRequest``) → the generator →
`completions_answer` or `chat_answer` (``pb.GenerateResponse`` to JSON) → `http_call` (one response, streamed
or whole). `errors` has OpenAI's shape of errors.

Source: https://platform.openai.com/docs/api-reference (completions, chat completions, models), and the
request fields that clients of vLLM and SGLang add. A field that is neither is refused by name. `openapi`
describes the API.
"""
