"""Clients that are led along their paths, by name, with the exact packages that they are installed from."""

from __future__ import annotations

from tests.clients.environments import Client, InstalledClient

# guidellm wants torch for its command line; its backend, which sends the requests, does without.
GUIDELLM_NEEDS = (
    "culsans>=0.10,<0.11",
    "datasets>=4.1,<6",
    "ftfy>=6,<7",
    "faker<50",
    "httpx[http2]<1",
    "jinja2>=3.1,<4",
    "loguru<1",
    "more-itertools>=10.8,<13",
    "msgpack<2",
    "numpy>=2,<3",
    "pydantic>=2.11,<3",
    "pydantic-settings>=2,<3",
    "rich<16",
    "sanic<27",
    "tabulate<1",
    "transformers>=5,<6",
    "uvloop<1",
    "websockets>=13,<18",
    "eval_type_backport<1",
)

CLIENTS: dict[str, Client] = {
    client.name: client
    for client in (
        InstalledClient("openai-python", "openai_python.py", ("openai",)),
        Client("openai-node", "openai_node.mjs", ("openai@7.57.0", "zod@4.6.7")),
        Client("anthropic", "anthropic.py", ("anthropic==2.14.0",)),
        Client("litellm", "litellm.py", ("litellm==1.110.2", "openai>=3,<4")),
        Client(
            "LangChain", "langchain.py", ("langchain-openai==1.7.4", "langchain-core>=1.8,<2", "openai>=3,<4")
        ),
        Client("instructor", "instructor.py", ("instructor==1.17.0", "openai<4")),
        Client("pydantic-ai", "pydantic_ai.py", ("pydantic-ai-slim[openai]==2.68.0", "openai>=3,<4")),
        Client(
            "LlamaIndex",
            "llama_index.py",
            ("llama-index-llms-openai-like==0.8.1", "llama-index-core>=0.14.25,<0.15", "openai<4"),
        ),
        Client("AI SDK", "ai_sdk.mjs", ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7")),
        Client("outlines", "outlines.py", ("outlines[openai]==1.3.3", "openai>=3,<4")),
        Client("guidellm", "guidellm.py", ("guidellm==0.8.1",), GUIDELLM_NEEDS),
        Client("dspy", "dspy.py", ("dspy==3.4.1", "litellm==1.110.2")),
        Client("openai-agents", "openai_agents.py", ("openai-agents==0.24.0", "openai>=3,<4")),
        Client("smolagents", "smolagents.py", ("smolagents[openai]==1.26.0", "openai>=3,<4")),
        Client("tritonclient", "tritonclient.py", ("tritonclient[grpc]==2.73.0",)),
    )
}
