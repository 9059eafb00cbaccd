"""Memory that is left, of the machine or of what a container may have of it; and what is said of a GPU's driver."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sheeplike.host
from sheeplike.host import free_memory, install

GIB = 2**30
V2 = "0::/kubepods/pod7/main\n"
V1 = "9:name=systemd:/job\n4:cpu,memory:/slurm/job_1/step_0\n1:cpu:/else\n0::/\n"


def host(root: Path, groups: str | None = None, available: int | None = 100 * GIB) -> Path:
    (root / "proc/self").mkdir(parents=True)
    if available is not None:
        lines = f"MemTotal:  999 kB\nMemAvailable:  {available // 1024} kB\nBuffers:  1 kB\n"
        (root / "proc/meminfo").write_text(lines)
    if groups is not None:
        (root / "proc/self/cgroup").write_text(groups)
    return root


def group_2(root: Path, name: str, limit: object, used: object, cache: int | None = None) -> None:
    place = root / "sys/fs/cgroup" / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "memory.max").write_text(f"{limit}\n")
    (place / "memory.current").write_text(f"{used}\n")
    if cache is not None:
        (place / "memory.stat").write_text(f"anon 5\nactive_file 7\ninactive_file {cache}\n")


def group_1(root: Path, name: str, limit: int, used: int, cache: int = 0) -> None:
    place = root / "sys/fs/cgroup/memory" / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (place / "memory.usage_in_bytes").write_text(f"{used}\n")
    (place / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {cache}\n")


def test_without_groups_it_is_what_the_machine_has(tmp_path):
    assert free_memory(host(tmp_path)) == 100 * GIB
    assert free_memory(host(tmp_path / "other", V2)) == 100 * GIB


def test_where_nothing_is_told_it_is_not_known(tmp_path):
    assert free_memory(tmp_path) is None


@pytest.mark.parametrize("name", ["kubepods/pod7/main", "kubepods/pod7", "kubepods", ""])
def test_the_limit_may_be_of_any_group_above(tmp_path, name):
    """A container sees its own group at the top."""
    root = host(tmp_path, V2)
    group_2(root, "kubepods/pod7/main", "max", 3 * GIB)
    group_2(root, name, 8 * GIB, 3 * GIB)
    assert free_memory(root) == 5 * GIB


def test_the_tightest_limit_counts(tmp_path):
    root = host(tmp_path, V2)
    group_2(root, "kubepods/pod7/main", 8 * GIB, 1 * GIB)
    group_2(root, "kubepods/pod7", 9 * GIB, 6 * GIB)
    assert free_memory(root) == 3 * GIB
    group_2(root, "kubepods", 200 * GIB, 0)
    assert free_memory(root) == 3 * GIB
    (root / "proc/meminfo").write_text(f"MemAvailable: {2**20} kB\n")
    assert free_memory(root) == GIB


def test_the_cache_of_files_is_free(tmp_path):
    root = host(tmp_path, V2)
    group_2(root, "kubepods/pod7/main", 8 * GIB, 8 * GIB, cache=5 * GIB)
    assert free_memory(root) == 5 * GIB
    group_2(root, "kubepods/pod7/main", 8 * GIB, 9 * GIB, cache=0)
    assert free_memory(root) == 0, "more than the limit, for a moment"
    group_2(root, "kubepods/pod7/main", 8 * GIB, 1 * GIB, cache=2 * GIB)
    assert free_memory(root) == 8 * GIB, "the numbers are not of one moment"


@pytest.mark.parametrize("name", ["slurm/job_1/step_0", "slurm/job_1", ""])
def test_version_1(tmp_path, name):
    root = host(tmp_path, V1)
    group_1(root, "slurm", 9223372036854771712, 90 * GIB)
    group_1(root, name, 16 * GIB, 10 * GIB, cache=2 * GIB)
    assert free_memory(root) == 8 * GIB


def test_a_limit_is_known_where_the_machine_tells_nothing(tmp_path):
    root = host(tmp_path, V2, available=None)
    group_2(root, "", 8 * GIB, GIB)
    assert free_memory(root) == 7 * GIB


def test_a_group_outside_of_what_is_visible_leads_nowhere(tmp_path):
    root = host(tmp_path / "root", "0::/../../../../sys/fs/cgroup/outside\n")
    group_2(root, "", 8 * GIB, GIB)
    group_2(tmp_path, "outside", GIB, GIB)
    assert free_memory(root) == 7 * GIB


@pytest.mark.parametrize("text", ["", "much", "-1", "max"])
def test_what_is_no_number_says_nothing(tmp_path, text):
    root = host(tmp_path, V2)
    group_2(root, "kubepods", text, GIB)
    group_2(root, "", GIB, text)
    assert free_memory(root) == 100 * GIB


DRIVER = """
int cuInit(unsigned flags) { return ERROR; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? CAPABILITY / 10 : CAPABILITY % 10;
    return 0;
}
"""


@pytest.mark.parametrize(
    ("driver", "settings", "count", "fact"),
    [
        ({"VERSION": 12_040}, {}, 2, "CUDA 12.4"),
        ({}, {"JAX_PLATFORMS": "cpu"}, 2, "JAX_PLATFORMS=cpu"),
        ({}, {"XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT": "1"}, 2, "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT=1"),
        ({}, {"XLA_PYTHON_CLIENT_ALLOCATOR": "vmm"}, 2, "XLA_PYTHON_CLIENT_ALLOCATOR=vmm"),
        ({"CAPABILITY": 70}, {}, 2, "7.0"),
        ({"ERROR": 803}, {}, 0, "803"),
        ({"ERROR": 100}, {}, 0, "shows no NVIDIA GPU"),
    ],
)
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_what_is_said_of_a_driver(tmp_path, driver, settings, count, fact):
    text = DRIVER
    for name, value in ({"VERSION": 13_010, "CAPABILITY": 90, "ERROR": 0} | driver).items():
        text = text.replace(name, str(value))
    (tmp_path / "driver.c").write_text(text)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
    code = "from sheeplike.host import gpu_count, gpu_problem; print(gpu_count(), gpu_problem())"
    environment = {**os.environ, "JAX_PLATFORMS": "", "LD_LIBRARY_PATH": str(tmp_path), **settings}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{count} ")
    assert fact in done.stdout


@pytest.mark.parametrize(("clone", "what"), [(True, "-e '{}[dmc]'"), (False, "'sheeplike[dmc]'")])
def test_an_extra_is_installed_from_the_clone_if_there_is_one(tmp_path, monkeypatch, clone, what):
    """The package is on no index; beside a wheel pip reads the extra from what is installed."""
    monkeypatch.setattr(sheeplike.host, "__file__", str(tmp_path / "sheeplike/host.py"))
    if clone:
        (tmp_path / "pyproject.toml").touch()
    assert install("dmc") == f"pip install {what.format(tmp_path)}"
