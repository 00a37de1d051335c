"""Without the client: generated stubs, messages, and gRPC's errors with their details.

Besides the stubs it needs grpcio and grpcio-status.
"""

import sys

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc


def main(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = rpc.InferenceServiceStub(channel)
        model = stub.ListModels(pb.ListModelsRequest()).models[0]
        print("model:", model.name)
        request = pb.GenerateRequest(
            model=model.name,
            chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Where is Rome?")]),
            sampling=pb.SamplingParams(temperature=0.0),
            stopping=pb.StoppingCriteria(max_tokens=16),
        )
        call = stub.StreamGenerate(request, timeout=60)
        for message in call:
            for output in message.outputs:
                print(output.text, end="", flush=True)
            if message.HasField("usage"):
                print("\ntokens:", message.usage.completion_tokens)
        print("request id:", dict(call.trailing_metadata())["x-request-id"])

        request.sampling.top_p = 2.0
        try:
            stub.Generate(request)
        except grpc.RpcError as error:
            print("refused:", error.code().name, error.details())
            status = rpc_status.from_call(error)
            bad = error_details_pb2.BadRequest()
            for detail in status.details if status else ():
                if detail.Unpack(bad):
                    print("field:", bad.field_violations[0].field)


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["127.0.0.1:50051"])
