"""The native CPU step: one C++ call that computes a whole batch through all layers.

Sources lie beside this file; setup.py builds them into one shared library with a C interface (abi.h), which
library.py loads through ctypes. Nothing of torch or Python is compiled in.

How to read the sources: abi.h is the contract; step_state.* the batch as all threads see it, with its checks;
step_body.h the phases of a step; gemm.h, attention.h and vector_math.h their arithmetic, written in terms of
the registers of lanes_*.h; each isa_*.cpp compiles all of that for one instruction set, and dispatch.cpp
chooses among them at run time. To check memory and undefined behaviour:

    DIPTYCH_NATIVE_SANITIZE=1 python setup.py build_ext --inplace --force
    LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" \\
        ASAN_OPTIONS=detect_leaks=0 python -m pytest tests/kernels/cpu
"""
