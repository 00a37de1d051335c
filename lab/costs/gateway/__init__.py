"""Cost of the gateway, and of each API: gRPC, KServe's protocol, OpenAI's HTTP.

    python -m lab.costs.gateway [--system played --system whole] [--streams 16] [--rounds 3]

Two systems, each with ``streams`` requests at a time, the APIs by turns in every round:

- `played`: a real gateway with the bundled model's tokenizer, whose workers are played by this process and
  have no engine. What the gateway's process uses while nothing is asked is subtracted.
- `whole`: `diptych up` with the bundled model, as a user starts it: tokens a second by API.

A cost is CPU time of all threads of the gateway's process, gRPC's own included, not wall time; still the
cores are shared with workers and clients, so run it on a quiet machine.
"""
