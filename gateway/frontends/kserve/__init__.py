"""KServe Open Inference Protocol v2 with Triton's streaming: a frontend of the same core.

tensors.py      tensors in, plain lists out, and the reverse
parameters.py   everything that is not the prompt, whichever way it came → ``pb.GenerateRequest``
models.py       metadata and configuration of a model
request.py      a whole ``ModelInferRequest``
answer.py       ``pb.GenerateResponse`` → ``ModelInferResponse``
servicer.py     the RPCs
"""
