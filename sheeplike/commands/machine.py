"""What the machine has, found out without importing torch or JAX."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os

from sheeplike.commands.errors import CommandError, InvalidValue
from sheeplike.commands.schema import Config


@functools.cache
def gpu_count() -> int:
    """NVIDIA GPUs that the driver shows to this process (``CUDA_VISIBLE_DEVICES`` counts)."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


@functools.cache
def gpu_problem() -> str | None:
    """Why a run cannot use a GPU here, or None if it can."""
    if gpu_count() == 0:
        return "this machine shows no NVIDIA GPU"
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return f"JAX_PLATFORMS={platforms} hides the GPU"
    try:
        if importlib.metadata.version("torch").endswith("+cpu"):
            return "the installed torch is a build without CUDA"
    except importlib.metadata.PackageNotFoundError:
        return "torch is not installed"
    if not any(importlib.util.find_spec(plugin) for plugin in ("jax_cuda13_plugin", "jax_cuda12_plugin")):
        return "the installed JAX has no CUDA plugin (pip install -e '.[cuda13]')"
    return None


def check_accelerator(config: Config) -> None:
    """Refuse a GPU that is not there.

    Raises:
        CommandError: the run asks for a GPU and cannot have one.
    """
    if config.compile == "graph" and config.fabric.accelerator == "cpu":
        raise InvalidValue("compile", "graph", "a GPU for CUDA graphs, but fabric.accelerator=cpu", "inductor")
    problem = gpu_problem() if config.fabric.accelerator == "cuda" else None
    if problem:
        raise CommandError(
            f"fabric.accelerator=cuda, profile={config.profile}: expected a GPU, but {problem}; "
            "nearest: fabric.accelerator=cpu profile=cpu"
        )
