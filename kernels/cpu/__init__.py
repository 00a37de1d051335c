"""The native CPU step: one C++ call that computes a whole batch through all layers.

Sources lie beside this file; setup.py builds them into one shared library with a C interface (abi.h), which
library.py loads through ctypes. Nothing of torch or Python is compiled in.

How to read the sources: abi.h is the contract; step_state.* the batch as all threads see it, with its checks;
step_queue.* the steps launched ahead; step_body.h the phases of a step, attention_tasks.h those of attention;
gemm.h, attention.h, write_kv.h and vector_math.h their arithmetic, written in terms of the registers of
simd_*.h. What multiplies is a policy: gemm_pairs.h and gemm_tiles.h for bf16, gemm_blocks.h for matrices in
GGUF's blocks (blocks.h is how these lie in memory, quantise.h makes the activations, dot_*.h their products),
gemm_bytes.h for 8-bit ones (the same in bytes.h, quantise_rows.h, outlier_columns_avx512.h and byte_dot_*.h);
attention_pairs.h is attention where bf16 pairs can be multiplied. A rank of a group computes its share of a
model (model_share.h) and meets the others between phases (shared_sums.h, rank_exchange.h). Each isa_*.cpp
compiles all of that for one instruction set, and dispatch.cpp chooses among them at run time. `make sanitize`
checks memory and undefined behaviour.
"""
