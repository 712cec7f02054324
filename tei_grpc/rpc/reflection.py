"""Server reflection, v1 and v1alpha, so that grpcurl and Postman need no proto file.

grpcio-reflection ships v1alpha only. v1 is the same protocol under another package name (same messages, same
numbers), so one servicer answers both, and the descriptor of v1 is the one of v1alpha renamed.
"""

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from tei_grpc.pb import tei_pb2
from tei_grpc.rpc.methods import Methods

V1_PACKAGE, V1ALPHA_PACKAGE = "grpc.reflection.v1", "grpc.reflection.v1alpha"
V1_SERVICE = f"{V1_PACKAGE}.ServerReflection"
SERVED: tuple[FileDescriptor, ...] = (tei_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR)


def add_reflection(methods: Methods) -> None:
    """Register both versions, describing all services of this server."""
    names = [service.full_name for file in SERVED for service in file.services_by_name.values()]
    servicer = reflection.aio.ReflectionServicer([*names, V1_SERVICE, reflection.SERVICE_NAME], pool=_pool())
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, methods)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods.add_registered_method_handlers(V1_SERVICE, {"ServerReflectionInfo": handler})


def _pool() -> descriptor_pool.DescriptorPool:
    """A pool of our own: generated v1 stubs in the same process would collide with our v1 in the default pool."""
    pool = descriptor_pool.DescriptorPool()
    for file in (*map(_with_json_names, (*SERVED, reflection_pb2.DESCRIPTOR)), _v1_file()):
        pool.AddSerializedFile(file.SerializeToString())
    return pool


def _with_json_names(file: FileDescriptor) -> descriptor_pb2.FileDescriptorProto:
    """The file with every field's JSON name, by which grpcurl prints; protoc leaves it out of what Python gets."""
    described = descriptor_pb2.FileDescriptorProto.FromString(file.serialized_pb)
    for message in described.message_type:
        for field in message.field:
            field.json_name = file.message_types_by_name[message.name].fields_by_name[field.name].json_name
    return described


def _v1_file() -> descriptor_pb2.FileDescriptorProto:
    """The v1alpha file with its package, and every reference to it, renamed."""
    file = _with_json_names(reflection_pb2.DESCRIPTOR)
    file.name, file.package = "grpc/reflection/v1/reflection.proto", V1_PACKAGE
    for field in (field for message in file.message_type for field in message.field if field.type_name):
        field.type_name = _rename(field.type_name)
    for method in (method for service in file.service for method in service.method):
        method.input_type, method.output_type = _rename(method.input_type), _rename(method.output_type)
    return file


def _rename(type_name: str) -> str:
    return type_name.replace(f".{V1ALPHA_PACKAGE}.", f".{V1_PACKAGE}.")
