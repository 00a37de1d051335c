"""A conversation at the terminal. An empty line or the end of input ends it."""

import sys
import uuid

from diptych.client import CallFailed, Client, Message, chat

SYSTEM = "You are a friendly guide who answers briefly."


def main(address: str) -> None:
    history: list[Message] = []
    session = uuid.uuid4().hex  # a hint: the turns go where the earlier ones' KV cache is
    with Client(address) as client:
        while line := _read():
            turns = chat(line, system=SYSTEM, history=history)
            try:
                with client.stream(turns, max_tokens=64, session_id=session, timeout_s=120) as stream:
                    for chunk in stream:
                        print(chunk.text, end="", flush=True)
            except CallFailed as failure:
                print(f"\n[{failure}]", file=sys.stderr)
                continue
            answer = stream.received.completion()
            cached = answer.usage.cached_prompt_tokens if answer.usage else 0
            print(f"\n[{cached} tokens of the prompt were known]")
            history += [{"role": "user", "content": line}, {"role": "assistant", "content": answer.text}]


def _read() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["127.0.0.1:50051"])
