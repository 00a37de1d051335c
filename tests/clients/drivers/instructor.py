"""Driver of instructor over openai-python."""

from __future__ import annotations

import client_paths as paths
import instructor
import openai
from client_paths import Server
from instructor.core.exceptions import InstructorError, InstructorRetryException
from typed_answer import Capital

KNOBS = {"max_tokens": 150, "temperature": 0, "max_retries": 0}


def connect(server: Server, mode: instructor.Mode) -> instructor.Instructor:
    client = openai.OpenAI(base_url=server.url, api_key="any", max_retries=0, timeout=120)
    return instructor.from_openai(client, mode=mode, model=server.model)


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def plain(server: Server) -> None:
    client = connect(server, instructor.Mode.JSON_SCHEMA)
    answer = client.create(response_model=None, messages=[user(paths.QUESTION)], **KNOBS)
    paths.check("Paris" in answer.choices[0].message.content, answer)


def streamed(server: Server) -> None:
    client = connect(server, instructor.Mode.JSON_SCHEMA)
    pieces = list(client.create_partial(response_model=Capital, messages=[user(paths.QUESTION)], **KNOBS))
    paths.check(pieces and pieces[-1].capital, pieces)


def structured(server: Server) -> None:
    """Typed output in each mode that asks for JSON."""
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON, instructor.Mode.MD_JSON):
        client = connect(server, mode)
        knobs = KNOBS | {"max_retries": 0 if mode is instructor.Mode.JSON_SCHEMA else 1}
        try:
            answer = client.create(response_model=Capital, messages=[user(paths.QUESTION)], **knobs)
            paths.check(isinstance(answer, Capital), answer)
        except InstructorError as error:  # the other modes leave the shape to the model
            if mode is instructor.Mode.JSON_SCHEMA or paths.is_refusal(error):
                raise


def tools(server: Server) -> None:
    """Typed output by a forced call, plain and strict, whole and streamed."""
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
        client = connect(server, mode)
        answer = client.create(response_model=Capital, messages=[user(paths.QUESTION)], **KNOBS)
        paths.check(isinstance(answer, Capital), answer)
        pieces = list(client.create_partial(response_model=Capital, messages=[user(paths.QUESTION)], **KNOBS))
        paths.check(pieces and pieces[-1].capital, pieces)


def second_turn(server: Server) -> None:
    client = connect(server, instructor.Mode.JSON_SCHEMA)
    _, raw = client.create_with_completion(response_model=Capital, messages=[user(paths.QUESTION)], **KNOBS)
    turn = raw.choices[0].message.model_dump()
    answer = client.create(
        response_model=Capital, messages=[user(paths.QUESTION), turn, user(paths.FOLLOW_UP)], **KNOBS
    )
    paths.check(isinstance(answer, Capital), answer)


def overflow(server: Server) -> str:
    client = connect(server, instructor.Mode.JSON_SCHEMA)
    return paths.expect_overflow(
        lambda: client.create(response_model=Capital, messages=[user(paths.LONG_PROMPT)], **KNOBS),
        InstructorRetryException,
        openai.BadRequestError,
    )


def cancel(server: Server) -> None:
    client = connect(server, instructor.Mode.JSON_SCHEMA)
    stream = client.create(
        response_model=None,
        messages=[user(paths.STORY)],
        stream=True,
        **KNOBS | {"max_tokens": paths.ENDLESS_TOKENS},
    )
    next(iter(stream))
    stream.close()
    paths.expect_idle(server)


if __name__ == "__main__":
    paths.report(
        {
            "plain": plain,
            "streamed": streamed,
            "structured": structured,
            "tools": tools,
            "second turn": second_turn,
            "overflow": overflow,
            "cancel": cancel,
        }
    )
