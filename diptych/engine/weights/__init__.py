"""A model's tensors under canonical names, whatever file they came from.

`gguf_file.py` reads GGUF files, `safetensors_folder.py` Hugging Face folders, quantised ones too
(quantised_matrices.py, quantised/); both give the `Weights` of `canonical.py` and a `ModelShape`
(diptych/engine/models/shape.py), whole or of some parts of the model (part_weights.py).
The canonical form, with all matrices `[out, in]` as torch.nn.functional.linear takes them, rows of q and k in
Hugging Face's order (the rotation pairs lane i with lane i + head_dim/2 of a head; the GGUF reader undoes
llama.cpp's interleaving; where a part of each head is rotated, `lane_order` of models/rope.py says which):

    Weights        embed [vocab, hidden], layers (one LayerWeights each), final_norm [hidden],
                   final_norm_bias or None, head [vocab, hidden] or None when tied to embed
    LayerWeights   input_norm and post_norm [hidden], before attention and feed-forward, their biases,
                   attention_out_norm and feed_forward_out_norm [hidden], of what they add, or None,
                   q [heads*head_dim, hidden], k and v [kv_heads*head_dim, hidden],
                   q_bias, k_bias, v_bias or None, q_gate [heads*head_dim, hidden] or None,
                   q_norm and k_norm [head_dim] or as wide as q and k, or None,
                   o [hidden, heads*head_dim], o_bias or None, sinks [heads] or None,
                   gate and up [intermediate, hidden], down [hidden, intermediate], gate or all None,
                   gate_bias, up_bias, down_bias or None, experts (ExpertWeights) or None,
                   recurrent: tensors of a recurrence by name (models/recurrent.py) or None; a layer that does
                   not attend has q, k, v and o without rows

The shape says which are there (`layer_shapes` in canonical.py).
All tensors are contiguous, on the CPU, and stored as the precision says (diptych/engine/dtype.py): in fp32
and bf16 all in that dtype, norms too, but for routers, sinks and norms that a family stores less one, which
are float32; in gguf the matrices are BlockMatrix (kernels/quantised_linear.py), in
int8 ByteMatrix (kernels/byte_linear.py) or, where the file has codes of four bits, the same bytes in such
codes, CodedBytes (kernels/byte_codes.py); the head is always among them, `embed` is bfloat16, and all else
float32.
"""

from diptych.engine.weights.canonical import (
    BadModelFile,
    Checkpoint,
    ExpertWeights,
    LayerWeights,
    Matrix,
    Storage,
    Weights,
)

__all__ = ["BadModelFile", "Checkpoint", "ExpertWeights", "LayerWeights", "Matrix", "Storage", "Weights"]
