"""Replay of recorded traffic on a fleet that exists as numbers only: `diptych plan --trace`.

The gateway's admission queue, its router, and the schedulers of both workers are the real ones. Time is
virtual: a step takes as long as `diptych.planner.rates` says, so an hour of traffic takes seconds. Memory is
counted in blocks and not kept.
"""
