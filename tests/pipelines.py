"""The way through a CUDA device, on a CPU: the same pipeline, with stand-ins for the kernels that a CPU lacks."""

from collections.abc import Callable

from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from tei_grpc.config import EngineConfig
from tei_grpc.engine.graphs import Bucket, Graphs
from tei_grpc.engine.pipeline import Pipeline
from tei_grpc.engine.placement import Placement, activations
from tei_grpc.layers.flex import Flex
from tei_grpc.layers.kernels import Kernels
from tei_grpc.layers.varlen import of_torch
from tei_grpc.loading.model_config import ModelConfig
from tei_grpc.models import Model
from tests import stand_ins

SHAPE = Bucket(tokens=192, texts=12, longest=64)  # of the one graph


class CudaStandIn(Pipeline):
    """Batches are started ahead, small ones run as graphs; `varlen_attn` loops over texts, nothing is compiled."""

    ahead = 1

    def _rounding(self, batch: object) -> tuple[int, ...]:
        return ()


def capture(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
    """A graph that runs the encoder again, from and into the memory that it was recorded with."""
    hidden = run().clone()
    return lambda: hidden.copy_(run()), hidden


def cuda_stand_in(placement: Placement, model: Model, config: ModelConfig, options: EngineConfig) -> Pipeline:
    """As `build_pipeline` for CUDA. Graphs are there after `warm_up`."""
    if not model.optimized:
        return CudaStandIn(placement.device, model)
    flash = next(of_torch(stand_ins.varlen_attn))
    kernels = Kernels(activations(placement.dtype), flash, lambda: Flex(flex_attention))
    pipeline = CudaStandIn(placement.device, model, kernels)
    shapes = [SHAPE._replace(longest=min(SHAPE.longest, config.max_input_length))]
    pipeline.graphs = Graphs(model.encode, capture, shapes, config.hf_config["vocab_size"])
    return pipeline
