"""Names that stand for models by weight."""

from __future__ import annotations

import pytest

from gateway.model.aliases import BadAlias, ModelAlias, Share, check_targets, parse_aliases, sticky_point


def shares_of(alias: ModelAlias, ready: set[str], points: int = 1000) -> dict[str, int]:
    """Return how many of evenly spread points each model gets."""
    found: dict[str, int] = {}
    for number in range(points):
        model = alias.choose((number + 0.5) / points, ready.__contains__)
        found[model] = found.get(model, 0) + 1
    return found


def test_text_is_parsed_as_aliases_with_weights() -> None:
    chat, other = parse_aliases("chat=v1:90,v2:10,other=org/model:2025")
    assert chat == ModelAlias("chat", (Share("v1", 90), Share("v2", 10)))
    assert other == ModelAlias("other", (Share("org/model", 2025),))
    assert parse_aliases("gpt=v1") == (ModelAlias("gpt", (Share("v1", 1),)),)
    assert parse_aliases("") == ()


@pytest.mark.parametrize(
    "text",
    ["v1", "chat=", "chat=v1,v1", "chat=chat", "chat=v1:0", "chat=v1,chat=v2", " x=v1", "c=v:1000001", "=v1"],
)
def test_text_that_is_no_alias_is_refused(text: str) -> None:
    with pytest.raises(BadAlias):
        parse_aliases(text)


def test_requests_are_shared_by_weight() -> None:
    [alias] = parse_aliases("chat=v1:90,v2:10,v3:0")
    assert shares_of(alias, {"v1", "v2", "v3"}) == {"v1": 900, "v2": 100}


def test_models_without_workers_get_nothing_while_another_has_some() -> None:
    [alias] = parse_aliases("chat=v1:50,v2:30,v3:20")
    assert shares_of(alias, {"v2", "v3"}) == {"v2": 600, "v3": 400}
    assert shares_of(alias, set()) == {"v1": 500, "v2": 300, "v3": 200}


def test_sessions_stay_with_their_model_and_are_spread() -> None:
    points = [sticky_point("chat", str(number)) for number in range(2000)]
    assert points == [sticky_point("chat", str(number)) for number in range(2000)]
    assert abs(sum(point < 0.9 for point in points) / 2000 - 0.9) < 0.03
    assert sticky_point("a", "bc") != sticky_point("ab", "c")


def test_targets_must_be_models() -> None:
    check_targets(parse_aliases("chat=v1"), ["v1"])
    with pytest.raises(BadAlias, match="stands for v1, which is none of v2, v3"):
        check_targets(parse_aliases("chat=v1"), ["v2", "v3"])
    with pytest.raises(BadAlias, match="v2 is the name of a model"):
        check_targets(parse_aliases("v2=v1"), ["v1", "v2"])
