"""Handoff of KV blocks from a prefill worker to a decode worker: grant, push, commit; quarantine and fence.

The decode worker alone owns its block pool. It grants blocks to an attempt when the prefill worker is about
to run it. The prefill worker fills them and ends with a commit, which promises that no further write comes. A
grant that is given up earlier goes to quarantine and leaves it on proof only: the writer's Stopped, or its
death after a fence. Timers escalate; they never free a block.

    protocol/     messages and state machines: events in, actions out; no I/O, no clock
    drivers/      server and client of the two programs: gRPC streams, clocks, callbacks
    transports/   in place (shared memory, one GPU), copied into a mapped pool (CUDA IPC),
                  over a process group of two ranks (NCCL, Gloo), over TCP

docs/handoff.md describes the protocol.
"""
