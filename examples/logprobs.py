"""How likely the model held each token, of what it wrote and of what it read."""

import math
import sys

from diptych.client import Client


def main(address: str) -> None:
    with Client(address) as client:
        answer = client.generate("The capital of France is", max_tokens=6, temperature=0.0, logprobs=3)
        for token in answer.logprobs:
            others = ", ".join(f"{top.text!r} {math.exp(top.logprob or 0.0):.3f}" for top in token.top)
            print(f"{token.text!r} rank {token.rank} {math.exp(token.logprob or 0.0):.3f} of: {others}")

        asked = client.generate("The capital of France is Paris", max_tokens=1, prompt_logprobs=0, echo=True)
        scored = asked.prompt.logprobs if asked.prompt else ()
        # Nothing comes before the first token, so it has no probability.
        total = sum(token.logprob for token in scored if token.logprob is not None)
        print(f"the prompt of {len(scored)} tokens: {total:.2f} nats")


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["127.0.0.1:50051"])
