"""Checks of a machine for ``doctor``, from the interpreter to a whole run, each in a process of its own.

``python -m sheeplike.tools.checks <name> <file>`` makes one check and writes its result to the file. A check returns a
line of facts or raises :class:`Failed`; it imports heavy libraries itself, so that a broken one fails no other check.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from sheeplike import caches, host
from sheeplike.files import check_writable, write_atomically
from sheeplike.terminal import echo, first_sentence

GIB = 2**30
LEAST_MEMORY, LEAST_DISK, LEAST_CACHE = 3 * GIB, 2 * GIB, GIB
PACKAGES = ("torch", "jax", "jaxlib", "mujoco", "mujoco-mjx", "warp-lang", "lightning")
MAX_OUTPUT = 10_000  # characters in the report of a failed check's output
SYNC = "SHEEPLIKE_SYNC"
INSTALL = "pip install -e . (with an NVIDIA GPU '.[cuda13]') in an environment of its own"


class Failed(Exception):
    """A check has failed; ``advice`` replaces the check's own, and is empty if the fact says what to do."""

    def __init__(self, fact: str, advice: str | None = None) -> None:
        super().__init__(fact, advice)
        self.fact, self.advice = fact, advice


class Check(NamedTuple):
    function: Callable[[], str]
    meaning: str  # a line for --help
    advice: str  # shown after a failure
    seconds: float  # time limit; compiling with empty caches takes minutes
    quick: bool


CHECKS: dict[str, Check] = {}


def check(advice: str, *, seconds: float = 60, quick: bool = False) -> Callable:
    """Register a function as a check, whose meaning is the first line of its docstring."""

    def register(function: Callable[[], str]) -> Callable[[], str]:
        meaning = function.__doc__.partition("\n")[0].rstrip(".")
        CHECKS[function.__name__] = Check(function, meaning, advice, seconds, quick)
        return function

    return register


def main(name: str, file: str) -> None:
    """Make one check and write its ``status``, ``fact`` and ``advice``."""
    made = CHECKS[name]
    if name in ("bridge", "renderer"):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX would start CUDA too, and may fail there
    try:
        problem = host.gpu_problem() if name.startswith("gpu_") else None
        status, fact, advice = ("skip", problem, "") if problem else ("ok", made.function(), "")
    except Failed as error:
        status, fact, advice = "FAIL", error.fact, made.advice if error.advice is None else error.advice
    except Exception as error:  # a broken library may raise anything
        traceback.print_exc()
        status, fact, advice = "FAIL", f"{type(error).__name__}: {first_sentence(error)}", made.advice
    write_atomically(Path(file), json.dumps({"status": status, "fact": fact, "advice": advice}))


def examine(name: str, timeout: float) -> dict[str, Any]:
    """Run one check in a process of its own, and return its ``status``, ``fact``, ``advice`` and ``seconds``.

    A check that hangs or dies has failed. The result of a failure includes the process's ``output``.
    """
    start, hangs = time.monotonic(), False
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryFile() as log:
        answer = Path(place, "result.json")
        command = [sys.executable, "-m", "sheeplike.tools.checks", name, str(answer)]
        # A session of its own, so that the compilers and runs that it starts can be ended with it.
        options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, start_new_session=True, **options)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            hangs = True
        finally:
            with suppress(ProcessLookupError, PermissionError):  # its whole session has ended already
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        log.seek(0)
        output = log.read().decode("utf-8", "replace")[-MAX_OUTPUT:]
        if answer.exists() and status == 0:
            result = json.loads(answer.read_text("utf-8"))
        else:
            ended = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
            fact = f"hangs: no answer in {timeout:g} s" if hangs else f"died {ended}: {last_line(output)}"
            usual = CHECKS[name].seconds
            advice = f"timeout=null, which allows {usual:g} s" if hangs and timeout < usual else CHECKS[name].advice
            result = {"status": "FAIL", "fact": fact, "advice": advice}
    result["seconds"] = round(time.monotonic() - start, 2)
    return result | ({"output": output} if result["status"] == "FAIL" else {})


def last_line(output: str) -> str:
    """Return the last line that is not empty."""
    return next((line for line in reversed(output.splitlines()) if line.strip()), "it said nothing")


def expect(condition: object, fact: str, advice: str | None = None) -> None:
    """Fail with a fact unless the condition holds."""
    if not condition:
        raise Failed(fact, advice)


# --- the machine ----------------------------------------------------------------------------------------------------


