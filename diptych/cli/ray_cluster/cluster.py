"""Ray cluster of the command: its connection, its nodes, its actors and placement groups.

The only file that needs Ray in the process of `diptych up`; it imports Ray where that is used.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from diptych.cli.preflight import BadOptions
from diptych.cli.ray_cluster.actor import ProgramActor, ProgramStart, node_address
from diptych.cli.ray_cluster.placement import LOCAL, Group, Node

_FOR_EVER = -1


@contextlib.contextmanager
def connected(address: str) -> Iterator[RayCluster]:
    """Join the cluster at `address`, as ray.init has it, or start one here for LOCAL; leave it at the end.

    Raises BadOptions where Ray is not installed, or no cluster answers.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise BadOptions("--ray needs the package 'ray': pip install 'diptych[ray]'") from None
    if address.startswith("ray://"):
        raise BadOptions("--ray: the command itself runs on a node of the cluster, not as a Ray client")
    if address == LOCAL:  # Ray's workers, and so our programs, would run behind all others, at niceness 15
        os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        ray.init(address=address, log_to_driver=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise BadOptions(f"--ray {address}: {error}") from None
    try:
        yield RayCluster(address)
    finally:
        ray.shutdown()


class RayCluster:
    """Nodes, actors and placement groups of a cluster that this process has joined."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.here = node_address()
        self._groups: list[Any] = []

    def nodes(self) -> list[Node]:
        """Return the nodes that are alive."""
        import ray

        alive = [one for one in ray.nodes() if one["Alive"]]
        return [
            Node(
                one["NodeManagerAddress"],
                one["Resources"].get("CPU", 0.0),
                one["Resources"].get("GPU", 0.0),
            )
            for one in alive
        ]

    def start_group(self, group: Group, starts: Mapping[str, ProgramStart]) -> dict[str, Any]:
        """Start the actors of a placement group, and return them by name; they wait for room where there is
        none.
        """
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundles = [dict(resources) for resources in group.bundles.values()]
        placed = placement_group(bundles, strategy=group.strategy)
        self._groups.append(placed)
        return {
            name: self._actor(
                starts[name],
                bundles[index],
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placed, placement_group_bundle_index=index
                ),
            )
            for index, name in enumerate(group.bundles)
        }

    def start_alone(self, start: ProgramStart, *, stays: bool) -> Any:
        """Start an actor that takes no CPUs, on any node, or only on that of the command."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        return self._actor(start, {}, **({"scheduling_strategy": here} if stays else {}))

    def kill(self, actor: Any) -> None:
        """End an actor for good, and its program with it."""
        import ray

        ray.kill(actor, no_restart=True)

    def remove_groups(self) -> None:
        """Give the rooms of all placement groups back."""
        from ray.util.placement_group import remove_placement_group

        while self._groups:
            remove_placement_group(self._groups.pop())

    def _actor(self, start: ProgramStart, resources: Mapping[str, float], **placed: Any) -> Any:
        import ray

        others = {name: share for name, share in resources.items() if name not in ("CPU", "GPU")}
        return (
            ray.remote(ProgramActor)
            .options(
                num_cpus=resources.get("CPU", 0.0),
                num_gpus=resources.get("GPU", 0.0),
                resources=others,
                max_restarts=_FOR_EVER,
                **placed,
            )
            .remote(start)
        )
