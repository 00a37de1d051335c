"""Answers of a form that is known beforehand, in each way to say which."""

import json
import sys

from diptych.client import Client, chat

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "continent": {"enum": ["Africa", "America", "Asia", "Europe", "Oceania"]},
        "is_capital": {"type": "boolean"},
    },
    "required": ["name", "continent", "is_capital"],
    "additionalProperties": False,
}
SUM = """
root ::= number " + " number " = " number
number ::= [0-9] [0-9]?
"""


def main(address: str) -> None:
    with Client(address) as client:
        answer = client.generate(chat("Describe Paris."), json_schema=CITY, max_tokens=160, temperature=0.0)
        city = json.loads(answer.text)  # it is complete if it was not cut off
        print("schema:", city["name"], city["continent"], city["is_capital"])

        answer = client.generate(chat("Is water wet?"), choice=["yes", "no", "it depends"], temperature=0.0)
        print("choice:", answer.text)

        answer = client.generate(chat("When was Python born?"), regex=r"(19|20)\d\d", temperature=0.0)
        print("regex:", answer.text)

        answer = client.generate(chat("Write a sum."), grammar=SUM, temperature=0.0)
        print("grammar:", answer.text)


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["127.0.0.1:50051"])