@check(INSTALL, quick=True)
def python() -> str:
    """Python, and the installed versions of the libraries that the program needs."""
    expect(sys.version_info >= (3, 11), f"Python {sys.version.split()[0]}: expected 3.11 or newer")
    with suppress(importlib.metadata.PackageNotFoundError):  # a clone may run without being installed
        requirements("sheeplike")
    missing = [name for name in PACKAGES if version(name) is None]
    expect(not missing, f"not installed: {', '.join(missing)}")
    return ", ".join([f"Python {sys.version.split()[0]}", *(f"{name} {version(name)}" for name in PACKAGES)])


def requirements(package: str, extra: str = "") -> None:
    """Fail unless all that a package requires is installed, in the versions that it names."""
    from packaging.requirements import Requirement

    for one in map(Requirement, importlib.metadata.requires(package) or ()):
        if one.marker is None or one.marker.evaluate({"extra": extra}):
            found, wanted = version(one.name), f"{one.name}{one.specifier}"
            fits = found and one.specifier.contains(found, prereleases=True)
            fact = f"{one.name} {found or 'is missing'}: {package} needs {wanted}"
            expect(fits, fact, f"pip install '{wanted}'")


@check(INSTALL, quick=True)
def libraries() -> str:
    """NVIDIA's libraries, all of one version of CUDA, and as torch and JAX's plugin need them."""
    names = {(one.name or "").lower().replace("_", "-") for one in importlib.metadata.distributions()}
    nvidia = [name for name in sorted(names) if name.startswith(("nvidia-", "jax-cuda"))]
    old = [name for name in nvidia if name.endswith("-cu12") or name.startswith("jax-cuda12")]
    new = [name for name in nvidia if name.endswith("-cu13") or name.startswith("jax-cuda13")]
    if old and new:  # both write into the same directories: the one installed later replaced files of the other
        again = [f"{name[:-1]}3=={version(f'{name[:-1]}3')}" for name in old if f"{name[:-1]}3" in new]
        advice = f"pip uninstall -y {' '.join(old)}"
        if again:
            advice += f" && pip install --force-reinstall --no-deps {' '.join(again)}"
        raise Failed(f"libraries of CUDA 12 beside those of CUDA 13: {', '.join(old)}", advice)
    jaxlib = version("jaxlib")
    for plugin in ("jax-cuda13-plugin", "jax-cuda13-pjrt"):
        found = version(plugin) or jaxlib
        expect(found == jaxlib, f"{plugin} {found} beside jaxlib {jaxlib}", f"pip install '{plugin}=={jaxlib}'")
    for package, extra in (("torch", ""), ("jax-cuda13-plugin", "with-cuda")):
        if nvidia and version(package):
            requirements(package, extra)
    for place in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)):
        for name in ("cudnn", "nccl", "cublas", "nvJitLink", "cusparse", "cudart"):  # cublas*: cublasLt too
            first = next(Path(place).glob(f"lib{name}*.so*"), None)
            expect(first is None, f"LD_LIBRARY_PATH leads to {first}, before torch's own", "unset LD_LIBRARY_PATH")
    plugin = version("jax-cuda13-plugin")
    return f"{len(nvidia)} of NVIDIA's; jaxlib {jaxlib} " + (f"with its plugin {plugin}" if plugin else "without CUDA")


@check("free some, or ask for a larger limit; agent.replay_size and env.num_envs make a run smaller", quick=True)
def memory(root: Path | str = "/") -> str:  # root holds proc and sys
    """Cores, threads and free memory, within the limits of a container."""
    cores, free = host.cpu_cores(), host.free_memory(root)
    facts = ["1 core" if cores == 1 else f"{cores} cores"]
    with suppress(OSError, ValueError):
        limit, period = Path(root, "sys/fs/cgroup/cpu.max").read_text().split()
        if limit != "max" and (share := int(limit) / int(period)) < cores:
            facts.append(f"limited to the time of {share:g} (taskset -c 0-{max(int(share), 1) - 1} helps)")
    if threads := os.environ.get("OMP_NUM_THREADS"):
        facts.append(f"OMP_NUM_THREADS={threads}")
    facts.append("free memory unknown" if free is None else f"{free / GIB:.1f} GiB of memory free")
    expect(free is None or free >= LEAST_MEMORY, f"{', '.join(facts)}: expected {LEAST_MEMORY / GIB:g} or more")
    return ", ".join(facts)


@check("another working directory, or run_dir=<another disk>", quick=True)
def disk() -> str:
    """Room for a run in the working directory, which must be writable."""
    return free_space(".", LEAST_DISK)


