"""Quantised matrices of Hugging Face folders: one file for each scheme.

gptq.py                GPTQ's packed whole numbers of 2, 4 or 8 bits (AutoGPTQ, GPTQModel)
awq.py                 AWQ's four bits (AutoAWQ's GEMM layout)
auto_round.py          AutoRound's, in the tensors of one of these two
compressed_tensors.py  llm-compressor's whole numbers of 4 or 8 bits, packed or not, and FP8
bitsandbytes.py        NF4, FP4 and LLM.int8()
modelopt.py            NVIDIA Model Optimizer's FP8
mxfp4.py               MXFP4 of experts' matrices (gpt-oss)
fp8.py                 FP8 with a scale for each rectangle, or for a whole matrix (DeepSeek, Qwen3-FP8)

A `Scheme` (scheme.py) reads a matrix, or a rectangle of it (region.py), as the full numbers that its file
stands for, or as `Codes` (integer_codes.py): where these have four bits and groups of whole blocks,
precisions gguf and int8 keep them as they are. `scheme_of` (schemes.py) chooses the scheme of a folder's
config. What a config says of activations is not followed: they are rounded as the precision says, whatever
tool wrote the file.
"""

from diptych.engine.weights.quantised.integer_codes import Codes
from diptych.engine.weights.quantised.scheme import HeldTensors, Scheme, Tensors
from diptych.engine.weights.quantised.schemes import scheme_of

__all__ = ["Codes", "HeldTensors", "Scheme", "Tensors", "scheme_of"]
