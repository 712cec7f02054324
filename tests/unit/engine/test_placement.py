"""Where a model runs, and in which numbers, for every machine."""

import pytest
import torch

from tei_grpc.config import EngineConfig
from tei_grpc.engine.pipeline import Pipeline, build_pipeline
from tei_grpc.engine.placement import Placement, activations, choose_device, choose_dtype
from tei_grpc.errors import StartupError
from tei_grpc.loading.model_config import read_model_config
from tests import folders

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda:0", "mps"))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    def has(cuda: int = 0, *, mps: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return has


@pytest.mark.parametrize(
    ("cuda", "mps", "wanted", "found"),
    [
        (0, False, "auto", "cpu"),
        (0, True, "auto", "mps"),
        (2, False, "auto", "cuda:0"),
        (2, True, "auto", "cuda:0"),
        (2, False, "cuda", "cuda:0"),
        (2, False, "cuda:1", "cuda:1"),
        (2, True, "mps", "mps"),
        (2, True, "cpu", "cpu"),
    ],
)
def test_device(machine, cuda: int, mps: bool, wanted: str, found: str) -> None:
    machine(cuda, mps=mps)
    assert choose_device(wanted) == torch.device(found)


@pytest.mark.parametrize(
    ("cuda", "wanted", "there"),
    [(0, "cuda", "cpu"), (2, "cuda:2", "cuda:0, cuda:1, cpu"), (1, "mps", "cuda:0, cpu")],
)
def test_absent_device_is_an_error_that_names_those_that_are_there(machine, cuda: int, wanted: str, there: str) -> None:
    machine(cuda)
    with pytest.raises(StartupError) as raised:
        choose_device(wanted)
    assert raised.value.message == f"`--device` (DEVICE): there is no `{wanted}` here; there is: {there}"


@pytest.mark.parametrize(
    ("device", "config", "expected"),
    [
        (CUDA, {"dtype": "bfloat16"}, "bfloat16"),
        (CUDA, {"torch_dtype": "float16"}, "float16"),
        (CUDA, {"torch_dtype": "float32"}, "float16"),
        (CUDA, {}, "float16"),
        (CPU, {"dtype": "bfloat16"}, "float32"),
        (MPS, {"dtype": "float16"}, "float32"),
    ],
)
def test_dtype_that_nobody_chose_suits_the_device(device: torch.device, config: dict, expected: str) -> None:
    assert choose_dtype(None, device, config) == expected


def test_dtype_of_the_options_wins() -> None:
    assert choose_dtype("float32", CUDA, {"dtype": "bfloat16"}) == "float32"


@pytest.mark.parametrize("device", [CUDA, MPS])
def test_int8_is_for_cpus(device: torch.device) -> None:
    with pytest.raises(StartupError, match="int8 is for CPUs, the model runs on"):
        choose_dtype("int8", device, {})


def test_activations_of_int8_are_bfloat16() -> None:
    assert activations("int8") == torch.bfloat16
    assert activations("float16") == torch.float16


@pytest.mark.parametrize(("device", "kernels"), [(CPU, ""), (MPS, "blocks")])  # a CPU's are chosen at warm-up
def test_devices_without_streams_of_their_own_run_like_a_cpu(tmp_path, device: torch.device, kernels: str) -> None:
    options = EngineConfig(model_id=str(folders.embedder(tmp_path)))
    model = torch.nn.Module()
    model.optimized, model.encode = True, lambda inputs: inputs
    pipeline = build_pipeline(Placement(device, "float32"), model, read_model_config(tmp_path, options), options)
    assert type(pipeline) is Pipeline
    assert (pipeline.ahead, pipeline.kernels) == (0, kernels)


def test_compiling_is_for_cuda_devices(tmp_path) -> None:
    options = EngineConfig(model_id=str(folders.embedder(tmp_path)), torch_compile=True)
    with pytest.raises(StartupError, match="`--torch-compile` is for CUDA devices, the model runs on cpu"):
        build_pipeline(Placement(CPU, "float32"), torch.nn.Module(), read_model_config(tmp_path, options), options)
