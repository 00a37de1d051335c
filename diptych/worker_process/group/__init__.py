"""A worker of several processes: rank 0 holds links, scheduler and the book of blocks, all compute.

    rank_group.py       starts the other ranks, and ends with them
    shared_memories.py  the KV memories of all ranks, by number
    group_backend.py    the backend of rank 0: sends each step's plan, computes its share, waits for the rest
    native_group_backend.py  the same where the native step computes, which waits for the others itself
    triton_group_backend.py  the same where the Triton step does, whose recorded decode steps no rank answers
    rank_program.py     the program of the other ranks; rank_load.py: what it loads; rank_steps.py: its steps
    rank_devices.py     the device of each rank
    group_adapters.py   LoRA adapters of all ranks, as rank 0 has them; rank_adapters.py: as another rank does
    orders.py           what rank 0 sends

    rendezvous.py           meeting of ranks of other hosts, and the secret they prove
    remote_rank_program.py  the program of such a rank
    remote_rank.py          a rank with memories of its own as rank 0 has it, wherever it runs
    holder_program.py       its service; spread_blocks.py: blocks whose shares are in several memories
    share_service.py        what such a rank does with shares beside its steps: share_pushes.py sends them to
                            ranks of another worker, share_arrivals.py takes theirs

The blocks hold all heads. On CPUs the ranks of one host map the same memories, their worker's own and those
of decode workers, so that each writes its heads where the one grant says. A rank on a GPU, or on another
host, holds its shares of blocks, and sends or receives them itself on rank 0's word.
"""
