"""Loggers beside TensorBoard: MLflow read back by its client, W&B by the records of its file or of a server."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from sheeplike import checkpoint
from sheeplike.config.schema import LOGGERS
from sheeplike.config.sources import Sources
from sheeplike.entry_points import Registry
from sheeplike.monitor.logger import RunLogger, Sink
from sheeplike.run import run_dir as run_dir_module

KEY = "0123456789abcdef" * 3  # of no account
PLUGIN = """
from sheeplike.monitor.logger import Sink

class Paper(Sink):
    name = "paper"
    run_id = "page 1"

number = 3
"""
ANNOUNCED = """
[sheeplike.loggers]
paper = a_logger:Paper
number = a_logger:number
"""


def log(run: RunLogger, step: int, **metrics: float) -> None:
    run.log(metrics or {"loss/dyn": float(step)}, step=step, gradient_steps=0, seconds=0.0)


def clip() -> torch.Tensor:
    return torch.arange(3 * 16 * 24 * 3).reshape(3, 16, 24, 3).to(torch.uint8)


def generators() -> tuple[object, ...]:
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002


def test_a_logger_of_another_package(site):
    assert LOGGERS.names() == ["tensorboard", "wandb", "mlflow"]
    site.announce("a-logger", ANNOUNCED, PLUGIN)
    assert "paper" in LOGGERS.names()
    listed = Sources().describe().splitlines()
    assert [line for line in listed if "logger=paper" in line and "a-logger" in line]
    assert "a_logger" not in sys.modules
    assert LOGGERS.load("paper", Sink).name == "paper"
    with pytest.raises(ValueError, match="a-logger"):
        LOGGERS.load("number", Sink)


@pytest.mark.parametrize("left", [False, True])
def test_a_package_that_is_missing_is_named_with_its_installation(sheeplike, tmp_path, monkeypatch, left):
    """W&B leaves a directory of its own name, which Python would import."""
    absent = Registry("logger", "sheeplike.loggers", {"absent_package": "x:y"}, what="logger")
    monkeypatch.setattr(run_dir_module, "LOGGERS", absent)
    if left:
        (tmp_path / "absent_package").mkdir()
        monkeypatch.syspath_prepend(tmp_path)
    found = sheeplike("exp=ppo", "env=cartpole_balance", "logger=absent_package")
    assert found.status == 2
    assert "pip install absent_package" in found.error
    assert found.error.count("\n") == 1


class Distant(Sink):
    """A destination whose server may be away."""

    name = "distant"
    made: list[Distant]

    def __init__(self, run_dir: Path, *, run_id: str | None = None, purge_step: int | None = None) -> None:
        if run_id == "gone":
            raise ConnectionError("http://me:secret@host/api is away")
        self.run_id, self.purge_step, self.got = run_id or "new", purge_step, []

    def add_config(self, config: Mapping[str, object]) -> None:
        self.got.append(config)


def test_ids_of_the_checkpoint_reach_their_destinations_and_stay(tmp_path):
    assert RunLogger(tmp_path, [Distant]).run_ids == {"distant": "new"}
    run = RunLogger(tmp_path, [Distant], run_ids={"distant": "old", "other": "kept"}, purge_step=8)
    assert run.run_ids == {"distant": "old", "other": "kept"}
    run.each(lambda sink: sink.add_config({"a": {"b": 1}}))
    assert (run._sinks[0].purge_step, run._sinks[0].got) == (8, [{"a": {"b": 1}}])
    run.close()


def test_a_destination_that_fails_at_the_start_costs_one_line_without_passwords(tmp_path):
    with pytest.warns(RuntimeWarning) as warned:
        run = RunLogger(tmp_path, [Distant], run_ids={"distant": "gone"})
    log(run, 1)
    run.close()
    (line,) = (str(one.message) for one in warned)
    assert "distant" in line
    assert "secret" not in line
    assert run.run_ids == {"distant": "gone"}  # the next start may reach it


# --- MLflow


def entries(run_id: str) -> tuple[object, dict[str, list[tuple[int, float]]]]:
    """Read the run back, and its curves."""
    import mlflow

    client = mlflow.MlflowClient()
    run = client.get_run(run_id)
    history = {name: client.get_metric_history(run_id, name) for name in run.data.metrics}
    return run, {name: sorted((one.step, one.value) for one in curve) for name, curve in history.items()}


@pytest.fixture(params=["database", "files"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    places = {"database": f"sqlite:///{tmp_path}/runs.db", "files": f"file://{tmp_path}/mlruns"}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", places[request.param])
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # which is no longer the default


@pytest.mark.slow
def test_mlflow_keeps_everything_and_a_resumed_run_goes_on(store, tmp_path, monkeypatch):
    import mlflow

    # One number in ten begins with a zero, and then MLflow draws.
    number = "mlflow.store.tracking.file_store._generate_unique_integer_id"
    monkeypatch.setattr(number, lambda: 10**17 + random.randint(0, 9))
    kind, before = LOGGERS.load("mlflow", Sink), generators()
    run = RunLogger(tmp_path / "env/agent/seed_0", [kind])
    run.each(lambda sink: sink.add_config({"agent": {"size": "1m"}, "seed": 3, **{f"many_{n}": n for n in range(150)}}))
    run.each(lambda sink: sink.add_text("config", "seed: 3", 0))
    log(run, 10, **{"wm/open_loop_mse@15": 0.5, "odd": math.nan, "far": math.inf})
    run.log_video("eval/front", clip(), step=10, fps=10)
    log(run, 20, a=2.0)
    run.close()
    ids = run.run_ids
    resumed = RunLogger(tmp_path / "env/agent/seed_0", [kind], run_ids=ids, purge_step=10)
    resumed.each(lambda sink: sink.add_config({"agent": {"size": "1m"}, "seed": 4}))
    log(resumed, 20, a=2.0)
    log(resumed, 30, a=3.0)
    resumed.close()
    assert resumed.run_ids == ids
    assert generators() == before
    found, curves = entries(ids["MLflow"])
    assert (found.info.run_name, found.info.status) == ("env/agent/seed_0", "FINISHED")
    assert (found.data.params["agent.size"], found.data.params["seed"], len(found.data.params)) == ("1m", "3", 152)
    assert curves["a"] == [(20, 2.0), (20, 2.0), (30, 3.0)]
    assert curves["wm/open_loop_mse_15"] == [(10, 0.5)]
    assert {"odd", "far"} <= curves.keys()
    place = Path(mlflow.artifacts.download_artifacts(run_id=ids["MLflow"], dst_path=str(tmp_path / "got")))
    assert (place / "config.md").read_text() == "seed: 3"
    assert (place / "eval/front/000000000010.gif").read_bytes().startswith(b"GIF")


@pytest.mark.slow
def test_mlflow_begins_a_new_run_in_a_store_without_the_old_one(store, tmp_path):
    run = RunLogger(tmp_path, [LOGGERS.load("mlflow", Sink)], run_ids={"MLflow": "0" * 32})
    log(run, 1, a=1.0)
    with pytest.raises(ZeroDivisionError), closing(run):
        raise ZeroDivisionError
    assert run.run_ids["MLflow"] != "0" * 32
    found, curves = entries(run.run_ids["MLflow"])
    assert (found.info.status, curves["a"]) == ("FAILED", [(1, 1.0)])


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.slow
def test_mlflow_whose_server_dies_costs_one_line(store, tmp_path, monkeypatch, recwarn):
    address = f"http://127.0.0.1:{free_port()}"
    serve = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", os.environ["MLFLOW_TRACKING_URI"]]
    serve += ["--port", address.rpartition(":")[2], "--workers", "1"]
    server = subprocess.Popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        while server.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
                break
            time.sleep(0.5)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        run = RunLogger(tmp_path / "run", [LOGGERS.load("mlflow", Sink)])
        log(run, 1, a=1.0)
        while not entries(run.run_ids["MLflow"])[1]:
            time.sleep(0.1)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    for step in range(2, 6):
        log(run, step)
        run.log_video("eval/front", clip(), step=step, fps=10)
    run.close()
    assert len([one for one in recwarn if "MLflow" in str(one.message)]) == 1
    assert [json.loads(row)["step"] for row in (tmp_path / "run/metrics.jsonl").open()] == [1, 2, 3, 4, 5]


# --- W&B


def records(file: Path) -> Iterator[object]:
    """Yield the records of a ``.wandb`` file, which has the form of LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # the rest of a block is padding
            place += 32768 - place % 32768
            continue
        size, part = struct.unpack_from("<xxxxHB", data, place)
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if part in (1, 4):  # whole, or its last part
            yield Record.FromString(whole)
            whole = b""


