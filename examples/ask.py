"""One question, asked in two ways, and what a failure tells."""

import sys

from diptych.client import CallFailed, Client, chat


def main(address: str) -> None:
    question = chat("What is the capital of France?", system="You answer in one sentence.")
    with Client(address) as client:
        print("model:", client.model)
        answer = client.generate(question, max_tokens=24, temperature=0.0, timeout_s=60)
        print("whole:", answer.text)

        print("stream: ", end="")
        with client.stream(question, max_tokens=24, temperature=0.0, timeout_s=60) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        print()
        end = stream.received.completion()
        print("finished:", end.finish_reason, end.usage)
        print("first token after", end.timings.time_to_first_token if end.timings else "?", "s")

        try:
            client.generate(question, temperature=-1.0)
        except CallFailed as failure:
            print("refused:", failure.code.name, failure.reason, failure.violations)


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["127.0.0.1:50051"])
