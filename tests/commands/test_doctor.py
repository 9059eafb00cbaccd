"""``doctor`` finds what is wrong with a machine: real checks, and faults that are staged."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import warp

from sheeplike import bridge
from sheeplike.__main__ import main, parse
from sheeplike.agents.dreamer_v3 import Size
from sheeplike.commands import doctor
from sheeplike.tools import checks
from sheeplike.tools.checks import CHECKS, Failed, examine

ROOT = Path(__file__).parents[2]
LIGHT = ["python", "libraries", "memory", "disk", "cache", "gpu"]  # import nothing heavy
TINY = Size(deter=64, hidden=16, classes=4, depth=2, units=16)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    monkeypatch.setenv("SECRET", "do-not-tell")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("JAX_PLATFORMS", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    place = tmp_path / "site"
    place.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{place}{os.pathsep}{ROOT}")
    return place


def install(site: Path, name: str, version: str, *requires: str) -> None:
    """The metadata that an installer leaves."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


def failure(name: str, timeout: float = 120) -> str:
    result = examine(name, timeout)
    assert result["status"] == "FAIL", result
    return f"{result['fact']}; {result['advice']}"


def test_a_line_for_each_check_and_a_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_OF_A_TEST", "1")
    monkeypatch.setenv("NVIDIA_API_KEY", "do-not-tell")
    main(["doctor", *LIGHT])
    *lines, _, summary, saved = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["ok", name] for name in LIGHT]
    assert "failed: " not in summary
    assert saved.endswith(" doctor.json")
    text = Path("doctor.json").read_text()
    report = json.loads(text)
    assert list(report["checks"]) == LIGHT
    assert report["checks"]["python"]["fact"].startswith("Python 3.")
    assert report["settings"]["JAX_OF_A_TEST"] == "1"
    assert "do-not-tell" not in text


def test_a_failure_is_the_exit_status_and_the_others_are_checked_all_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "libcudnn.so.9").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "memory", "libraries", "python", "out=null"])
    assert stop.value.code == 1
    output = capsys.readouterr().out
    fact = f"LD_LIBRARY_PATH leads to {tmp_path}/libcudnn.so.9, before torch's own; unset LD_LIBRARY_PATH"
    assert f"FAIL  libraries  {fact}\n" in output
    assert output.count("ok    ") == 2
    assert output.endswith("failed: libraries\n")
    assert not Path("doctor.json").exists()


@pytest.mark.parametrize("name", ["cublasLt", "nvJitLink", "cusparse", "cudart", "nccl"])
def test_libraries_before_torchs_own(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"lib{name}.so.12").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with pytest.raises(Failed, match=f"lib{name}"):
        CHECKS["libraries"].function()


def test_libraries_that_torch_or_the_plugin_need_in_other_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(name: str, version: str, *requires: str) -> None:
        place = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        place.mkdir()
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {one}" for one in requires)]
        (place / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines]) + "\n")

    monkeypatch.syspath_prepend(str(tmp_path))
    install("jax-cuda13-plugin", importlib.metadata.version("jaxlib"), "nvidia-cudnn-cu13>=9.12; extra == 'with-cuda'")
    with pytest.raises(Failed, match="nvidia-cudnn-cu13 is missing"):
        CHECKS["libraries"].function()
    install("nvidia-cudnn-cu13", "9.10")
    with pytest.raises(Failed, match=r"nvidia-cudnn-cu13 9\.10"):
        CHECKS["libraries"].function()


