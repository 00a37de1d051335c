"""Dealing of layers to the stages of a pipeline, and of a group's processes to stages and ranks. Pure.

Processes are numbered stage by stage: with two ranks of tensor parallelism, 0 and 1 are the first stage,
2 and 3 the second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from diptych.engine.models.shape import ModelShape, UnsupportedModel
from diptych.engine.parallel.parts import deal


@dataclass(frozen=True)
class Stage:
    """Layers in a row that some ranks compute, of a model of `of_layers`."""

    layers: range
    of_layers: int

    @property
    def is_first(self) -> bool:
        """True for the stage that begins with embeddings."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """True for the stage that ends with logits."""
        return self.layers.stop == self.of_layers

    def columns_of_rows(self, hidden_size: int) -> slice:
        """Return the columns of rows of images (`EmbeddingRows.rows`) that this stage takes: what enters its
        first layer, which is given in the model's first stage alone, and what comes behind each layer. Rows
        of other models end before.
        """
        return slice(self.layers.start * hidden_size, (self.layers.stop + 1) * hidden_size)

    def shape_of(self, shape: ModelShape) -> ModelShape:
        """Return the shape of the shallower model that this stage of `shape` is."""
        return replace(shape, layers=shape.layers[self.layers.start : self.layers.stop])


@dataclass(frozen=True)
class Grid:
    """Processes of a group: `stages` of `ranks` each."""

    ranks: int
    stages: int = 1

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.ranks * self.stages

    def place(self, number: int) -> tuple[int, int]:
        """Return the stage of a process, and its rank within it."""
        return divmod(number, self.ranks)


def deal_stages(shape: ModelShape, count: int) -> tuple[Stage, ...]:
    """Deal the layers of a model to `count` stages, whose numbers of layers differ by 1 at most.

    Raises UnsupportedModel for more stages than layers.
    """
    if count > shape.num_layers:
        raise UnsupportedModel(f"--pipeline-parallel {count}: the model has {shape.num_layers} layers")
    return tuple(Stage(layers, shape.num_layers) for layers in deal(shape.num_layers, count))
