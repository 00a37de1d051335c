"""Matrices of a step on a GPU as they are multiplied: one file for each kind.

product.py  the interface of those that are quantised
dense.py    numbers of 16 or 32 bits, which kernels of few rows and the library multiply
packed.py   codes of four or eight bits that are unpacked in registers
scaled.py   FP8 and int8 that take inputs of their own format; scaled_mm.py is the library's product
experts.py  experts of full numbers or packed codes
make.py     the choice among them
joined.py   matrices of one input in several kinds, one after another
"""