def test_what_is_asked_for(capfd: pytest.CaptureFixture[str], refusal: Callable[..., str]) -> None:
    def asked(*words: str) -> list[str]:
        return list(doctor.parse(parse(words)).checks)

    assert asked() == list(CHECKS)
    assert set(LIGHT) < set(asked("quick")) < set(CHECKS)
    assert not {"dry_run", "renderer", "gpu_worlds"} & set(asked("quick"))
    assert asked("bridge", "python", "bridge") == ["python", "bridge"]
    assert asked("quick", "renderer") == [*asked("quick"), "renderer"]
    assert "nearest: checks=[bridge]" in refusal("doctor brigde")
    assert "quick" in refusal("doctor fast")
    assert "nearest: timeout" in refusal("doctor quick timout=3")
    assert refusal("doctor checks=[disk] memory").names("checks=[disk]", "memory")
    assert "timeout=0" in refusal("doctor timeout=0")
    assert "--config-dir" in refusal("doctor --config-dir .")
    Path("file").touch()
    assert "nearest: out=null" in refusal("doctor quick out=file/doctor.json")
    assert "nearest: out=run/config.json" in refusal("doctor quick out=run/config.yaml")
    assert [path.name for path in Path().iterdir()] == ["file"]
    main(["doctor", "--help"])
    output = capfd.readouterr().out
    assert all(f"  {name} " in output and one.meaning in output for name, one in CHECKS.items())


DIES = "import ctypes, sys, os\ndef dies(pid):\n    ctypes.string_at(0)\nos.sched_getaffinity = dies\n"
HANGS = """import os, subprocess, time
def hangs(pid):
    open("begun", "w").write(str(subprocess.Popen(["sleep", "300"]).pid))
    time.sleep(300)
os.sched_getaffinity = hangs
"""


def gone(pid: int) -> bool:
    for _ in range(100):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or ") Z " in status.read_text():
            return True
        time.sleep(0.05)
    return False


def test_a_check_that_crashes_has_failed(site: Path) -> None:
    (site / "sitecustomize.py").write_text(DIES)
    assert "SIGSEGV" in failure("memory")
    (site / "sitecustomize.py").write_text("import os\nos.sched_getaffinity = lambda pid: print('why') or os._exit(3)")
    assert "status 3: why" in failure("memory")


def test_a_check_that_hangs_has_failed_and_is_ended_with_all_that_it_began(site: Path) -> None:
    (site / "sitecustomize.py").write_text(HANGS)
    assert failure("memory", timeout=3).endswith("; timeout=null, which allows 60 s")
    assert gone(int(Path("begun").read_text()))


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 130), (signal.SIGINT, 130)])
def test_a_doctor_that_is_stopped_leaves_no_check_behind(site: Path, signum: int, status: int) -> None:
    (site / "sitecustomize.py").write_text(HANGS)
    process = subprocess.Popen([sys.executable, "-m", "sheeplike", "doctor", "memory"])
    while not (Path("begun").exists() and Path("begun").read_text()):
        time.sleep(0.05)
    process.send_signal(signum)
    assert process.wait(20) == status
    assert gone(int(Path("begun").read_text()))


DRIVER = """
int cuInit(unsigned flags) { return ERROR; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 9; return 0; }
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Puts a library in the place of NVIDIA's, which tells a version."""

    def put(version: int, error: int = 0) -> None:
        (tmp_path / "driver.c").write_text(DRIVER.replace("VERSION", str(version)).replace("ERROR", str(error)))
        command = ["gcc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "driver.c"]
        subprocess.run(command, check=True)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))

    return put


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_an_old_driver(driver: Callable[[int], None]) -> None:
    driver(12_040)
    assert "CUDA 12.4" in failure("gpu")
    result = examine("gpu_torch", 60)
    assert result["status"] == "skip", result
    assert "CUDA 12.4" in result["fact"]
    driver(13_010, error=803)  # its library is newer than what the system has loaded
    assert "803" in failure("gpu")
    driver(13_010, error=100)
    assert examine("gpu", 60)["fact"].startswith("none: ")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_a_gpu_without_what_uses_it(driver: Callable[[int], None], site: Path) -> None:
    driver(13_010)
    install(site, "torch", "2.13.0")
    (site / "jax_cuda13_plugin.py").touch()
    result = examine("gpu", 60)
    assert (result["status"], result["fact"].split()[-1]) == ("ok", "13.1")
    install(site, "torch", "2.13.0+cpu")
    shutil.rmtree(site / "torch-2.13.0.dist-info")
    assert "torch" in failure("gpu")


def test_without_a_gpu_its_checks_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert examine("gpu", 60)["fact"].endswith("cpu profile (CUDA_VISIBLE_DEVICES=-1)")
    result = examine("gpu_graphs", 60)
    assert result["status"] == "skip"


