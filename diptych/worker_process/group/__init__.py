"""A worker of several processes: rank 0 holds links, scheduler and the book of blocks, all compute.

    rank_group.py       starts the other ranks, and ends with them
    shared_memories.py  the KV memories that all ranks map, by number
    group_backend.py    the backend of rank 0: sends each step's plan, computes its share, waits for the rest
    native_group_backend.py  the same where the native step computes, which waits for the others itself
    rank_program.py     the program of the other ranks
    orders.py           what rank 0 sends

The blocks hold all heads. The ranks of a group run on one host and map the same memories, their worker's own
and those of decode workers, so that each writes its heads where the one grant says. Nothing but the
computation knows of ranks: a copy, a digest or a pull is of whole blocks.
"""
