"""Several questions at once, a stream that is left early, and one that is ended from elsewhere."""

import asyncio
import sys

from diptych.client import AsyncClient, chat

PLACES = ("France", "Italy", "Japan")


async def main(address: str) -> None:
    async with AsyncClient(address) as client:
        answers = await asyncio.gather(
            *(client.generate(chat(f"What is the capital of {place}?"), max_tokens=16) for place in PLACES)
        )
        for place, answer in zip(PLACES, answers, strict=True):
            print(f"{place}: {answer.text}")

        # Leaving the block cancels the request: its workers stop within a step.
        async with client.stream("Once upon a time", max_tokens=200, ignore_eos=True) as stream:
            async for _ in stream:
                if len(stream.received.completion().token_ids) >= 8:
                    break
        print("left after:", stream.received.completion().text)

        # Who knows the id may end a request, from any connection.
        async with client.stream(
            "Once upon a time", max_tokens=200, ignore_eos=True, request_id="story-1"
        ) as stream:
            async for chunk in stream:
                if chunk.request_id:
                    print("was running:", await client.cancel(chunk.request_id))
        print("ended as:", stream.received.completion().finish_reason)

        print("no such one:", await client.cancel("story-1"))
        tokens = await client.tokenize("Once upon a time")
        print("tokens:", tokens.ids, "text:", await client.detokenize(tokens.ids))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2] or ["127.0.0.1:50051"]))