@check("SHEEPLIKE_CACHE_DIR=<a directory of your own, chmod 700>", quick=True)
def cache() -> str:
    """Directories that keep compiled code, without which each start compiles for minutes."""
    names = [name for name in caches.VARIABLES if name in os.environ]
    own = caches.directory()
    if len(names) < len(caches.VARIABLES):
        os.makedirs(own, mode=0o700, exist_ok=True)  # its error names the obstacle
        raise Failed(f"compiled code is not kept: {own} cannot be written, or /proc/cpuinfo not be read")
    if not Path(os.environ[names[0]]).is_relative_to(own):
        expect(not (danger := caches.danger(own)), f"compiled code is not kept: {danger}")
    for name in names:
        Path(os.environ[name]).mkdir(parents=True, exist_ok=True)
        fact = free_space(os.environ[name], LEAST_CACHE)
    return fact


@check("nvidia-smi shows the state of the driver; after an update of it, restart the machine", quick=True)
def gpu() -> str:
    """Look for an NVIDIA GPU that torch, JAX and Warp can use; a machine without one passes."""
    if host.gpu_count() == 0:
        expect(not host.driver_error(), host.gpu_problem())
        shown, fact = os.environ.get("CUDA_VISIBLE_DEVICES"), "none: a run takes the cpu profile"
        if shown is not None:
            fact += f" (CUDA_VISIBLE_DEVICES={shown})"
        elif Path("/proc/driver/nvidia/version").exists():
            fact += "; the machine has one that this process does not see (in a container: start it with --gpus all)"
        return fact
    if problem := host.gpu_problem():
        raise Failed(problem, "")
    return f"{host.gpu_count()}, with a driver for CUDA {host.driver_version()}"


@check("apt install g++ python3-dev, or compile=off, which is slower", seconds=300, quick=True)
def compiler(device: str = "cpu") -> str:
    """Compile a function and its gradient with torch, which needs a C++ compiler and Python's headers."""
    with tempfile.TemporaryDirectory() as place:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = place  # empty, so that everything is compiled
        import torch

        from sheeplike.nn.compilation import Compilation

        x = torch.randn(64, device=device, requires_grad=True)
        function = Compilation("inductor", torch.device(device)).kernels(lambda x: (x.sin() * x).sum())
        (gradient,) = torch.autograd.grad(function(x), x)
        close("a compiled gradient", gradient, x.cos() * x + x.sin(), 1e-4)
    return "a function and its gradient, compiled from nothing"


@check("report it; SHEEPLIKE_SYNC=1 makes a run wait at each hand-over", seconds=120, quick=True)
def bridge(device: str = "cpu") -> str:
    """Pass arrays of every type between JAX and torch, both ways, without a copy and unchanged."""
    import jax
    import jax.numpy as jnp
    import torch

    from sheeplike.bridge import SHARED, to_jax, to_torch

    here = jax.devices(device)[0]
    for name in SHARED:
        expected = [float(bool(i) if name == "bool" else i) for i in range(15)]
        tensor = torch.arange(15).to(getattr(torch, name)).to(device)
        back = to_torch(to_jax(tensor))
        expect(back.data_ptr() == tensor.data_ptr() and back.dtype == tensor.dtype, f"{name}: copied on the way")
        given = to_torch(jax.device_put(jnp.arange(15).astype(name), here))
        read = jax.device_get(to_jax(tensor).astype("float32")).tolist()
        for values in (back.cpu().float().tolist(), given.cpu().float().tolist(), read):
            expect(values == expected, f"{name}: {values} arrived, expected {expected}")
    return f"{len(SHARED)} types both ways, without a copy"


@check("report it; env.renderer=none learns from the state instead", seconds=300)
def renderer() -> str:
    """MuJoCo's own engine steps four cart-poles, and Warp renders them."""
    frames = cartpoles("cpu").reset(seed=0)[0]["pixels/fixed"]
    expect(frames.float().std() > 1, "the frames show a single colour")
    return f"4 frames of {frames.shape[1]} x {frames.shape[2]} pixels"


# --- a GPU ----------------------------------------------------------------------------------------------------------


