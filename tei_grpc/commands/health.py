"""`tei-grpc health`: one line and an exit code, for container probes. Imports grpc only, to be quick."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

NO_PROXY = (("grpc.enable_http_proxy", 0),)  # the server is on this machine, whatever http_proxy says


def check(address: str, service: str, timeout: float) -> int:
    """Ask the server at `address` (HOST:PORT or unix:PATH) about `service`; return 0 if SERVING, else 1.

    `timeout` is in seconds and covers everything, from connecting to the answer.
    """
    with grpc.insecure_channel(address, options=NO_PROXY) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
        except grpc.RpcError as error:
            print(f"{address}: {error.code().name}: {error.details()}")
            return 1
    print(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)}")
    return 0 if reply.status == health_pb2.HealthCheckResponse.SERVING else 1
