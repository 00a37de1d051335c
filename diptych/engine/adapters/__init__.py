"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685): reading them, and what backends are given of them.

A matrix W with an adapter gives `W x + s B (A x)`: the change has a small rank and is added unmerged, so that
one step computes rows of the base and of several adapters. Files come in two formats, each with a reader:
`peft_folder.py` and `gguf_adapter.py`. Both give an `Adapter` (adapter.py) by canonical matrices
(diptych/engine/weights), whatever file the base came from: rows of B are split and reordered as those of the
base's own matrix are.
"""
