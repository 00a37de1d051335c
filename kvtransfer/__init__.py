"""The handoff of KV blocks from a prefill worker to a decode worker: credit, push, fence.

The decode worker alone owns its block pool. It grants blocks to an attempt when the prefill worker is about
to run it (credit), the prefill worker fills them (push) and ends with a commit, which promises that no
further write comes. A grant that is given up earlier goes to quarantine and leaves it on proof only: the
writer's Stopped, or its death (fence). Timers escalate; they never free a block.

    messages, receiver, sender, lease    state machines: events in, actions out; no I/O, no clock
    server, client                       their drivers: gRPC streams, callbacks into the two programs
    transports/                          how bytes get there: in place (shared memory, one GPU), pushed
                                         into a mapped pool (CUDA IPC), in a world of two (NCCL, Gloo), tcp
    fingerprint, digest, fence           what two workers must agree on, what arrived, who is dead
"""
