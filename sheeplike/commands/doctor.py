"""Check whether this machine can run the program, and which part fails.

``python -m sheeplike doctor [quick] [check …] [key=value …]``: each check in a process of its own, which may crash.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

import sheeplike
from sheeplike.commands import Request
from sheeplike.config.compose import load_options
from sheeplike.config.errors import expand, require_writable
from sheeplike.files import write_atomically
from sheeplike.monitor.progress import phase
from sheeplike.options import CommandError, Options, explain_keys, keys_of
from sheeplike.terminal import echo, one_line
from sheeplike.tools.checks import CHECKS

SETTINGS = ("CUBLAS", "CUDA", "JAX", "LD_LIBRARY", "MUJOCO", "NVIDIA", "OMP", "SHEEPLIKE", "TORCH", "WARP", "XLA")
KEPT = 10_000  # characters of what a check that failed has printed


class DoctorOptions(Options):
    """Keys of this command."""

    checks: tuple[Literal["quick", *CHECKS], ...] = Field(
        tuple(CHECKS), min_length=1, description="what is checked; quick: what takes seconds; see below"
    )
    timeout: float | None = Field(
        None, gt=0, le=86_400, description="seconds for each check; null: several times what it usually takes"
    )
    out: str | None = Field("doctor.json", min_length=1, description="the file for a report of a failure; null: none")


def main(request: Request) -> int:
    """Print a line for each check, and save all of them; returns 1 if one failed.

    Raises:
        CommandError: no such check or key, or the file cannot be written.
    """
    if request.help:
        echo("python -m sheeplike doctor [quick] [check ...] [key=value ...]", "", explain_keys(keys_of(DoctorOptions)))
        echo("", "checks", *(f"  {name:<13} {check.meaning}" for name, check in CHECKS.items()))
        return 0
    asked = parse(request)
    out = None if asked.out is None else expand(asked.out)
    if out is not None:
        require_writable("out", out.parent, out.name, nearest="out=null")
    for signum in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        signal.signal(signum, signal.default_int_handler)  # the check that goes on is ended too
    report, width = describe_machine(), max(map(len, asked.checks))
    for name in asked.checks:
        with phase(name, after=10.0):
            result = examine(name, asked.timeout or CHECKS[name].seconds)
        advice = f"; {result['advice']}" if result["advice"] else ""
        echo(f"{result['status']:<4}  {name:<{width}}  {one_line(result['fact'])}{one_line(advice)}")
        report["checks"][name] = result
        if out is not None:
            write_atomically(out, json.dumps(report, indent=1) + "\n")
    failed = [name for name, result in report["checks"].items() if result["status"] == "FAIL"]
    echo("", f"failed: {', '.join(failed)}" if failed else "nothing failed")
    if out is not None:
        echo(f"saved: {out}" + "; it goes with a report of what failed" * bool(failed))
    return int(bool(failed))


def parse(request: Request) -> DoctorOptions:
    """The options; words without a key are checks.

    Raises:
        CommandError: no such check or key.
    """
    if request.config_dirs:
        raise CommandError("--config-dir: expected only checks and keys of doctor, which reads no configs")
    words = [text for text in request.arguments if "=" not in text]
    keys = [text for text in request.arguments if "=" in text]
    asked = load_options(DoctorOptions, [*keys, *([f"checks=[{','.join(words)}]"] if words else [])])
    wanted = {name for name in CHECKS if name in asked.checks or ("quick" in asked.checks and CHECKS[name].quick)}
    return asked.replace(checks=tuple(name for name in CHECKS if name in wanted))


def examine(name: str, timeout: float) -> dict[str, Any]:
    """Run one check in a process of its own; returns its ``status``, ``fact``, ``advice`` and ``seconds``.

    A check that hangs or dies has failed. What it printed is the ``output`` of one that failed.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryFile() as log:
        answer = Path(place, "result.json")
        command = [sys.executable, "-m", "sheeplike.tools.checks", name, str(answer)]
        # In a session of its own, so that the compilers and runs that it begins end with it.
        options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, start_new_session=True, **options)
        try:
            process.wait(timeout)
            late = False
        except subprocess.TimeoutExpired:
            late = True
        finally:
            with suppress(ProcessLookupError, PermissionError):  # it has ended, and so has all that it began
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        output = log.read().decode("utf-8", "replace")[-KEPT:]
        result = {"status": "FAIL", "fact": "", "advice": CHECKS[name].advice}
        if answer.exists() and process.returncode == 0:
            result = json.loads(answer.read_text("utf-8"))
        elif late:
            result["fact"] = f"hangs: no answer in {timeout:g} s"
        else:
            result["fact"] = f"died {describe_status(process.returncode)}: {last_line(output)}"
    result["seconds"] = round(time.monotonic() - start, 2)
    return result | ({"output": output} if result["status"] == "FAIL" else {})


def describe_status(status: int) -> str:
    """``by SIGSEGV`` or ``with status 3``."""
    return f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"


def last_line(output: str) -> str:
    """What a process that died said last."""
    return next((line for line in reversed(output.splitlines()) if line.strip()), "it said nothing")


def describe_machine() -> dict[str, Any]:
    """What a report begins with: nothing but versions, the system, and settings of libraries."""
    return {
        "sheeplike": sheeplike.__version__,
        "date": datetime.now().astimezone().isoformat(" ", timespec="seconds"),
        "python": sys.version,
        "system": platform.platform(),
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)},
        "checks": {},
    }
