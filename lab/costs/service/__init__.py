"""Cost of a whole system beside the bare engine: tokens a second, and CPU time of a token.

    python -m lab.costs.service [--clients 16] [--rounds 6] [--dtype auto]

Bare is the engine alone on all cores: the prompts of all clients one after the other, then steps of all of
them, each drawing its tokens. The system is `diptych up` as a user starts it, under a closed loop of as many
clients with the same lengths, whose load generator computes on the same cores. Both by turns, in alternating
order, so that the machine's drift meets both; ratios are taken within a round.

The second table says which process, and in it whether the thread of the event loop or the others, had the
CPU time of a token.
"""
