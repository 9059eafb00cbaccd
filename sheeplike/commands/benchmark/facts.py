"""The machine and the software that were measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform

import torch

PACKAGES = ("sheeplike", "torch", "lightning", "jax", "mujoco", "mujoco-mjx", "warp-lang")


def facts(command: str, device: torch.device) -> dict[str, str]:
    """Name to text."""
    found = {
        "command": f"`{command}`",
        "date": datetime.datetime.now().astimezone().isoformat(" ", timespec="seconds"),
        "processor": f"{_processor()}, {_cores()}, {_installed()}",
        "device": "the processor",
        "threads of torch": f"{torch.get_num_threads()}; OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}",
        "load": f"{os.getloadavg()[0]:.2f} in the minute before" if hasattr(os, "getloadavg") else "unknown",
        "system": f"{platform.platform()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        found["device"] = f"{gpu.name}, {gpu.total_memory / 2**30:,.0f} GiB; CUDA {torch.version.cuda}"
    return found


def _processor() -> str:
    return next(iter(values("/proc/cpuinfo", "model name")), platform.processor() or platform.machine())


def _cores() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{usable} of {os.cpu_count()} cores"


def _installed() -> str:
    kibibytes = next((int(line.split()[0]) for line in values("/proc/meminfo", "MemTotal")), None)
    return f"{kibibytes / 2**20:,.0f} GiB" if kibibytes else "unknown memory"


def values(path: str, name: str) -> list[str]:
    """What stands behind ``name:`` in the lines of a file; nothing where there is no such file."""
    try:
        with open(path) as file:
            pairs = [line.partition(":") for line in file]
    except OSError:
        return []
    return [value.strip() for key, _, value in pairs if key.strip() == name]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        import sheeplike

        return sheeplike.__version__ if name == "sheeplike" else "unknown"
