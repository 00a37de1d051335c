"""What a worker says several times a second: that its engine moves or how late its step is, and its load."""

from __future__ import annotations

import time

from diptych.worker.v1 import work_pb2
from diptych.worker_process.worker_spec import EngineLoop
from kvtransfer.drivers.types import Heartbeat


def beat_of(loop: EngineLoop) -> Heartbeat:
    """The engine as it is now; for the links to the workers of the other role."""
    return Heartbeat(loop.steps, loop.busy, loop.clock.late_s(time.monotonic()))


def heartbeat(loop: EngineLoop, load: work_pb2.Load) -> work_pb2.Heartbeat:
    """For the gateways; completes `load` by what the loop itself knows."""
    for one in loop.clock.times(time.monotonic()):
        said = load.step_times.add(size_class=one.size_class, steps=one.steps)
        said.median.FromNanoseconds(round(one.median_s * 1e9))
    load.draining = loop.draining
    beat = beat_of(loop).to_proto()
    beat.load.CopyFrom(load)
    return beat
