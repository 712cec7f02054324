"""One file per proto service: messages to types and back, nothing else. `add_servicers` lists them all."""

from tei_grpc.engine.engine import Engine
from tei_grpc.pb import tei_pb2_grpc
from tei_grpc.rpc.methods import Methods
from tei_grpc.rpc.room import Rooms
from tei_grpc.servicers.embed import EmbedServicer
from tei_grpc.servicers.info import InfoServicer
from tei_grpc.servicers.predict import PredictServicer
from tei_grpc.servicers.rerank import RerankServicer
from tei_grpc.servicers.tokenize import TokenizeServicer


def add_servicers(methods: Methods, engine: Engine, rooms: Rooms) -> None:
    """Register every service; their streams share `rooms`."""
    tei_pb2_grpc.add_InfoServicer_to_server(InfoServicer(engine), methods)
    tei_pb2_grpc.add_EmbedServicer_to_server(EmbedServicer(engine, rooms), methods)
    tei_pb2_grpc.add_PredictServicer_to_server(PredictServicer(engine, rooms), methods)
    tei_pb2_grpc.add_RerankServicer_to_server(RerankServicer(engine, rooms), methods)
    tei_pb2_grpc.add_TokenizeServicer_to_server(TokenizeServicer(engine, rooms), methods)
