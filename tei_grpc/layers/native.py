"""Owns compiled functions: made by LLVM for the CPU at hand when they are first needed, and called in torch's threads.

torch has no attention for packed texts on a CPU, and whoever installs a Python package may have no compiler. llvmlite
is LLVM as a package.
"""

import ctypes
import logging
import time
from functools import cache
from typing import Any

logger = logging.getLogger(__name__)

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_engines: list[Any] = []  # they own the compiled code


def compile_module(name: str, assembly: str) -> int:
    """The address of the function `name` in LLVM's assembly. Raises RuntimeError where it cannot be had, or run."""
    import llvmlite.binding as llvm  # type: ignore[import-untyped]  # which other devices do without

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    _check_cpu(features)
    parallel()
    started = time.perf_counter()
    module = llvm.parse_assembly(assembly)
    module.verify()
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=3
    )
    module.data_layout = str(target.target_data)
    builder = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=2))
    builder.getModulePassManager().run(module, builder)
    engine = llvm.create_mcjit_compiler(module, target)
    engine.finalize_object()
    _engines.append(engine)
    milliseconds = (time.perf_counter() - started) * 1000
    logger.info("%s compiled for %s in %.0f ms", name, llvm.get_host_cpu_name(), milliseconds)
    return int(engine.get_function_address(name))


def _check_cpu(features: dict[str, bool]) -> None:
    """Without these every product and every 16-bit number is a call of a function, which may not even be there."""
    missing = [name for name in ("fma", "f16c") if features.get(name) is False]
    if missing:
        raise RuntimeError(f"it lacks {' and '.join(missing)}")


def call(address: int, arguments: ctypes.Array[ctypes.c_int64], threads: int) -> None:
    """Run a compiled function without the interpreter's lock, in so many threads at once: those that torch uses."""
    if threads == 1:
        _FUNCTION(address)(arguments)
    else:
        parallel()(address, arguments, threads, 0)


def float_bits(value: float) -> int:
    """A float32 as a number that a function may get among its arguments."""
    return ctypes.c_int32.from_buffer(ctypes.c_float(value)).value


@cache
def parallel() -> "ctypes._NamedFuncPointer":
    """OpenMP's way to run a function in the threads that belong to the calling one, as compilers call it.

    GOMP_parallel(function, its argument, threads, flags) is libgomp's; LLVM's libomp has it, too. It is there once
    torch is loaded. Raises RuntimeError where it is not: in one thread a kernel would keep the other cores idle.
    """
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except AttributeError as error:
        raise RuntimeError("torch has brought no OpenMP with `GOMP_parallel`") from error
    found.restype, found.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    return found
