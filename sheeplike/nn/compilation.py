"""Fused kernels by torch.compile, and a whole step as one CUDA graph.

No model depends on this file; an agent names its hot functions once, in its constructor.

- Compiled are small functions: the cell of a recurrent scan, one step of imagination, a loss. A loop of 64 steps around
  a compiled cell compiles in the time of one step; unrolled by the compiler it takes minutes.
- Shapes are static: a function is compiled once per shape.
- On a GPU the launches of the many small kernels cost more than the kernels: the whole update, backward pass and
  optimizer included, is captured as one graph and launched at once.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.util
import os
import re
import shutil
import sysconfig
import traceback
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sheeplike.nn.patches import end_capture, keep_headers, optimize_less, without_line_tables
from sheeplike.terminal import text_of, warn

EAGER_CALLS = 3  # calls of a step before it is captured
MODES = ("auto", "off", "inductor", "graph")


class CannotCompile(ValueError):
    """A mode, requested by name, that does not work on this machine."""


_OUT_OF_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED|out of memory|can(?:'t|not) allocate memory|not enough memory|failed to allocate|ALLOC_FAILED"
    r"|cudaErrorMemoryAllocation",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if torch, JAX, Warp, NumPy or Python ran out of memory, in ``error`` or in what caused it."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, OSError) and error.errno == 12:  # ENOMEM
            return True
        # JAX and torch raise subclasses of RuntimeError, Warp raises it as it is.
        if isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(text_of(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


class Compilation:
    """Compiler of functions and steps.

    Args:
        mode: ``off``: eager; ``inductor``: fused kernels; ``graph``: fused kernels, and each step as one CUDA graph;
            ``auto``: ``graph`` on a GPU, ``inductor`` on a CPU, less where that fails.

    If torch fails, at once or at the first compilation or capture, ``auto`` sets ``fused`` or ``graphs`` to False with
    one line on stderr; other modes raise :class:`CannotCompile`.
    """

    def __init__(self, mode: str, device: torch.device) -> None:
        assert mode in MODES, f"compile={mode!r}: expected one of {', '.join(MODES)}"
        if mode == "graph" and device.type != "cuda":
            raise ValueError(f"compile=graph: CUDA graphs need a GPU, but the device is {device}; nearest: inductor")
        self.asked, self.device = mode, device
        self.fused = mode != "off"
        self.graphs = device.type == "cuda" and mode in ("auto", "graph")
        self._shared: dict[Hashable, Callable] = {}
        if self.fused and (missing := _missing_backend(device)):
            self._leave_out("fused", CannotCompile(missing))
        if self.fused and device.type == "cpu":
            keep_freed_memory()
            keep_headers()
            optimize_less()

    @property
    def mode(self) -> str:
        """Description for people: ``off``, ``inductor``, ``graph`` or ``graph, kernels not fused``."""
        if not self.graphs:
            return "inductor" if self.fused else "off"
        return "graph" if self.fused else "graph, kernels not fused"

    def _leave_out(self, part: Literal["fused", "graphs"], error: Exception) -> None:
        """Go on without ``part``, which failed; CannotCompile if the user chose the mode."""
        first: BaseException = error
        while part == "graphs" and first.__context__:  # later errors only repeat that the capture has failed
            first = first.__context__
        reason = text_of(first).strip().partition("\n")[0]
        if self.asked != "auto":
            nearest = "off" if self.device.type == "cpu" else "auto"
            raise CannotCompile(f"compile={self.asked}: {reason}; nearest: {nearest}") from error
        if os.environ.get("SHEEPLIKE_DEBUG") == "1":
            traceback.print_exception(error)
        setattr(self, part, False)
        what = "kernels are not fused" if part == "fused" else "no CUDA graphs"
        warn(f"{what}, which is slower: {reason} (python -m sheeplike doctor says more)")

    def warm_up(self, step: Callable[[], object]) -> None:
        """Call ``step`` until everything in it is compiled and captured."""
        done, calls = 0, EAGER_CALLS + 2 if self.graphs else 2
        while done < calls:
            try:
                step()
            except Exception as error:  # the backward pass is compiled when it is first needed
                if not self.fused or isinstance(error, CannotCompile) or is_out_of_memory(error):
                    raise
                with self.paused():
                    step()  # an error of the step's own is raised here
                self._leave_out("fused", error)
                done = 0
                continue
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            done += 1

    def paused(self) -> AbstractContextManager:
        """Return a context in which compiled functions run eagerly, for rare calls with other shapes."""
        return torch.compiler.set_stance("force_eager") if self.fused else nullcontext()

    def kernels(self, function: Callable) -> Callable:
        """Return ``function``, which has no branches on device values, with fused kernels."""
        if not self.fused:
            return function
        torch._dynamo.config.recompile_limit = 256  # a program may have many runs
        # torch's own generators draw, so that a seed means the same run, compiled or not.
        options: dict[str, Any] = {"fallback_random": True}
        if self.device.type == "cpu":
            # One C++ file per function instead of one per kernel compiles faster, and calls between kernels cost less.
            # vec_isa_ok skips programs that test the vector instructions; if a compiler lacks some, nothing is fused.
            options |= {"cpp_wrapper": True, "cpp.vec_isa_ok": True, **without_line_tables()}
        compiled, works = torch.compile(function, fullgraph=True, dynamic=False, options=options), False

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal works
            if not self.fused or torch.compiler.is_compiling():  # the function around this one fuses it too
                return function(*args, **kwargs)
            try:
                result = compiled(*args, **kwargs)
            except Exception as error:
                # The first call may fail in other ways too: a kernel that cannot be launched, a type that is refused.
                if is_out_of_memory(error) or (works and not isinstance(error, _failures())):
                    raise
                result = function(*args, **kwargs)  # an error of the function's own is raised here
                self._leave_out("fused", error)
                return result
            works = True
            return result

        return call

    def methods(self, owner: object, *names: str) -> None:
        """Replace methods of ``owner`` by compiled ones."""
        for name in names:
            setattr(owner, name, self.kernels(getattr(owner, name)))

    def step(self, function: Callable) -> Callable:
        """Return a whole step, of compiled and plain functions, as one CUDA graph where the mode says so."""
        return GraphedStep(function, self.device, self) if self.graphs else function

    def shared_step(self, key: Hashable, function: Callable) -> Callable:
        """Return the :meth:`step` of ``key``, made once, so that a new player reuses the graph of an old one."""
        if key not in self._shared:
            self._shared[key] = self.step(function)
        return self._shared[key]


class GraphedStep:
    """A function as a CUDA graph: one launch for all of its kernels.

    The first calls run it eagerly, on a stream of their own, so that everything is compiled, tuned and allocated; the
    next one captures it. Every call, these included, does what ``function`` does.

    Args:
        function: tensors in, tensors (nested in tuples and dicts) or None out. It reads and writes nothing on the host,
            and its persistent tensors (parameters, moments, rings) stay at their addresses. Python numbers are baked in
            at the capture, and 0-dim outputs are float32.
        owner: compilation that goes on without graphs when a capture fails; None: the error is raised.
    """

    def __init__(self, function: Callable, device: torch.device, owner: Compilation | None = None) -> None:
        self.function, self.device, self.owner = function, device, owner
        self.captures = 0
        self._calls = 0
        self._stream = torch.cuda.Stream(device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *inputs: Any) -> Any:
        if self.owner is not None and not self.owner.graphs:
            self._graph = None
            return self._on_side_stream(inputs)
        leaves, spec = pytree.tree_flatten(inputs)
        if self._calls < EAGER_CALLS:
            self._calls += 1
            return self._on_side_stream(inputs)
        if self._graph is None:
            self._try_capture(leaves, spec)
            # Not in an except block, which would keep the memory of the failed capture alive.
            if self._graph is None:
                torch.cuda.empty_cache()  # a capture needs memory of its own; eager calls, which worked, may still fit
                return self._on_side_stream(inputs)
        kinds = list(map(_kind, leaves))
        assert (spec, kinds) == (self._spec, list(map(_kind, self._inputs))), f"captured with others than {kinds}"
        if leaves:
            torch._foreach_copy_(self._inputs, leaves, non_blocking=True)
        self._graph.replay()
        # The next replay writes its results to the same memory. Scalars are copied together: there are many.
        scalars = iter(self._scalars.clone().unbind())
        outputs = [next(scalars) if leaf.dim() == 0 else leaf.clone() for leaf in self._outputs]
        return pytree.tree_unflatten(outputs, self._output_spec) if outputs else None

    def _try_capture(self, leaves: list[Tensor], spec: Any) -> None:
        random, pool = torch.cuda.get_rng_state(self.device), torch.cuda.graph_pool_handle()
        try:
            self._capture(leaves, spec, pool)
        except Exception as error:
            if self.owner is None:
                raise
            end_capture(self.device, random, pool)
            self.owner._leave_out("graphs", error)

    def _on_side_stream(self, inputs: tuple) -> Any:
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            outputs = self.function(*inputs)
            if self._graph is None:  # its kernels have to be loaded before the capture
                _stack_scalars(pytree.tree_leaves(outputs), self.device)
        current.wait_stream(self._stream)
        for leaf in pytree.tree_leaves((inputs, outputs)):
            if leaf is not None:
                leaf.record_stream(current)
                leaf.record_stream(self._stream)
        return outputs

    def _capture(self, leaves: list[Tensor], spec: Any, pool: Any) -> None:
        self._inputs, self._spec = [leaf.clone() for leaf in leaves], spec
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()  # a tensor or an older graph that Python frees would break the capture
        try:
            # A capture that fails would leave its stream behind as the current one. Only this thread's calls are
            # refused while capturing: XLA's threads may allocate at any time.
            with (
                torch.cuda.stream(torch.cuda.current_stream(self.device)),
                torch.cuda.graph(graph, pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                outputs = self.function(*pytree.tree_unflatten(self._inputs, spec))
                self._outputs, self._output_spec = pytree.tree_flatten(() if outputs is None else outputs)
                self._scalars = _stack_scalars(self._outputs, self.device)
        finally:
            if collecting:
                gc.enable()
        self._graph = graph
        self.captures += 1


def _stack_scalars(outputs: list[Tensor], device: torch.device) -> Tensor:
    scalars = [leaf.float() for leaf in outputs if leaf is not None and leaf.dim() == 0]
    return torch.stack(scalars) if scalars else torch.zeros(0, device=device)


def _failures() -> type[Exception]:
    """Return the errors of torch.compile, imported only when there is one: it takes a second."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def _kind(leaf: Tensor) -> tuple[torch.Size, torch.dtype]:
    return leaf.shape, leaf.dtype


def keep_freed_memory(keep: bool = True) -> None:
    """Have this process keep the memory that it frees, or return it to the system as usual.

    glibc maps and unmaps memory for every large tensor, and the system clears each page again, which on a CPU took a
    fifth of an update. Without glibc this does nothing.
    """
    trim_threshold, mmap_threshold, mmap_max = -1, -3, -4  # malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(mmap_max, 0 if keep else 65_536)
    # glibc's own thresholds, which follow the sizes freed, settle at 32 and 64 MiB.
    mallopt(mmap_threshold, 32 * 2**20)
    mallopt(trim_threshold, 2**31 - 1 if keep else 64 * 2**20)


def _missing_backend(device: torch.device) -> str | None:
    """Return what torch.compile lacks for this device, or None."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "torch.compile needs Triton for a GPU"
    if not any(shutil.which(name) for name in ("g++", "clang++", "c++", "gcc", "clang", "cc")):
        return "torch.compile needs a C++ compiler such as g++"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return None if header.is_file() else f"torch.compile needs Python's headers ({header}; package python3-dev)"