@check("nvidia-smi shows which processes use the GPU; else reinstall torch", seconds=180)
def gpu_torch(device: str = "cuda") -> str:
    """Torch on the GPU: products in bfloat16, a convolution and its gradient, free memory."""
    import torch

    a, b = torch.randn(2, 256, 256, device=device)
    close("products in bfloat16", a.bfloat16() @ b.bfloat16(), a.double() @ b.double(), 0.02)
    images, layer = torch.rand(8, 3, 48, 48), torch.nn.Conv2d(3, 16, 3, padding=1)
    gradients = []
    for where in ("cpu", device):
        there = layer.to(where)
        there.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=where == device):
            out = there(images.to(where, memory_format=torch.channels_last))
        out.float().square().mean().backward()
        gradients.append(there.weight.grad.clone())
    close("gradients of a convolution", gradients[1], gradients[0], 0.05)
    if device == "cpu":
        return "works"
    (free, total), capability = torch.cuda.mem_get_info(), torch.cuda.get_device_capability()
    fact = f"{torch.cuda.get_device_name()}, compute capability {'.'.join(map(str, capability))}"
    fact += f", {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    expect(free > 0.8 * total, f"{fact}: other processes use the rest")
    return fact


@check(f"the plugin's own message is in the report; {host.install('cuda13')}", seconds=180)
def gpu_jax(device: str = "cuda") -> str:
    """JAX on the GPU, with a client whose streams torch can wait for."""
    import jax
    import numpy as np

    if device == "cuda":
        jax.config.update("jax_platforms", "cuda,cpu")  # JAX reports errors of a platform that is named
        jax.config.update("jax_cuda_visible_devices", "0")
    here = jax.devices(device)[0]
    values = jax.random.normal(jax.device_put(jax.random.key(0), here), (256, 256))
    error = abs(np.asarray(values @ values) - np.asarray(values, float) @ np.asarray(values, float)).max()
    expect(error < 0.5, f"a product is {error:.2g} from what it should be")
    if device == "cuda":
        here.get_stream_for_external_ready_events()  # raises for a client without such streams
    return f"{here.device_kind}, platform {here.platform}"


@check("see the advice of the check gpu; a virtual GPU without memory pools cannot be used", seconds=300)
def gpu_warp(device: str = "cuda:0") -> str:
    """Warp on the GPU: memory pools, a kernel, and a graph of it."""
    import warp

    warp.init()
    place = warp.get_device(device)
    expect(not place.is_cuda or place.is_mempool_supported, f"{place.name} has no memory pools, like some virtual GPUs")
    double = warp.map(lambda x: x + x, warp.ones(8, dtype=float, device=device), return_kernel=True)
    values, out = warp.ones(8, dtype=float, device=device), warp.zeros(8, dtype=float, device=device)
    warp.launch(double, dim=8, inputs=[values], outputs=[out], device=device)  # compiled before it is captured
    with warp.ScopedCapture(device=device) as capture:
        warp.launch(double, dim=8, inputs=[values], outputs=[out], device=device)
    out.zero_()
    warp.capture_launch(capture.graph)
    expect((out.numpy() == 2).all(), "a captured kernel gives other numbers")
    return f"{place.name}, memory pools, kernels and graphs"


@check("report it; SHEEPLIKE_SYNC=1 makes a run wait at each hand-over", seconds=180)
def gpu_bridge(device: str = "cuda", size: int = 512, steps: int = 300) -> str:
    """Pass arrays between JAX and torch on the GPU, with hundreds of steps in flight."""
    import torch

    fact = bridge(device)
    seen = [handed_over(device, size, steps, sync) for sync in ("0", "1")]
    expect(torch.equal(*seen), "a race: a result changes if both sides wait for each other (SHEEPLIKE_SYNC=1)")
    return f"{fact}; {steps} steps the same with {SYNC}=1"


@check("apt install gcc python3-dev; without them kernels are not fused", seconds=300)
def gpu_compiler() -> str:
    """Compile a function and its gradient for the GPU with Triton."""
    return compiler("cuda")