def rows_of(place: Path) -> list[dict[str, object]]:
    (file,) = place.glob("*.wandb")
    rows = []
    for record in records(file):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


RUN = """
import json, sys, time
from pathlib import Path
import torch
from sheeplike.monitor.logger import RunLogger
from sheeplike.monitor.sinks import WandB

run = RunLogger(Path("env/agent/seed_0").absolute(), [WandB], run_ids=json.loads(sys.argv[1]))
print(json.dumps(run.run_ids), flush=True)
run.each(lambda sink: sink.add_config({"agent": {"size": "1m"}, "seed": 3}))
run.each(lambda sink: sink.add_text("config", "seed: 3", 0))
for step in map(int, sys.argv[2:]):
    run.log({"loss/dyn": step / 2, "odd": float("nan")}, step=step, gradient_steps=0, seconds=0)
    run.log_video("eval/front", torch.zeros(3, 16, 24, 3, dtype=torch.uint8), step=step, fps=10)
    if step == 30:
        print("pause", flush=True)
        sys.stdin.readline()
run.close()
"""


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of a run with W&B, with the environment of a user without an account."""
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return [sys.executable, "-c", RUN]


def finish(command: list[str], ids: str, *steps: int, text: str | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*command, ids, *map(str, steps)], capture_output=True, text=True, input=text, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_wandb_offline_keeps_everything_and_a_resumed_run_goes_on(wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    ids = next(line for line in finish(wandb, "{}", 10, 20).stdout.splitlines() if line.startswith("{"))
    (first,) = (tmp_path / "wandb").glob("offline-run-*")
    assert first.name.endswith(json.loads(ids)["W&B"])
    time.sleep(1)  # names of offline runs count seconds
    assert ids in finish(wandb, ids, 20, 40).stdout
    second = max((tmp_path / "wandb").glob("offline-run-*"))
    assert second != first
    for place, steps in ((first, [10, 20]), (second, [20, 40])):
        rows = rows_of(place)
        losses = [(row["policy_steps"], row["loss/dyn"]) for row in rows if "loss/dyn" in row]
        assert losses == [(step, step / 2) for step in steps]
        assert len([row for row in rows if any(key.startswith("eval/front") for key in row)]) == 2
        assert [file.read_bytes()[:3] for file in place.rglob("*.gif")] == [b"GIF"] * 2
        (file,) = place.glob("*.wandb")
        found = list(records(file))
        (run,) = (one.run for one in found if one.WhichOneof("record_type") == "run")
        assert (run.project, run.run_id) == ("sheeplike", json.loads(ids)["W&B"])
        settings = {one.key: json.loads(one.value_json) for each in found for one in each.config.update}
        assert settings["agent"] == {"size": "1m"}
        axes = [one.metric for one in found if one.WhichOneof("record_type") == "metric"]
        assert [one.step_metric for one in axes if one.glob_name == "*"] == ["policy_steps"]
    assert not [path for path in (tmp_path / "env").rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


@pytest.mark.slow
def test_wandb_disabled_has_no_id_to_keep(wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert finish(wandb, "{}", 10).stdout.splitlines() == ["{}"]
    assert not (tmp_path / "wandb").exists()


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{}, {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:9"}])
def test_wandb_without_a_key_or_a_server_costs_one_line_and_asks_nothing(wandb, tmp_path, monkeypatch, variables):
    """On a terminal, where W&B would ask."""
    for name, value in {"WANDB_INIT_TIMEOUT": "3", **variables}.items():
        monkeypatch.setenv(name, value)
    terminal, inside = os.openpty()
    with subprocess.Popen([*wandb, "{}", "10"], stdin=inside, stdout=inside, stderr=inside) as process:
        os.close(inside)
        output = b""
        with suppress(OSError):  # the terminal is closed
            while part := os.read(terminal, 4096):
                output += part
    os.close(terminal)
    assert process.returncode == 0
    assert output.count(b"RuntimeWarning") == 1
    assert b"WANDB_MODE=offline" in output
    assert KEY.encode() not in output


class Service(BaseHTTPRequestHandler):
    """The part of W&B's server that a run needs."""

    uploaded: list[str]
    answers: ClassVar = {
        "UpsertBucket": {
            "upsertBucket": {
                "bucket": {"id": "x", "name": "r", "project": {"name": "sheeplike", "entity": {"name": "me"}}},
                "inserted": True,
            }
        },
        "CreateRunFiles": {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": []}},
        "RunResumeStatus": {"model": None},
    }

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        answer: dict[str, object] = {}
        if self.path.endswith("/graphql"):
            text = body.decode()
            answer = {"data": next((value for name, value in self.answers.items() if name in text), {})}
        elif self.path.endswith("/file_stream"):
            self.uploaded.append(body.decode())
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True])
def test_wandb_whose_server_dies_costs_one_line(wandb, tmp_path, monkeypatch, dies):
    Service.uploaded = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "5" if dies else "60")
    command = [*wandb, "{}", "10", "20", "30", "40", "50"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        while "pause" not in process.stdout.readline():
            pass
        if dies:
            server.shutdown()
            server.server_close()
        _, problems = process.communicate("\n")
    if not dies:
        server.shutdown()
        server.server_close()
    assert process.returncode == 0, problems
    assert problems.count("RuntimeWarning") == dies, problems
    assert dies or "policy_steps" in "".join(Service.uploaded)
    assert [json.loads(row)["step"] for row in (tmp_path / "env/agent/seed_0/metrics.jsonl").open()] == [
        10,
        20,
        30,
        40,
        50,
    ]


# --- a whole run


@pytest.mark.slow
def test_a_run_with_all_loggers_that_is_killed_goes_on_in_the_same_runs(store, wandb, tmp_path, monkeypatch):
    """Its metrics are those of a run without them."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    job = [sys.executable, "-m", "sheeplike", "exp=ppo", "env=cartpole_balance", "dry_run=true", "resume=auto"]
    job += ["total_steps=192", "checkpoint.every=64", "eval.every=64"]
    with_all, alone = [*job, "logger=[tensorboard,wandb,mlflow]", "run_dir=all"], [*job, "logger=[]", "run_dir=alone"]
    with subprocess.Popen(with_all, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not checkpoint.list_checkpoints(tmp_path / "all/checkpoints"):
            time.sleep(0.05)
        process.kill()
    ids = checkpoint.load_latest(tmp_path / "all/checkpoints", only=())[0]["loggers"]
    assert ids.keys() == {"W&B", "MLflow"}
    for command in (with_all, alone):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert KEY not in done.stdout + done.stderr
    assert checkpoint.load_latest(tmp_path / "all/checkpoints", only=())[0]["loggers"] == ids
    learnt = []
    for name in ("all", "alone"):
        rows = [json.loads(row) for row in (tmp_path / name / "metrics.jsonl").open()]
        timed = ("time/", "seconds", "health/")
        learnt.append([{key: value for key, value in row.items() if not key.startswith(timed)} for row in rows])
    assert learnt[0] == learnt[1]
    found, curves = entries(ids["MLflow"])
    assert found.info.status == "FINISHED"
    steps = [row["step"] for row in learnt[1] if "eval/return_mean" in row]
    assert sorted({step for step, _ in curves["eval/return_mean"]}) == steps
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{ids['W&B']}"))) == 2
    files = [path for path in (tmp_path / "all").rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
