"""What loading costs: memory of the process's own, beside the checkpoint's files in the page cache."""

import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import transformers

from tests.checkpoints import write_pooling

MOST = 1.15  # times the weights, above the process that has loaded nothing yet
LOADER = """
import sys
from pathlib import Path
import torch
from tei_grpc.config import EngineConfig
from tei_grpc.engine.runner import Runner
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.models import families

torch.set_num_threads(1)
config = EngineConfig(model_id=sys.argv[1], dtype=sys.argv[2])
model = read_model_config(Path(config.model_id), config)
families()
print("idle", flush=True)
sys.stdin.readline()
runner = Runner(model, config)
print("loaded", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def large_bert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Random weights of 434 MB, float32; not one layer makes up much of them."""
    folder = tmp_path_factory.mktemp("large")
    sizes = {"hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16, "intermediate_size": 4096}
    transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(folder)
    write_pooling(folder, "mean", 1024)
    yield folder
    shutil.rmtree(folder)  # pytest would keep it


def anonymous(process: psutil.Process) -> int:
    """Resident bytes that no file backs."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def peak_while_loading(folder: Path, dtype: str) -> int:
    """The most anonymous memory that was seen at any millisecond of loading, above that of the idle process."""
    command = [sys.executable, "-c", LOADER, str(folder), dtype]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin and child.stdout
        process = psutil.Process(child.pid)
        assert child.stdout.readline() == "idle\n"
        idle = peak = anonymous(process)
        child.stdin.write("load\n")
        child.stdin.flush()
        while peak - idle < 8 * weight_bytes(folder) and not has_output(child.stdout.fileno()):
            peak = max(peak, anonymous(process))
        assert child.stdout.readline() == "loaded\n"
        peak = max(peak, anonymous(process))
        child.communicate("end\n", timeout=60)
    assert child.returncode == 0
    return peak - idle


def has_output(descriptor: int) -> bool:
    """Waits a millisecond for it."""
    return bool(select.select([descriptor], [], [], 0.001)[0])


def weight_bytes(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize(("dtype", "share"), [("float32", 1.0), ("bfloat16", 0.5)])
def test_loading_never_holds_a_second_copy_of_the_weights(large_bert: Path, dtype: str, share: float) -> None:
    ratio = peak_while_loading(large_bert, dtype) / weight_bytes(large_bert) / share
    assert ratio <= MOST, f"{ratio:.3f} times the weights"