@check("compile=inductor", seconds=180)
def gpu_graphs(device: str = "cuda") -> str:
    """Capture random numbers, a gradient and an optimizer in a CUDA graph, and compare with eager execution."""
    import torch

    from sheeplike.nn.compilation import EAGER_CALLS, Compilation, GraphedStep

    model = torch.nn.Linear(16, 16, device=device)
    losses = []
    for captured in (False, True):
        mine = copy.deepcopy(model)
        optimizer = torch.optim.Adam(mine.parameters(), lr=1e-2, capturable=device != "cpu")

        def update(x: Any, mine: Any = mine, optimizer: Any = optimizer) -> Any:
            loss = (mine(x + torch.rand_like(x)) - x).square().mean()
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = GraphedStep(update, torch.device(device)) if captured else update
        torch.manual_seed(1)
        losses.append(torch.stack([step(torch.ones(4, 16, device=device)) for _ in range(EAGER_CALLS + 5)]).cpu())
    close("eight captured updates", losses[1], losses[0], 1e-4)
    reads = Compilation("auto", torch.device(device)).step(lambda x: x * x.sum().item())
    for _ in range(EAGER_CALLS + 1):  # a graph cannot read a value, so that this capture fails
        reads(torch.ones(2, device=device))
    expect(torch.rand(8, device=device).isfinite().all().item(), "no random numbers after a failed capture")
    return f"{EAGER_CALLS + 5} captured updates equal the eager ones; one that cannot be captured runs eagerly"


@check("env.renderer=none or report it; captures: see howto/first_run_on_a_gpu.md", seconds=1800)
def gpu_worlds(device: str = "cuda", num_envs: int = 64, steps: int = 100) -> str:
    """Step cart-poles on the GPU: frames as on the CPU, no graph captured and no kernel compiled anew."""
    import torch
    import warp

    worlds = cartpoles(device, num_envs=num_envs, physics="warp")
    here, there = (made.reset(seed=0)[0]["pixels/fixed"] for made in (cartpoles("cpu", num_envs=num_envs), worlds))
    apart = (there.cpu().float() - here.float()).abs() > 2
    expect(apart.float().mean() < 0.005, f"{apart.float().mean():.1%} of the pixels are not those of the CPU")
    action = torch.zeros(num_envs, 1, device=device)
    for _ in range(steps - 30):
        worlds.step(action)
    captures, begin = [], warp.capture_begin

    def counted(*args: Any, external: bool = False, **options: Any) -> Any:
        captures.extend([args] * (not external))  # external ones were started by JAX
        return begin(*args, external=external, **options)

    warp.capture_begin = counted  # Warp looks it up at each capture
    for _ in range(30):
        obs, *_, info = worlds.step(action)
    obs["state"].sum().item()  # waits for the device
    expect(obs["state"].isfinite().all() and not info["nonfinite"].any(), "the simulation diverges")
    expect(not captures, f"Warp captured {len(captures)} graphs in the last 30 of {steps} steps")
    compilations = worlds.simulator.compilations
    expect(compilations == 1, f"JAX compiled the step {compilations} times")
    return f"{num_envs} cart-poles, {steps} steps, frames as on the CPU, 0 captures in the last 30"


@check("compile=<the mode that agrees with off>", seconds=1800)
def gpu_learner(device: str = "cuda", modes: Sequence[str] = ("off", "inductor", "graph"), size: Any = "1m") -> str:
    """Compare ten updates of DreamerV3 eager, compiled and captured, in float32 and with bfloat16."""
    import torch

    mixed = device == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    for precision, tolerance in ({"32-true": 5e-3} | ({"bf16-mixed": 5e-2} if mixed else {})).items():
        learned = {mode: ten_updates(device, mode, size, precision) for mode in modes}
        for mode, losses in learned.items():
            where = f"compile={mode}, {precision}"
            expect(losses.isfinite().all(), f"{where}: a loss is not finite")
            away = ((losses - learned["off"]).abs() / (1 + learned["off"].abs())).max().item()
            expect(away < tolerance, f"{where}: losses are {away:.2g} from those of compile=off")
    return f"ten updates agree: {', '.join(modes)}; total loss {torch.stack([*learned.values()])[0, -1]:.3f}"


@check("agent.size=1m, or smaller env.num_envs, agent.replay_size and agent.batch_size", seconds=1200)
def gpu_memory(*keys: str) -> str:
    """Start the default run, whose memory must fit into this GPU."""
    with tempfile.TemporaryDirectory() as place:
        program("bench", "env=franka_pick", "agent=dreamer_v3", "parts=memory", f"out={place}", *keys)
        rows = json.loads(Path(place, "bench.json").read_text())["tables"]["memory"]["rows"]
    return ", ".join(f"{name} {cells['MiB']['quartiles'][1] / 1024:.1f} GiB" for name, cells in rows.items())


# --- the program ----------------------------------------------------------------------------------------------------


@check("see the report; earlier checks may say why", seconds=900)
def dry_run() -> str:
    """Train, save and evaluate a short run of DreamerV3 on cart-pole."""
    with tempfile.TemporaryDirectory() as place:
        program("exp=dreamer_v3", "env=cartpole_balance", "dry_run=true", f"run_dir={place}/run")
        program("eval", f"run={place}/run", "episodes=2", "video=false")
    return "trained, saved and evaluated"


