"""Owns a batch's way through a device: onto it, through the encoder, and back to the host.

On a CPU every step is done when it returns. On CUDA a step is only started: copies run on streams of their own, through
pinned memory, beside the batch that computes, and nobody waits before the answers are read.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tei_grpc.config import EngineConfig
from tei_grpc.engine.compiled import Compiled
from tei_grpc.engine.graphs import Graphs, buckets, cuda_capture
from tei_grpc.engine.placement import Placement, activations
from tei_grpc.errors import StartupError
from tei_grpc.layers.cpu_kernels import CpuKernels
from tei_grpc.layers.kernels import Kernels, choose_kernels
from tei_grpc.layers.packed import PackedInputs, place, rounded_rows
from tei_grpc.loading.model_config import ModelConfig
from tei_grpc.models import Model
from tei_grpc.types import Batch

BLANK = 8  # tokens of a text that fills up: a vector's worth, so that attention has least to do

BuildPipeline = Callable[[Placement, Model, ModelConfig, EngineConfig], "Pipeline"]


class Mark(NamedTuple):
    """A point in what a device does."""

    wait: Callable[[], object]  # until all that was started before is done
    is_done: Callable[[], bool]


class Pipeline:
    """A CPU, or MPS."""

    ahead = 0  # batches that are started while another one computes

    def __init__(self, device: torch.device, model: Model, attend: Kernels | CpuKernels | None = None) -> None:
        """`attend`: the device's own kernels."""
        self.device = device
        self._model = model
        self._attend = attend
        self.graphs: Graphs | None = None  # of small batches
        self.compiled: Compiled | None = None  # for larger ones

    @property
    def kernels(self) -> str:
        """What attention runs on, as far as batches have met it."""
        if not self._model.optimized:
            return "transformers"
        return ", ".join(self._attend.names) if self._attend else "blocks"

    def warm_up(self, longest: int) -> None:
        """Record and compile, for texts of up to `longest` tokens. Raises StartupError and torch.OutOfMemoryError."""
        if self.graphs:
            self.graphs.record(self._place)
        if self.compiled:
            self.compiled.prove(self._place, longest)

    def encode(self, batch: Batch, *, plain: bool = False) -> tuple[PackedInputs, Tensor]:
        """Start the encoder on a batch: hidden states, [tokens, hidden]. Blank texts may lie behind those of the batch.

        `plain` is for models in other numbers than they were loaded in: no graph, nothing compiled.
        """
        if plain:
            inputs = self._place(batch)
            return inputs, self._model.encode(inputs)
        bucket = self.graphs.find(batch) if self.graphs else None
        if self.graphs and bucket:
            inputs = self._place(batch, bucket.blank(batch))
            return inputs, self.graphs.encode(bucket, inputs)
        inputs = self._place(batch, self._rounding(batch))
        return inputs, self.compiled(inputs) if self.compiled else self._model.encode(inputs)

    def fetch(self, values: Tensor) -> Tensor:
        """Start copying to the host."""
        return values.cpu()

    def mark(self) -> Mark:
        """Behind all that was started before this call."""
        return Mark(lambda: None, lambda: True)

    def reset(self) -> None:
        """Let go of what a batch that failed has left behind."""

    def _place(self, batch: Batch, blank: Sequence[int] = ()) -> PackedInputs:
        return place(batch, self.device, blank=blank, attend=self._attend)

    def _rounding(self, batch: Batch) -> Sequence[int]:
        """OneDNN keeps something for each number of rows; transformers' models, and other devices, do not run on it."""
        if self.device.type != "cpu" or not self._model.optimized:
            return ()
        tokens = len(batch.input_ids)
        whole, rest = divmod(rounded_rows(tokens) - tokens, BLANK)
        return [BLANK] * whole + [rest] * (rest > 0)


class CudaPipeline(Pipeline):
    """A CUDA device. Its current stream computes; two more copy, one in each direction."""

    ahead = 1

    def __init__(self, device: torch.device, model: Model, attend: Kernels | None = None) -> None:
        super().__init__(device, model, attend)
        self._inbound, self._outbound = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def fetch(self, values: Tensor) -> Tensor:
        """Into pinned memory, which may be read once `mark` says so."""
        self._outbound.wait_stream(torch.cuda.current_stream(self.device))
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        with torch.cuda.stream(self._outbound):
            host.copy_(values, non_blocking=True)
        values.record_stream(self._outbound)  # its memory must not be given to another tensor before
        return host

    def mark(self) -> Mark:
        """An event: the thread sleeps until the copies are there, whatever the device does next."""
        self._outbound.wait_stream(torch.cuda.current_stream(self.device))
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._outbound)
        return Mark(event.synchronize, event.query)

    def reset(self) -> None:
        """Cached blocks of the wrong sizes are what a smaller batch may need."""
        torch.cuda.empty_cache()

    def _place(self, batch: Batch, blank: Sequence[int] = ()) -> PackedInputs:
        computing = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._inbound):
            inputs = super()._place(batch, blank)
        computing.wait_stream(self._inbound)
        for tensor in (inputs.input_ids, inputs.cu_seqlens):  # the others share the memory of the first
            tensor.record_stream(computing)
        return inputs


def build_pipeline(placement: Placement, model: Model, config: ModelConfig, options: EngineConfig) -> Pipeline:
    """The device's own. Raises StartupError."""
    device = placement.device
    if device.type != "cuda":
        if options.torch_compile:
            raise StartupError(f"`--torch-compile` is for CUDA devices, the model runs on {device}")
        return Pipeline(device, model, CpuKernels() if device.type == "cpu" else None)
    if not model.optimized:
        return CudaPipeline(device, model)
    kernels = choose_kernels(device, activations(placement.dtype), flash=options.use_flash_attention)
    pipeline, vocabulary = CudaPipeline(device, model, kernels), config.hf_config["vocab_size"]
    shapes = buckets(options.max_batch_tokens, config.max_input_length)
    pipeline.graphs = Graphs(model.encode, cuda_capture(), shapes, vocabulary)
    if options.torch_compile:
        pipeline.compiled = Compiled(model.encode, vocabulary)
    return pipeline
