"""Open Inference Protocol over HTTP: the paths below ``/v2``, with the requests and answers of the gRPC form.

json_form.py    bodies → ``ModelInferRequest``, and messages → JSON
routes.py       the paths
"""