# --- what checks share ----------------------------------------------------------------------------------------------


def version(name: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def free_space(place: str, least: int) -> str:
    """Check that a directory can be written, and return how much space is free."""
    check_writable(Path(place))
    free = shutil.disk_usage(place).free
    expect(free >= least, f"{os.path.abspath(place)} has {free / GIB:.2f} GiB left: expected {least / GIB:g} or more")
    return f"{os.path.abspath(place)}, {free / GIB:.1f} GiB free"


def handed_over(device: str, size: int, steps: int, sync: str) -> Any:
    """Step a simulation with new actions, the last two kept alive; return all states ``(steps, size, size)``."""
    import collections

    import jax
    import jax.numpy as jnp
    import torch

    from sheeplike.bridge import to_jax, to_torch

    os.environ[SYNC] = sync
    here = jax.devices(device)[0]
    mixing, state = (jax.device_put(jnp.full((size, size), value), here) for value in (1 / size, 0.0))
    step = jax.jit(lambda state, action: ((state @ mixing) * 0.5 + action,) * 2, donate_argnums=0)
    source, seen = torch.empty(size, size, device=device), torch.empty(steps, size, size, device=device)
    held: collections.deque = collections.deque(maxlen=2)
    for i in range(steps):
        action = source.fill_(float(i % 7)).clamp(-3, 3)
        state, out = step(state, to_jax(action))
        source.fill_(-1e6)
        held.append((action, out))
        seen[i].copy_(to_torch(out))
    return seen.cpu()


def cartpoles(device: str, num_envs: int = 4, **options: Any) -> Any:
    """Make small cart-poles."""
    from sheeplike import envs

    return envs.make("cartpole_balance", num_envs=num_envs, image_size=32, device=device, **options)


def ten_updates(device: str, mode: str, size: Any, precision: str) -> Any:
    """Return the total losses ``(10,)`` of an agent with the same weights and experience in all modes."""
    import numpy as np
    import torch
    from gymnasium import spaces

    from sheeplike.agents.agent import Step
    from sheeplike.agents.dreamer_v3 import DreamerV3, DreamerV3Config

    space = spaces.Dict({"pixels/fixed": spaces.Box(0, 255, (48, 48, 3), np.uint8)})
    options = {"batch_size": 4, "batch_length": 16, "replay_size": 4 * 64, "learning_starts": 0, "warmup": 0}
    config = DreamerV3Config(size=size, observations=("*",), **options)
    action = spaces.Box(-1, 1, (1,), np.float32)
    autocast = functools.partial(torch.autocast, device, torch.bfloat16, enabled=precision == "bf16-mixed")
    agent = DreamerV3(space, action, config, num_envs=4, device=device, compile=mode, autocast=autocast)
    random, no = torch.Generator().manual_seed(0), torch.zeros(4, dtype=torch.bool, device=device)
    player = agent.player(4)
    torch.manual_seed(0)
    for i in range(40):
        seen = torch.randint(256, (4, 48, 48, 3), dtype=torch.uint8, generator=random).to(device)
        obs, first = {"pixels/fixed": seen}, no | (i == 0)
        player.act(obs, first)
        # Actions and latents do not come from the agent: rounding would give each mode another experience.
        action = torch.rand(4, 1, generator=random).to(device)
        latents = {name: torch.zeros_like(value) for name, value in player.extras.items()}
        agent.add(Step(obs, action, torch.rand(4, generator=random).to(device), first, no, no, latents))
    agent.warm_up()
    torch.manual_seed(0)
    return torch.stack([agent.update()["loss/total"] for _ in range(10)]).detach().float().cpu()


def program(*arguments: str) -> None:
    """Run a command of this program; if it fails, so does the check, with the command's last line."""
    done = subprocess.run([sys.executable, "-m", "sheeplike", *arguments], text=True, capture_output=True)
    output = done.stdout + done.stderr
    echo(output)
    expect(done.returncode == 0, f"status {done.returncode}: {last_line(output)}")


def close(what: str, found: Any, expected: Any, tolerance: float) -> None:
    """Fail if tensors differ by more than ``tolerance`` times the largest expected value."""
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    away = ((found - expected).abs().max() / expected.abs().max()).item()
    expect(away < tolerance, f"{what} are {away:.2g} from what they should be")


if __name__ == "__main__":
    main(*sys.argv[1:])