def test_libraries_that_do_not_fit(site: Path) -> None:
    for name in ("nvidia-cudnn-cu12", "jax-cuda12-plugin", "nvidia-cudnn-cu13"):
        install(site, name, "9.9")
    line = failure("libraries")
    assert "pip uninstall -y jax-cuda12-plugin nvidia-cudnn-cu12 && pip install" in line
    assert line.endswith(" nvidia-cudnn-cu13==9.9")
    for old in site.glob("*cu*12*"):
        shutil.rmtree(old)
    install(site, "jax-cuda13-plugin", "0.10.1")
    install(site, "jaxlib", "0.10.2")
    assert failure("libraries").startswith("jax-cuda13-plugin 0.10.1 beside jaxlib 0.10.2; pip install 'jax-cuda13")


def test_versions_that_do_not_fit(site: Path) -> None:
    install(site, "sheeplike", "0.1", "mujoco<2", "pygame>99; extra == 'games'")
    assert "'mujoco<2'" in failure("python")
    shutil.rmtree(site / "sheeplike-0.1.dist-info")
    install(site, "sheeplike", "0.1", "no-such-thing>=1", "pygame>99; extra == 'games'")
    assert "no-such-thing>=1" in failure("python")


def test_memory_and_time_that_a_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sheeplike.host.cpu_cores", lambda: 64)
    groups = tmp_path / "sys/fs/cgroup"
    for folder in (tmp_path / "proc/self", groups):
        folder.mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {100 * 2**20} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (groups / "cpu.max").write_text("max 100000\n")
    assert "limit" not in checks.memory(tmp_path)
    (groups / "cpu.max").write_text("250000 100000\n")
    fact = checks.memory(tmp_path)
    assert all(part in fact for part in ("64 cores", " 2.5 ", "taskset -c 0-1", "100.0 GiB"))
    (groups / "memory.max").write_text(f"{4 * 2**30}\n")
    (groups / "memory.current").write_text(f"{3 * 2**30}\n")
    with pytest.raises(Failed, match=r"1\.0 GiB"):
        checks.memory(tmp_path)


def test_a_place_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=2**29)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    with pytest.raises(Failed, match=r"0\.50 GiB"):
        checks.disk()


def test_a_cache_that_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in checks.caches.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    Path("file").touch()
    monkeypatch.setenv("SHEEPLIKE_CACHE_DIR", "file/below")
    assert "NotADirectoryError" in failure("cache") or "FileExistsError" in failure("cache")
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    monkeypatch.setenv("SHEEPLIKE_CACHE_DIR", str(open_to_all))
    line = failure("cache")
    assert "SHEEPLIKE_CACHE_DIR=" in line
    monkeypatch.setenv("SHEEPLIKE_CACHE_DIR", str(tmp_path / "mine"))
    assert examine("cache", 60)["status"] == "ok"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(Path("file").absolute()))
    assert "file" in failure("cache")


