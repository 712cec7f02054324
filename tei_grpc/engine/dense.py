"""Owns the sentence-transformers modules that run on pooled vectors: Dense and LayerNorm."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tei_grpc.errors import StartupError, reason_of
from tei_grpc.layers.activation import Activation, activation
from tei_grpc.layers.linear import Linear
from tei_grpc.loading.sentence_transformers import SCORES, Module
from tei_grpc.loading.weights import Checkpoint, Names, load_weights

PLACES = {"module_input_name": ("sentence_embedding",), "module_output_name": ("sentence_embedding", SCORES)}
DEFAULT_ACTIVATION = "torch.nn.modules.activation.Tanh"  # sentence-transformers' own, when the file names none


class Dense(nn.Module):
    """activation(linear(x)), plus x itself (through a projection when sizes differ) when the config asks for it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        sizes = config["in_features"], config["out_features"]
        self.linear = Linear(*sizes, bias=config.get("bias", True), activation=_activation(config))
        self.use_residual = bool(config.get("use_residual", False))
        self.residual = Linear(*sizes, bias=False) if self.use_residual and sizes[0] != sizes[1] else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[texts, in] -> [texts, out]."""
        y: Tensor = self.linear(x)
        return y + self.residual(x) if self.use_residual else y


class LayerNorm(nn.Module):
    """The `norm.` level of the module's tensor names."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config["dimension"])

    def forward(self, x: Tensor) -> Tensor:
        """[texts, dimension] -> [texts, dimension]."""
        y: Tensor = self.norm(x)
        return y


_TYPES: Mapping[str, type[Dense] | type[LayerNorm]] = {"Dense": Dense, "LayerNorm": LayerNorm}


def load_modules(modules: Sequence[Module]) -> nn.Sequential:
    """Build and fill the modules, in float32. Raises StartupError when a file does not fit its config."""
    return nn.Sequential(*(_load(module) for module in modules))


def _load(module: Module) -> nn.Module:
    _check_place(module)
    try:
        with torch.device("meta"):
            built = _TYPES[module.type](module.config)
    except KeyError as error:
        raise StartupError(f"module {module.type} in {module.folder} is not supported, or lacks {error}") from error
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        text = f"`config.json` in {module.folder} does not describe a module {module.type}: {reason_of(error)}"
        raise StartupError(text) from error
    load_weights(built, Checkpoint(module.folder), Names(), dtype=torch.float32)
    return built


def _check_place(module: Module) -> None:
    """Modules may also read and write other things than the pooled vector, which nothing here would look at."""
    for key, known in PLACES.items():
        if module.config.get(key) not in (None, *known):
            raise StartupError(
                f"module {module.type} in {module.folder}: `{key}` {module.config[key]!r} is not supported"
            )


def _activation(config: Mapping[str, Any]) -> Activation:
    """From torch's dotted class name, `torch.nn.modules.activation.Tanh`."""
    return activation(config.get("activation_function", DEFAULT_ACTIVATION).rpartition(".")[2])
