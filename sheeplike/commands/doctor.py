"""Check whether this machine can run the program, and which part fails.

``python -m sheeplike doctor [quick] [check …] [key=value …]`` runs each check in a process of its own, which may crash.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from datetime import datetime
from typing import Literal

from pydantic import Field

from sheeplike import __version__
from sheeplike.commands import Request
from sheeplike.config.compose import load_options
from sheeplike.config.errors import expand, require_writable
from sheeplike.files import write_atomically
from sheeplike.monitor.progress import phase
from sheeplike.options import CommandError, InvalidOption, Options, explain_keys, keys_of
from sheeplike.terminal import echo, one_line
from sheeplike.tools.checks import CHECKS, examine

# Prefixes of environment variables that the report lists.
SETTINGS = ("CUBLAS", "CUDA", "JAX", "LD_LIBRARY", "MUJOCO", "NVIDIA", "OMP", "SHEEPLIKE", "TORCH", "WARP", "XLA")
SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")  # endings of names whose values it leaves out


class DoctorOptions(Options):
    """Keys of this command."""

    checks: tuple[Literal["quick", *CHECKS], ...] | None = Field(
        None, min_length=1, description="checks to make, see below; null: all; quick: those that take seconds"
    )
    timeout: float | None = Field(
        None, gt=0, le=86_400, description="time limit of each check in seconds; null: several times its usual time"
    )
    out: str | None = Field("doctor.json", min_length=1, description="file for the report; null: none")


def main(request: Request) -> int:
    """Print a line for each check, and save all of them; return 1 if one failed."""
    if request.help:
        echo("python -m sheeplike doctor [quick] [check ...] [key=value ...]", "", explain_keys(keys_of(DoctorOptions)))
        echo("", "checks", *(f"  {name:<13} {check.meaning}" for name, check in CHECKS.items()))
        return 0
    asked = parse(request)
    out = None if asked.out is None else expand(asked.out)
    if out is not None:
        if out.suffix != ".json":  # it may be another file, such as a run's config.yaml
            raise InvalidOption("out", asked.out, "a name that ends in .json, or null", out.with_suffix(".json"))
        require_writable("out", out.parent, out.name, nearest="out=null")
        out.parent.mkdir(parents=True, exist_ok=True)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.default_int_handler)  # its KeyboardInterrupt ends the present check too
    width = max(map(len, asked.checks))
    report = {
        "sheeplike": __version__,
        "date": datetime.now().astimezone().isoformat(" ", timespec="seconds"),
        "python": sys.version,
        "system": platform.platform(),
        "settings": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(SETTINGS) and not name.endswith(SECRETS)
        },
        "checks": {},
    }
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
        echo(f"saved: {out}; attach it when you report the failure" if failed else f"saved: {out}")
    return int(bool(failed))


def parse(request: Request) -> DoctorOptions:
    """Return the options; words without a key are checks."""
    if request.config_dirs:
        raise CommandError("--config-dir: expected only checks and keys of doctor, which reads no configs")
    words = [text for text in request.arguments if "=" not in text]
    keys = [text for text in request.arguments if "=" in text]
    if words and (also := [text for text in keys if text.startswith("checks=")]):
        raise CommandError(f"{also[0]} beside {' '.join(words)}: expected all checks in one of the two forms")
    asked = load_options(DoctorOptions, [*keys, *([f"checks=[{','.join(words)}]"] if words else [])])
    checks = asked.checks or CHECKS
    wanted = {name for name in CHECKS if name in checks or ("quick" in checks and CHECKS[name].quick)}
    return asked.replace(checks=tuple(name for name in CHECKS if name in wanted))