@pytest.mark.slow
def test_a_compiler_that_fails_and_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools, path = tmp_path / "tools", os.environ["PATH"]
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.delenv("CXX", raising=False)
    assert "nearest: off" in failure("compiler")
    (tools / "g++").write_text("#!/bin/sh\necho no such option >&2\nexit 1\n")
    (tools / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{path}")
    assert "apt install g++" in failure("compiler")


def test_types_that_do_not_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.bridge().startswith(f"{len(bridge.SHARED)} ")
    to_torch = bridge.to_torch
    monkeypatch.setattr(bridge, "to_torch", lambda array: to_torch(array).clone())
    with pytest.raises(Failed, match="bool"):
        checks.bridge()
    # As where a write overtakes the reader.
    monkeypatch.setattr(
        bridge, "to_torch", lambda array: to_torch(array).add_(1) if array.dtype == "int16" else to_torch(array)
    )
    with pytest.raises(Failed, match=r"int16.*1\.0, 2\.0.*0\.0"):
        checks.bridge()


def test_worlds_that_move_and_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.renderer().startswith("4 frames")
    real = checks.cartpoles

    def blank(*arguments: object, **options: object) -> object:
        worlds = real(*arguments, **options)
        reset = worlds.reset

        def flat(**seed: int) -> tuple:
            obs, info = reset(**seed)
            return obs | {"pixels/fixed": obs["pixels/fixed"] * 0}, info

        monkeypatch.setattr(worlds, "reset", flat)
        return worlds

    monkeypatch.setattr(checks, "cartpoles", blank)
    with pytest.raises(Failed):
        checks.renderer()


def test_what_a_gpu_is_asked_for_can_be_asked_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but CUDA graphs; that the answers are right there is for a GPU to show."""
    monkeypatch.setenv("SHEEPLIKE_SYNC", "0")
    assert checks.gpu_torch("cpu") == "works"
    assert checks.gpu_jax("cpu").startswith("cpu")
    assert "SHEEPLIKE_SYNC=1" in checks.gpu_bridge("cpu", 32, 20)
    assert "kernels and graphs" in checks.gpu_warp("cpu")
    assert checks.gpu_learner("cpu", ("off",), TINY).startswith("ten updates agree")


def test_the_report_goes_into_a_directory_that_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "python", "out=new/place/doctor.json"])
    assert json.loads(Path("new/place/doctor.json").read_text())["checks"].keys() == {"python"}


def test_numbers_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHEEPLIKE_SYNC", "0")
    monkeypatch.setattr(checks, "handed_over", lambda device, size, steps, sync: torch.full((2,), float(sync)))
    with pytest.raises(Failed):
        checks.gpu_bridge("cpu")
    losses = {"off": torch.ones(10), "inductor": torch.full((10,), 1.001), "graph": torch.full((10,), 1.1)}
    mixed = {"off": torch.ones(10), "inductor": torch.full((10,), 1.09), "graph": torch.ones(10)}
    by_precision = {"32-true": losses, "bf16-mixed": mixed}
    monkeypatch.setattr(checks, "ten_updates", lambda device, mode, size, precision: by_precision[precision][mode])
    with pytest.raises(Failed, match=r"compile=graph.*0\.05.*compile=off"):
        checks.gpu_learner("cpu")
    monkeypatch.setitem(losses, "graph", torch.ones(10))
    assert "ten updates agree" in checks.gpu_learner("cpu")
    monkeypatch.setitem(mixed, "inductor", torch.full((10,), 1.12))
    with pytest.raises(Failed, match="compile=inductor, bf16-mixed"):
        checks.gpu_learner("cpu")
    monkeypatch.setitem(losses, "inductor", torch.full((10,), torch.nan))
    with pytest.raises(Failed, match="compile=inductor"):
        checks.gpu_learner("cpu")
    with pytest.raises(Failed, match=r" 0\.2 "):
        checks.close("products", torch.tensor([4.0, 5.0]), torch.tensor([5.0, 5.0]), 0.1)


@pytest.mark.slow
def test_worlds_and_memory_as_a_gpu_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warp, "capture_begin", warp.capture_begin)  # put back afterwards
    assert checks.gpu_worlds("cpu", 4, 32).endswith("0 captures in the last 30")
    real = checks.cartpoles

    def moving(*arguments: Any, **options: Any) -> Any:
        worlds = real(*arguments, **options)
        step = worlds.step

        def captured(action: torch.Tensor) -> tuple:
            with warp.ScopedCapture(device="cpu"):
                pass
            return step(action)

        monkeypatch.setattr(worlds, "step", captured)
        return worlds

    monkeypatch.setattr(checks, "cartpoles", moving)
    with pytest.raises(Failed, match=r"30 .* 31 steps"):
        checks.gpu_worlds("cpu", 4, 31)
    assert "the replay, once full " in checks.gpu_memory("agent.replay_size=8192", "compile=off", "profile=cpu")


@pytest.mark.slow
def test_a_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert examine("compiler", 300)["status"] == "ok"
    assert examine("dry_run", 900)["fact"] == "trained, saved and evaluated"
    monkeypatch.setenv("WARP_CACHE_PATH", "/proc/nowhere")
    assert failure("dry_run", 900).startswith("status ")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", [name for name in CHECKS if name.startswith("gpu")])
def test_a_gpu_is_well(name: str) -> None:
    result = examine(name, CHECKS[name].seconds)
    assert result["status"] == "ok", result
