"""Longrope of Phi-3: its older names, and the table that the served context chooses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diptych.engine.models.config_fields import resolve_config, shape_from_config
from diptych.engine.models.rope import inverse_frequencies, rotary_magnitudes
from diptych.engine.models.shape import ModelShape, UnsupportedModel
from tests.diptych.engine.models.published_configs import PUBLISHED

LONG = PUBLISHED["Phi-3-mini-128k-instruct"]


def shape_of(config: dict[str, object]) -> ModelShape:
    return shape_from_config(resolve_config(config), tied=False)


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_older_names_of_longrope_give_the_same_shape(name: str) -> None:
    scaling = {**LONG["rope_scaling"], "type": name}
    assert shape_of({**LONG, "rope_scaling": scaling}) == shape_of(LONG)


def test_served_context_chooses_the_factors() -> None:
    shape = shape_of(LONG)
    short = replace(shape, max_context=4096)
    plain = 10000.0 ** (-torch.arange(0, 96, 2) / 96)
    for served, factors in (
        (shape, LONG["rope_scaling"]["long_factor"]),
        (short, LONG["rope_scaling"]["short_factor"]),
    ):
        torch.testing.assert_close(inverse_frequencies(served), plain / torch.tensor(factors))
    # The magnitude is that of the whole context in both, as transformers has it.
    assert torch.equal(rotary_magnitudes(shape), rotary_magnitudes(short))


def test_factors_of_another_number_of_pairs_are_refused() -> None:
    scaling = {**LONG["rope_scaling"], "short_factor": [1.0] * 47}
    with pytest.raises(UnsupportedModel, match="47 and 48 factors for 48 pairs"):
        shape_of({**LONG, "rope_scaling": scaling})
