"""GPUs and free memory of the machine, and the way to install more, without importing torch or JAX."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

# Control groups by version: their directory, the file of the limit, the file of the use, the field of cached pages.
_VERSIONS = {
    2: ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    1: ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
CUDA = 13_000  # torch's and Warp's packages are built with 13.0, which knows no GPU below CAPABILITY
CAPABILITY = (7, 5)
NO_DEVICE = 100  # CUDA's error where the driver works, but finds no GPU


class Driver(NamedTuple):
    """Answers of NVIDIA's driver; zeros without one."""

    count: int = 0
    version: int = 0
    capability: tuple[int, int] = (0, 0)  # of the first GPU
    error: int = 0


@functools.cache
def gpu_count() -> int:
    """Count the NVIDIA GPUs that the driver shows to this process (``CUDA_VISIBLE_DEVICES`` counts)."""
    return _driver().count


def driver_error() -> int:
    """Return the error with which the driver starts; 0 without one, and where it only finds no GPU."""
    return 0 if _driver().error == NO_DEVICE else _driver().error


def driver_version() -> str:
    """Return the newest CUDA that the driver supports, such as ``13.0``; 0.0 without a driver."""
    version = _driver().version
    return f"{version // 1000}.{version % 1000 // 10}"


@functools.cache
def _driver() -> Driver:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Driver()
    count, version, major, minor = (ctypes.c_int() for _ in range(4))
    error = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if error or driver.cuDriverGetVersion(ctypes.byref(version)) or not count.value:
        return Driver(error=error)
    for attribute, number in ((75, major), (76, minor)):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, 0)
    return Driver(count.value, version.value, (major.value, minor.value))


def rank_here() -> int:
    """Return the number of this process among those that a launcher started on this machine; 0 without a launcher."""
    return int(_local_rank() or "0")


def _local_rank() -> str | None:
    """Return the variable of Fabric, torchrun or srun; None if none of them started this process."""
    of_slurm = None
    # As Fabric has it: a script or a shell of sbatch and salloc sees SLURM's variables too, but is one process.
    if os.environ.get("SLURM_NTASKS", "1") != "1" and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        of_slurm = os.environ.get("SLURM_LOCALID")
    found = os.environ.get("LOCAL_RANK", of_slurm)
    return found if found and found.isdecimal() else None


def choose_gpu() -> None:
    """Let this process see the GPU of its rank alone, within ``CUDA_VISIBLE_DEVICES``.

    Must be called before a library starts CUDA. A process without a launcher may start the others: it sees all.
    """
    if (rank := _local_rank()) is None:
        return
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = rank
    elif len(gpus := shown.split(",")) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(rank)] if int(rank) < len(gpus) else ""


def choose_cores(ranks: int) -> None:
    """Give this process its part of the cores, if there are enough for the ``ranks`` of this machine.

    SLURM has given each process its own already.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if ranks > 1 and "LOCAL_RANK" in os.environ and (share := len(cores) // ranks):
        os.sched_setaffinity(0, cores[rank_here() * share :][:share])


def cpu_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def driver_problem() -> str | None:
    """Return why no program can use a GPU here, or None."""
    if driver_error():
        return f"NVIDIA's driver does not start: CUDA error {driver_error()}"
    if gpu_count() == 0:
        return "this machine shows no NVIDIA GPU"
    if _driver().capability < CAPABILITY:
        found, needed = (".".join(map(str, pair)) for pair in (_driver().capability, CAPABILITY))
        return f"its compute capability is {found}, and torch and Warp need {needed} or newer"
    if _driver().version < CUDA:
        needed = "driver 580 or newer (on data-centre GPUs NVIDIA's package cuda-compat-13-0 does as well)"
        return f"its driver supports CUDA {driver_version()}, and torch and Warp need 13.0: {needed}"
    return None


@functools.cache
def gpu_problem() -> str | None:
    """Return why a run cannot use a GPU here, or None if it can."""
    if problem := driver_problem():
        return problem
    client = os.environ.get("XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT", "0")
    if client.lower() not in ("", "0", "false"):
        return f"XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT={client} chooses a client whose work torch cannot wait for"
    allocator = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default")
    if allocator not in ("default", "bfc"):
        return f"XLA_PYTHON_CLIENT_ALLOCATOR={allocator} moves buffers at every step, which Warp's graphs do not follow"
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return f"JAX_PLATFORMS={platforms} hides the GPU"
    try:
        if importlib.metadata.version("torch").endswith("+cpu"):
            return "the installed torch is a build without CUDA"
    except importlib.metadata.PackageNotFoundError:
        return "torch is not installed"
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return f"the installed JAX has no CUDA plugin ({install('cuda13')})"
    return None


def install(extra: str) -> str:
    """Return the command that installs an extra of this package, in a clone or beside a wheel."""
    clone = Path(__file__).resolve().parents[1]
    source = f"-e '{clone}" if (clone / "pyproject.toml").is_file() else "'sheeplike"
    return f"pip install {source}[{extra}]'"


def free_memory(root: Path | str = "/") -> int | None:
    """Return the bytes of the host's memory that can still be allocated, or None if the system does not tell.

    The limit of a container or a cluster job counts: a process that exceeds it is killed.
    """
    root = Path(root)
    machine = _field(root / "proc/meminfo", "MemAvailable:")
    left = [] if machine is None else [machine * 1024]
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            left += _left(root, 1 if controllers else 2, name)
    return min(left, default=None)


def _left(root: Path, version: int, name: str) -> Iterator[int]:
    """Yield the bytes that a control group and each one above it have left: any of them may set the limit."""
    place, limit_file, used_file, cache = _VERSIONS[version]
    # A container sees its own group at the top, but may read the name that it has outside, or one with "..".
    names = [part for part in PurePosixPath(name.strip()).parts if part not in ("/", "..")]
    for depth in range(len(names), -1, -1):
        group = root.joinpath(place, *names[:depth])
        limit, used = _field(group / limit_file), _field(group / used_file)
        if limit is not None and used is not None:
            # The system frees inactive pages of files when memory is needed.
            yield max(0, limit - max(0, used - (_field(group / "memory.stat", cache) or 0)))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _field(path: Path, name: str = "") -> int | None:
    """Read the number after a name at the beginning of a line; None for another text, such as ``max``."""
    found = re.search(rf"^{name}\s*(\d+)", _text(path), re.MULTILINE)
    return int(found[1]) if found else None
