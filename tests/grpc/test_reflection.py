import asyncio
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tei_grpc.pb import tei_pb2

SERVICES = {
    "tei.v1.Info",
    "tei.v1.Embed",
    "tei.v1.Predict",
    "tei.v1.Rerank",
    "tei.v1.Tokenize",
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
}
VERSIONS = ["v1", "v1alpha"]


async def ask(served, version, **question):
    """v1 and v1alpha have the same messages, so one set of classes speaks both."""
    call = served.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )(iter([reflection_pb2.ServerReflectionRequest(**question)]))
    return await anext(aiter(call))


@pytest.mark.parametrize("version", VERSIONS)
async def test_all_services_are_listed(served, version):
    reply = await ask(served, version, list_services="")
    assert {service.name for service in reply.list_services_response.service} == SERVICES


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("symbol", sorted(SERVICES))
async def test_every_listed_service_can_be_described(served, version, symbol):
    reply = await ask(served, version, file_containing_symbol=symbol)
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(raw)
        for raw in reply.file_descriptor_response.file_descriptor_proto
    ]
    assert symbol in {f"{file.package}.{service.name}" for file in files for service in file.service}


async def test_contract_is_described_whole_and_with_json_names(served):
    reply = await ask(served, "v1", file_by_filename="tei.proto")
    (raw,) = reply.file_descriptor_response.file_descriptor_proto
    file = descriptor_pb2.FileDescriptorProto.FromString(raw)
    fields = [field for message in file.message_type for field in message.field]
    assert {field.name: field.json_name for field in fields}["compute_tokens"] == "computeTokens"
    for field in fields:
        field.ClearField("json_name")
    assert file == descriptor_pb2.FileDescriptorProto.FromString(tei_pb2.DESCRIPTOR.serialized_pb)


@pytest.mark.parametrize("version", VERSIONS)
async def test_unknown_symbol_is_an_error_in_the_reply(served, version):
    assert (await ask(served, version, file_containing_symbol="nope.Nope")).error_response.error_code == 5


async def test_grpcurl_needs_no_proto_file(served):
    grpcurl = Path(sys.executable).with_name("grpcurl")
    arguments = ("-plaintext", "-d", '{"inputs": "w0", "normalize": false}', served.address, "tei.v1.Embed/Embed")
    process = await asyncio.create_subprocess_exec(grpcurl, *arguments, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert b'"computeTokens": 3' in output
