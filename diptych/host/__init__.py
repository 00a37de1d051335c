"""The program that hosts a prefill and a decode worker in one process, over one copy of the weights.

The two workers are those of their own programs, each with its server, its engine loop, its id in the
directory and its ports; neither knows of the other. What they share is made here: the weights, the streams of
their GPU, its turns. A handoff between them moves nothing (kvtransfer/transports/in_process.py).
"""
