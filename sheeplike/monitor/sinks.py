"""Loggers that other packages bring: Weights & Biases, and MLflow.

Neither can take records back. A resumed run goes on in its curves, and records after its checkpoint stand there twice,
at the same policy step; as a resume is exact, only times differ.
"""

from __future__ import annotations

import html
import io
import logging
import os
import queue
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sheeplike.files import write_atomically
from sheeplike.monitor.logger import Sink
from sheeplike.options import flat
from sheeplike.terminal import info

WAIT = 30  # seconds for a server at the start, and at the end for records that are not sent yet
PROJECT = "sheeplike"  # unless the environment names another


class WandB(Sink):
    """Weights & Biases, with policy steps on the x-axis; a process of wandb's own sends what is logged."""

    name = "W&B"
    remedy = "; nearest: 'wandb login', or WANDB_MODE=offline and 'wandb sync' later"

    def __init__(self, run_dir: Path, *, run_id: str | None = None, purge_step: int | None = None) -> None:
        import wandb

        own = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", WAIT)),
            finish_timeout=float(os.environ.get("WANDB_FINISH_TIMEOUT", WAIT)),
            finish_timeout_raises=True,
        )
        settings = wandb.setup(own).settings
        offline = settings.mode in ("offline", "dryrun", "disabled")
        # wandb.init would ask for a key on a terminal.
        if not offline and wandb.run is None and not wandb.login(prompt=False, verify=False):
            raise RuntimeError("there is no API key")
        self._wandb, self._lock = wandb, threading.Lock()
        self._run = wandb.init(
            project=settings.project or PROJECT,
            # A name given at a resume would undo what users type on the page.
            name=settings.run_name or (None if run_id else "/".join(run_dir.parts[-3:])),
            id=run_id,
            resume="allow",
            reinit="create_new",
            settings=own,
        )
        if settings.mode != "disabled":
            self.run_id = self._run.id
            info(f"W&B: {self._run.url or self._run.settings.sync_dir}")
        self._run.define_metric("policy_steps")
        self._run.define_metric("*", step_metric="policy_steps")

    def add_scalars(self, values: Mapping[str, Any], step: int) -> None:
        with self._lock:  # two threads at once would write the same row of W&B's
            self._run.log({**values, "policy_steps": step})

    def add_text(self, name: str, text: str, step: int) -> None:
        self.add_scalars({name: self._wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step)

    def add_video(self, name: str, gif: bytes, step: int) -> None:
        self.add_scalars({name: self._wandb.Video(io.BytesIO(gif), format="gif")}, step)

    def add_config(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(config, allow_val_change=True)

    def close(self) -> None:
        self._run.finish(exit_code=1 if sys.exception() else 0)


class MLflow(Sink):
    """MLflow's tracking server, or without ``MLFLOW_TRACKING_URI`` its database in the working directory.

    A thread sends the records. Parameters stay those of a run's first start; ``config.md`` has the newest.
    """

    name = "MLflow"
    remedy = "; nearest: MLFLOW_TRACKING_URI of a server that answers, or without it"

    def __init__(self, run_dir: Path, *, run_id: str | None = None, purge_step: int | None = None) -> None:
        # By default MLflow tries for minutes, and its jitter draws from the generator that environments may use.
        for key, value in (("MAX_RETRIES", "3"), ("TIMEOUT", "10"), ("BACKOFF_JITTER", "0")):
            os.environ.setdefault(f"MLFLOW_HTTP_REQUEST_{key}", value)
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # it may hold a password
        import mlflow

        logging.getLogger("mlflow").setLevel(logging.ERROR)
        self._mlflow, self._client = mlflow, mlflow.MlflowClient()
        if run_id:
            with suppress(mlflow.MlflowException):  # it is not in this store
                self._client.update_run(run_id, status="RUNNING")
                self.run_id = run_id
        self._is_new = self.run_id is None
        if self._is_new:
            drawn = random.getstate()  # MLflow's file store may draw digits of an experiment's number
            run = self._client.create_run(self._experiment(), run_name="/".join(run_dir.parts[-3:]))
            random.setstate(drawn)
            self.run_id = run.info.run_id
        info(f"MLflow: run {self.run_id}")
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue(maxsize=1000)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        now, metric = int(1000 * time.time()), self._mlflow.entities.Metric
        metrics = [metric(_valid(name), value, now, step) for name, value in values.items()]
        self._send(partial(self._client.log_batch, self.run_id, metrics=metrics))

    def add_text(self, name: str, text: str, step: int) -> None:
        self._send(partial(self._client.log_text, self.run_id, text, f"{name}.md"))

    def add_video(self, name: str, gif: bytes, step: int) -> None:
        self._send(partial(self._upload, name, gif, step))

    def add_config(self, config: Mapping[str, Any]) -> None:
        parameters = [self._mlflow.entities.Param(_valid(name), str(value)) for name, value in flat(config)]
        for first in range(0, len(parameters) * self._is_new, 100):  # as many as a request may have
            self._send(partial(self._client.log_batch, self.run_id, params=parameters[first : first + 100]))

    def close(self) -> None:
        status = "FAILED" if sys.exception() else "FINISHED"
        self._calls.put(partial(self._client.set_terminated, self.run_id, status), timeout=WAIT)
        self._calls.put(None, timeout=WAIT)
        self._thread.join(WAIT)
        if self._error or self._thread.is_alive():
            raise self._error or TimeoutError("its server is too slow, the last records are missing")

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        with suppress(self._mlflow.MlflowException):  # it exists
            return self._client.create_experiment(name)
        return self._client.get_experiment_by_name(name).experiment_id

    def _send(self, call: Callable[[], object]) -> None:
        """Call in the thread; raise the error of an earlier call. MLflow's own such mode prints a line for each."""
        error, self._error = self._error, None
        self._calls.put_nowait(call)
        if error:
            raise error

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:
                self._error = error

    def _upload(self, name: str, gif: bytes, step: int) -> None:
        with TemporaryDirectory() as place:
            file = Path(place, f"{step:012d}.gif")
            write_atomically(file, gif)
            self._client.log_artifact(self.run_id, str(file), name)


def _valid(name: str) -> str:
    return re.sub(r"[^\w./ -]", "_", name)  # MLflow allows no @ and no brackets
