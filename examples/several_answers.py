"""Several answers to one prompt, which is computed once."""

import sys

from diptych.client import Client

PROMPT = "The best thing about the sea is"


def main(address: str) -> None:
    with Client(address) as client:
        four = client.generate(PROMPT, n=4, max_tokens=12, temperature=1.0, seed=7)
        for choice in four.choices:
            print(f"{choice.index}: {choice.text!r} ({choice.finish_reason})")

        # They come as they are made: each piece says which answer it belongs to.
        with client.stream(PROMPT, n=2, max_tokens=12, temperature=1.0, seed=7) as stream:
            pieces = [choice.index for chunk in stream for choice in chunk.choices]
        print("order of the pieces:", pieces)
        print("streamed:", [choice.text for choice in stream.received.completion().choices])

        best = client.generate(PROMPT, best_of=4, max_tokens=12, temperature=1.0, seed=7)
        print("the likeliest of four:", best.text)

        beams = client.generate(PROMPT, beam_width=4, n=2, max_tokens=12)
        print("beams:", [choice.text for choice in beams.choices])


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["127.0.0.1:50051"])
