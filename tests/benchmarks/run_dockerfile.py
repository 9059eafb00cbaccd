"""Run the steps of a Dockerfile's target without Docker: ``python tests/benchmarks/run_dockerfile.py [ARG=value ...]``.

Each stage gets a fresh directory in place of ``/``, and all share a fresh virtual environment in place of the image's
Python. Steps of the system (apt-get, useradd) are skipped. Then the entry point prints its help, and makes a dry run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CONTEXT = Path(__file__).parents[2]
SYSTEM = ("apt-get", "useradd")
RUNS = (["--help"], ["exp=ppo", "env=cartpole_balance", "dry_run=true", "fabric.accelerator=cpu"])
Step = tuple[str, str]  # an instruction and its arguments


def stages(text: str) -> dict[str, tuple[str, list[Step]]]:
    """Return each stage's base and steps, by name."""
    found: dict[str, tuple[str, list[Step]]] = {}
    lines = re.sub(r"^#.*\n|\\\n", "", text, flags=re.MULTILINE).splitlines()
    for line in filter(None, map(str.strip, lines)):
        word, rest = line.split(maxsplit=1)
        if word == "FROM":
            base, _, name = rest.split()
            found[name] = base, []
        else:
            found[name][1].append((word, rest))
    return found


class Build:
    """Directories of the stages built so far, below ``place``."""

    def __init__(self, place: Path, arguments: dict[str, str]) -> None:
        self.place, self.arguments = place, arguments
        self.stages = stages((CONTEXT / "Dockerfile").read_text(encoding="utf-8"))
        subprocess.run([sys.executable, "-m", "venv", place / "python"], check=True)
        self.built: dict[str, tuple[Path, dict[str, str], Path]] = {}

    def stage(self, name: str) -> tuple[Path, dict[str, str], Path]:
        """Build a stage once; returns its root, its variables and its working directory."""
        if name in self.built:
            return self.built[name]
        root, (base, steps) = self.place / name, self.stages[name]
        if base in self.stages:
            parent, variables, work = self.stage(base)
            shutil.copytree(parent, root)
            variables = {key: value.replace(f"{parent}/", f"{root}/") for key, value in variables.items()}
            work = root / work.relative_to(parent)
        else:
            root.mkdir()
            path = f"{self.place / 'python' / 'bin'}:{os.environ['PATH']}"
            variables, work = {**os.environ, "PATH": path, "PYTHONPATH": ""}, root
        for word, rest in steps:
            print(f"{name}: {word} {rest}", flush=True)
            if word in ("ENV", "ARG"):
                for pair in shlex.split(rest):
                    key, _, value = pair.partition("=")
                    value = self.arguments.get(key, value) if word == "ARG" else value
                    variables[key] = f"{root}{value}" if value.startswith("/") else value
            elif word in ("WORKDIR", "VOLUME"):
                directory = root / rest.lstrip("/")
                directory.mkdir(parents=True, exist_ok=True)
                work = directory if word == "WORKDIR" else work
            elif word == "COPY":
                self.copy(rest.split(), root, work)
            elif word == "RUN" and any(program in rest for program in SYSTEM):
                print("  skipped: a step of the system", flush=True)
            elif word == "RUN":
                command = re.sub(r"(?<=[\s(])/(?=\w)", f"{root}/", rest)
                subprocess.run(command, shell=True, cwd=work, env=variables, check=True)
            elif word == "USER":
                print("  skipped: the user stays the same", flush=True)
            elif word == "ENTRYPOINT":
                variables["ENTRYPOINT"] = rest
            else:
                raise SystemExit(f"{word}: not known here")
        self.built[name] = root, variables, work
        return self.built[name]

    def copy(self, words: list[str], root: Path, work: Path) -> None:
        source = CONTEXT
        if words[0].startswith("--from="):
            source = self.stage(words.pop(0).removeprefix("--from="))[0]
        *names, target = words
        for name in names:
            found, place = source / name.lstrip("/"), (root if target.startswith("/") else work) / target.lstrip("/")
            if found.is_dir():
                shutil.copytree(found, place, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
            else:
                shutil.copy(found, place)


def main(arguments: dict[str, str], target: str = "cpu") -> None:
    with tempfile.TemporaryDirectory() as place:
        _, variables, work = Build(Path(place), arguments).stage(target)
        for run in RUNS:
            command = json.loads(variables["ENTRYPOINT"]) + run
            print(f"{target}: {shlex.join(command)}", flush=True)
            subprocess.run(command, cwd=work, env=variables, check=True)


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
