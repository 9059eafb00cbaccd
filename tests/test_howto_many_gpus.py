"""The page on many GPUs, its Job and the Dockerfile: their commands are composed, their names exist and agree."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sheeplike import caches
from sheeplike.run.run_dir import plan

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "howto" / "use_many_gpus.md").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
SERVICE, JOB = yaml.safe_load_all((ROOT / "howto" / "job.yaml").read_text(encoding="utf-8"))
POD = JOB["spec"]["template"]["spec"]


def flags(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return torchrun's options by name, and the arguments of the module that it runs."""
    options, arguments = words[: words.index("-m")], words[words.index("-m") + 2 :]
    assert words[words.index("-m") + 1] == "sheeplike"
    pairs = re.findall(r"--([\w-]+)[= ](\S+)", " ".join(options))
    return dict(pairs), arguments


def launched() -> dict[str, tuple[dict[str, str], list[str]]]:
    """Return what each launcher of the page is told, and the arguments of the run."""
    scripts = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    torchrun, slurm, _ = (shlex.split(re.sub(r"\\\n|#SBATCH|^export .*", "", script)) for script in scripts)
    (container,) = POD["containers"]
    assert container["command"][0] == torchrun[0] == "torchrun"
    return {"torchrun": flags(torchrun), "slurm": flags(slurm), "kubernetes": flags(container["command"])}


@pytest.mark.parametrize("launcher", ["torchrun", "slurm", "kubernetes"])
def test_a_launcher_starts_as_many_ranks_as_the_run_asks_for(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options, arguments = launched()[launcher]
    config = plan(arguments, []).config
    nodes, devices = ("nodes", "ntasks-per-node") if launcher == "slurm" else ("nnodes", "nproc-per-node")
    assert (int(options[nodes]), int(options[devices])) == (config.fabric.num_nodes, config.fabric.devices)
    assert config.share().agent.batch_size * config.ranks == config.agent.batch_size
    assert {"resume=auto"} < set(arguments)
    if launcher != "slurm":
        assert int(options["max-restarts"]) > 0
        assert float(options["shutdown-timeout"]) > 30, "torchrun's own"


def test_torchrun_knows_the_options() -> None:
    known = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for launcher in ("torchrun", "kubernetes"):
        assert not [name for name in launched()[launcher][0] if f"--{name}" not in known]


def test_the_pods_of_the_job_find_each_other_and_share_the_run() -> None:
    options, arguments = launched()["kubernetes"]
    spec = JOB["spec"]
    assert (JOB["kind"], spec["completionMode"], SERVICE["kind"]) == ("Job", "Indexed", "Service")
    assert spec["completions"] == spec["parallelism"] == int(options["nnodes"])
    assert SERVICE["spec"]["clusterIP"] == "None"
    assert SERVICE["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert SERVICE["metadata"]["name"] == POD["subdomain"]
    (port,) = SERVICE["spec"]["ports"]
    assert options["rdzv-endpoint"] == f"{JOB['metadata']['name']}-0.{POD['subdomain']}:{port['port']}"
    assert POD["terminationGracePeriodSeconds"] > int(options["shutdown-timeout"])
    (container,) = POD["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(options["nproc-per-node"])
    (run_dir,) = (word.removeprefix("run_dir=") for word in arguments if word.startswith("run_dir="))
    places = [Path(mount["mountPath"]) for mount in container["volumeMounts"]]
    assert (Path(container["workingDir"]) / run_dir).parent in places
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in POD["volumes"]}


def test_the_images() -> None:
    targets = re.findall(r"^FROM (\S+) AS (\w+)$", DOCKERFILE, re.MULTILINE)
    assert {"cpu", "cuda"} <= {name for _, name in targets}
    for target in ("cpu", "cuda"):
        stage = DOCKERFILE.partition(f"AS {target}\n")[2].partition("\nFROM ")[0]
        user, entry = (re.search(rf"^{word} (.+)$", stage, re.MULTILINE)[1] for word in ("USER", "ENTRYPOINT"))
        assert user not in ("root", "0")
        assert yaml.safe_load(entry) == ["python", "-m", "sheeplike"]
    for target in re.findall(r"--target (\w+)", PAGE + DOCKERFILE):
        assert target in {name for _, name in targets}
    sources = re.findall(r"^COPY (?!--)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    needed = {name for line in sources for name in line.split()}
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"}
    assert needed == sent
    assert all((ROOT / name).exists() for name in needed)


def test_compiled_code_goes_into_the_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    (place,) = re.findall(r"^VOLUME (\S+)$", DOCKERFILE.partition("AS cpu")[2], re.MULTILINE)
    for pair in re.findall(r"\w+=\S+", " ".join(re.findall(r"^ENV (.+)$", DOCKERFILE, re.MULTILINE))):
        monkeypatch.setenv(*pair.split("=", 1))
    assert caches.directory() == place
