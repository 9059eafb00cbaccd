"""``hf://``: agents from a hub and on it, which is a server here that speaks as much of its language as is needed."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch
import yaml

from sheeplike.__main__ import main
from sheeplike.config.compose import load, load_saved
from sheeplike.config.saved import changes
from sheeplike.config.schema import to_data
from sheeplike.config.sources import Sources
from sheeplike.options import CommandError
from sheeplike.trained import card, exported, hub
from sheeplike.trained.exported import load_agent

pytest.importorskip("huggingface_hub")
from huggingface_hub import constants

FILES = ["config.yaml", "model.json", "weights.safetensors"]
JOB = ("exp=ppo", "env=gym", "env.id=CartPole-v1", "env.options.frames=none", "agent.observations=[state]")
JOB += ("profile=cpu", "compile=off", "dry_run=true")
ZOO = Path(__file__).parents[2] / "howto" / "zoo"  # agents of more tasks than the package brings


class Hub(ThreadingHTTPServer):
    """Repositories by name, each with its commits and branches; tokens that may see what is private."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []
        self.down = False
        self.faults: list[str] = []  # of the next downloads of weights
        self.busy = 0  # lists of files that are refused first
        self.sizes: dict[str, int] = {}  # that the hub claims

    def commit(self, repo: str, files: dict[str, bytes], branch: str = "main") -> str:
        found = self.repos.setdefault(repo, {"commits": {}, "refs": {}, "private": False})
        sha = hashlib.sha1(repr((len(found["commits"]), sorted(files.items()))).encode()).hexdigest()
        found["commits"][sha] = files
        found["refs"][branch] = sha
        return sha


class Answer(BaseHTTPRequestHandler):
    """One answer of the hub."""

    server: Hub

    def log_message(self, *_: object) -> None: ...

    def reply(self, content: Any, status: int = 200, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content_Length": str(len(data))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def find(self, repo: str, revision: str = "main") -> tuple[str, dict[str, bytes]] | None:
        """The commit; or None, once the request was refused."""
        found = self.server.repos.get(repo)
        if found is None or (found["private"] and "Authorization" not in self.headers):
            self.reply({"error": "no"}, 401, X_Error_Code="RepoNotFound")
            return None
        sha = found["refs"].get(unquote(revision), revision)
        if sha not in found["commits"]:
            self.reply({"error": "no"}, 404, X_Error_Code="RevisionNotFound")
            return None
        return sha, found["commits"][sha]

    def do_GET(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        if self.server.down:
            self.reply({"error": "busy"}, 503)
            return
        match urlsplit(self.path).path.split("/")[1:]:
            case ["api", "models", owner, name, *rest] if not rest or rest[0] in ("revision", "tree"):
                if (found := self.find(f"{owner}/{name}", *rest[1:2])) is None:
                    return
                if self.server.busy:
                    self.server.busy -= 1
                    self.reply({"error": "busy"}, 503)
                    return
                sha, files = found
                sizes = {path: self.server.sizes.get(path, len(content)) for path, content in files.items()}
                if rest[:1] == ["tree"]:
                    entries = [{"type": "file", "path": path, "size": n, "oid": sha} for path, n in sizes.items()]
                    self.reply(entries, Content_Type="application/json")
                    return
                private = self.server.repos[f"{owner}/{name}"]["private"]
                about = {"id": f"{owner}/{name}", "sha": sha, "private": private}
                self.reply(about | {"siblings": [{"rfilename": path} for path in files]})
            case [owner, name, "resolve", revision, path]:
                if found := self.find(f"{owner}/{name}", revision):
                    self.download(*found, path)
            case _:
                self.reply({}, 404)

    do_HEAD = do_GET

    def download(self, sha: str, files: dict[str, bytes], path: str) -> None:
        if path not in files:
            self.reply({}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
            return
        content, etag = files[path], hashlib.sha256(files[path]).hexdigest()
        about = {"ETag": f'"{etag}"', "X_Repo_Commit": sha}
        if self.command == "HEAD" and path in self.server.sizes:
            about["X_Linked_Size"] = str(self.server.sizes[path])
        faulty = (self.command, path) == ("GET", exported.WEIGHTS) and self.server.faults
        fault = self.server.faults.pop(0) if faulty else ""
        if fault == "refuse":
            self.reply({}, 500)
        elif fault == "cut":
            self.reply(content[: len(content) // 2], **about | {"Content_Length": str(len(content))})
            self.close_connection = True
        else:
            self.reply(content, **about)

    def do_POST(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        content = self.rfile.read(int(self.headers["Content-Length"]))
        match urlsplit(self.path).path.split("/")[1:]:
            case ["api", "validate-yaml"]:
                self.reply({})
            case _ if self.headers.get("Authorization") != "Bearer hf_writer":
                self.reply({"error": "no"}, 401)
            case ["api", "repos", "create"]:
                asked = json.loads(content)
                repo = f"{asked['organization']}/{asked['name']}"
                if repo in self.server.repos:
                    self.reply({"error": "exists", "url": f"{self.server.url}/{repo}"}, 409)
                    return
                self.server.commit(repo, {".gitattributes": b""})
                private = asked.get("visibility") == "private" or asked.get("private") is True
                self.server.repos[repo]["private"] = private
                self.reply({"url": f"{self.server.url}/{repo}"})
            case ["api", "models", _, _, "preupload", _]:
                files = [file["path"] for file in json.loads(content)["files"]]
                self.reply({"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in files]})
            case ["api", "models", owner, name, "commit", branch]:
                lines = [json.loads(line) for line in content.splitlines()]
                files = {line["value"]["path"]: line["value"] for line in lines if line["key"] == "file"}
                decoded = {path: base64.b64decode(value["content"]) for path, value in files.items()}
                sha = self.server.commit(f"{owner}/{name}", decoded, branch)
                self.reply({"commitUrl": f"{self.server.url}/{owner}/{name}/commit/{sha}", "commitOid": sha})
            case _:
                self.reply({}, 404)


@pytest.fixture
def server() -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def online(server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """The server, as the hub of this process, with an empty cache and no token."""
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return server


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was evaluated once, without a film."""
    place = tmp_path_factory.mktemp("trained") / "mine"
    main([*JOB, f"run_dir={place}"])
    main(["eval", f"run={place}", "episodes=3"])
    return place


@pytest.fixture(scope="module")
def files(trained: Path) -> dict[str, bytes]:
    """The files of its export."""
    place = trained.parent / "export"
    main(["export", f"run={trained}", f"to={place}"])
    return {path.name: path.read_bytes() for path in place.iterdir()}


def acts(place: Path | str) -> torch.Tensor:
    torch.manual_seed(0)
    player = load_agent(place).player(4)
    return player.act({"state": torch.linspace(-1, 1, 16).reshape(4, 4)}, torch.ones(4, dtype=torch.bool))


# Download


def test_an_agent_of_the_hub_is_the_one_that_was_exported(
    online: Hub, trained: Path, files: dict[str, bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    extra = {"run_me.py": b"raise SystemExit", "pytorch_model.bin": pickle.dumps(1), "README.md": b"# card"}
    sha = online.commit("owner/name", files | extra | {"below/weights.safetensors": b"x"})
    assert torch.equal(acts("hf://owner/name"), acts(trained.parent / "export"))
    assert f"hf://owner/name@{sha}" in capfd.readouterr().out
    (place,) = Path(constants.HF_HUB_CACHE).glob("models--owner--name/snapshots/*")
    assert (place.name, sorted(path.name for path in place.iterdir())) == (sha, FILES)
    assert {path: (place / path).read_bytes() for path in FILES} == files


def test_a_branch_that_moves_and_a_commit_that_stays(
    online: Hub, files: dict[str, bytes], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = exported.find
    old = online.commit("owner/name", files)
    assert find("hf://owner/name").name == old
    model = json.loads(files["model.json"]) | {"step": 7}
    new = online.commit("owner/name", files | {"model.json": json.dumps(model).encode()})
    online.commit("owner/name", files, "refs/pr/1")
    assert [find(f"hf://owner/name{at}").name for at in ("", "@main", f"@{old}", f"@{new}")] == [new, new, old, new]
    assert find("hf://owner/name@refs/pr/1").name not in (old, new)
    assert json.loads((find("hf://owner/name") / "model.json").read_text())["step"] == 7
    online.asked.clear()
    capfd.readouterr()
    find(f"hf://owner/name@{old}")
    assert online.asked == []
    assert capfd.readouterr().out.count(old) == 2, "it is pinned already"

    # Without a network: what is in the cache.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert [find(f"hf://owner/name{at}").name for at in ("", f"@{old}")] == [new, old]
    with pytest.raises(CommandError, match="hf://owner/other"):
        find("hf://owner/other")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    online.down = True
    assert find("hf://owner/name").name == new
    online.shutdown()
    online.server_close()
    assert find("hf://owner/name").name == new


def test_a_download_that_breaks(online: Hub, files: dict[str, bytes], refusal: Callable[..., str]) -> None:
    """It is tried again; if that fails, nothing is taken for whole."""
    online.commit("owner/name", files)
    online.faults = ["cut", "refuse"]
    error = refusal("eval", "run=hf://owner/name")
    assert "hf://owner/name" in error
    cache = Path(constants.HF_HUB_CACHE)
    assert not list(cache.rglob(exported.WEIGHTS))
    online.faults = ["cut"]
    place = exported.find("hf://owner/name")
    assert (place / exported.WEIGHTS).read_bytes() == files[exported.WEIGHTS]


@pytest.mark.parametrize(
    ("address", "part"),
    [
        ("hf://owner", "hf://<owner>/<name>"),
        ("hf://", "hf://<owner>/<name>"),
        ("hf:/owner/name", "hf://<owner>/<name>"),
        ("hf://owner/name/more", "hf://<owner>/<name>"),
        ("hf://owner/name@", "hf://<owner>/<name>"),
        ("hf://owner/name@../../x", "hf://<owner>/<name>"),
        ("hf://../name", "hf://<owner>/<name>"),
        ("hf://owner/na--me", "hf://owner/na--me"),
        ("hf://owner/unknown", "HF_TOKEN"),
        ("hf://owner/hidden", "HF_TOKEN"),
        ("hf://owner/name@v9", "hf://owner/name@v9"),
        (f"hf://owner/name@{'0' * 40}", "0" * 40),
        ("hf://owner/renamed", "weights.safetensors"),
        ("hf://owner/empty", "model.json"),
    ],
)
def test_what_is_not_there_is_one_line(
    online: Hub, files: dict[str, bytes], refusal: Callable[..., str], address: str, part: str
) -> None:
    online.commit("owner/name", files)
    online.commit("owner/hidden", files)
    online.repos["owner/hidden"]["private"] = True
    online.commit("owner/empty", {"README.md": b""})
    renamed = {name.replace("weights", "model"): content for name, content in files.items()}
    online.commit("owner/renamed", renamed)
    assert refusal("eval", f"run={address}").names(address, part)
    with pytest.raises(CommandError):
        load_agent(address)


def test_a_file_that_is_too_large_is_not_begun(
    online: Hub, files: dict[str, bytes], refusal: Callable[..., str]
) -> None:
    online.commit("owner/name", files)
    online.sizes[exported.WEIGHTS] = hub.LIMIT + 1
    assert exported.WEIGHTS in refusal("eval", "run=hf://owner/name")
    online.busy = 1
    assert "503" in refusal("eval", "run=hf://owner/name")
    assert not [line for line in online.asked if line.startswith("GET /owner")]


class Bomb:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("PWNED"),)


def hostile(files: dict[str, bytes], kind: str) -> dict[str, bytes]:
    """The files of an agent, one of them replaced; with the right digest, of which its author is the master."""
    bad = {
        "pickle": {exported.WEIGHTS: pickle.dumps(Bomb())},
        "cut": {exported.WEIGHTS: files[exported.WEIGHTS][:-1]},
        "tag": {"config.yaml": b"!!python/object/apply:os.system [touch PWNED]"},
        "deep": {"config.yaml": b"x: " + b"[" * 5000},
        "link": {"config.yaml": b"/etc/passwd"},  # what git has of a link
        "model": {"model.json": files["model.json"].replace(b'"Box"', b'"os.system"')},
    }[kind]
    if exported.WEIGHTS in bad:
        model = json.loads(files["model.json"]) | {"sha256": hashlib.sha256(bad[exported.WEIGHTS]).hexdigest()}
        bad["model.json"] = json.dumps(model).encode()
    return files | bad


@pytest.mark.parametrize("kind", ["pickle", "cut", "tag", "deep", "link", "model"])
def test_nothing_from_the_hub_is_more_than_data(
    online: Hub, files: dict[str, bytes], refusal: Callable[..., str], kind: str
) -> None:
    online.commit("owner/name", hostile(files, kind))
    refusal("eval", "run=hf://owner/name", "episodes=2", "video=false")
    with pytest.raises(CommandError):
        load_agent("hf://owner/name")
    assert not Path("PWNED").exists()


def test_weights_that_were_altered(online: Hub, files: dict[str, bytes], refusal: Callable[..., str]) -> None:
    weights = bytearray(files[exported.WEIGHTS])
    weights[-1] ^= 1
    online.commit("owner/name", files | {exported.WEIGHTS: bytes(weights)})
    assert exported.WEIGHTS in refusal("eval", "run=hf://owner/name", "episodes=2", "video=false")


def test_without_its_package(monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]) -> None:
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    assert "[hub]'" in refused("eval", "run=hf://owner/name")
    assert "[hub]'" in refused("publish", "run=demo:franka_pick", "to=hf://owner/name")


def test_the_package_is_loaded_for_an_address_alone() -> None:
    code = (
        "import sys; from sheeplike.commands import publish, eval; from sheeplike.trained.exported import load_agent\n"
        "load_agent('demo:franka_pick_ppo'); assert 'huggingface_hub' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_the_variables_of_the_hub_count(server: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    """Processes of their own, since they are read once; results go below the working directory."""
    sha = server.commit("owner/name", files)
    variables = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "sheeplike", "eval", "run=hf://owner/name", "episodes=2", "video=false"]
    results = []
    for more in ({}, {"HF_HUB_OFFLINE": "1"}):
        done = subprocess.run(command, env={**os.environ, **variables, **more}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert sha in done.stdout
        (result,) = Path("logs/hub/owner--name", sha[:12], "eval").glob("*/result.json")
        results.append(result.read_bytes())
        shutil.rmtree("logs")
        online = [line for line in server.asked if line.startswith("GET /owner")]
        server.asked.clear()
        assert bool(online) != bool(more)
    assert results[0] == results[1]
    assert not [path for path in (tmp_path / "home").rglob("*.json") if path.name == "result.json"]


# Upload


def front_of(text: str) -> dict[str, Any]:
    return yaml.safe_load(text.split("---\n")[1])


def test_publishing_uploads_an_export_and_the_card(
    online: Hub, trained: Path, files: dict[str, bytes], refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ("publish", f"run={trained}", "to=hf://owner/name")
    assert "HF_TOKEN" in refusal(*line)
    assert online.repos == {}
    monkeypatch.setenv("HF_TOKEN", "hf_writer")
    main([*line, "license=mit"])
    assert len([asked for asked in online.asked if "/commit/" in asked]) == 1
    found = online.repos["owner/name"]
    assert not found["private"]
    uploaded = found["commits"][found["refs"]["main"]]
    assert sorted(uploaded) == sorted(["README.md", "render.gif", *FILES])
    assert {name: uploaded[name] for name in FILES} == files
    (result,) = trained.glob("eval/*/result.json")
    record, text = json.loads(result.read_text()), uploaded["README.md"].decode()
    front = front_of(text)
    assert {name: front[name] for name in ("license", "library_name", "pipeline_tag")} == {
        "license": "mit",
        "library_name": "sheeplike",
        "pipeline_tag": "reinforcement-learning",
    }
    (scores,) = front["model-index"][0]["results"]
    values = {metric["type"]: metric["value"] for metric in scores["metrics"]}
    assert values["mean_reward"] == record["metrics"]["eval/return_mean"]
    assert "run=hf://owner/name\n" in text
    assert f"checkpoint={record['step']}\n" in (result.parent / card.CARD).read_text()
    assert f"{sum(value.numel() for value in load_agent(trained).state_dict().values()):,}" in text

    # What was uploaded plays, and an export and an agent of the hub can be published too.
    assert torch.equal(acts("hf://owner/name"), acts(trained))
    shutil.copytree(trained.parent / "export", "mine")
    assert "eval run=mine" in refusal("publish", "run=mine", "to=hf://owner/name")
    shutil.copytree(result.parent, Path("mine/eval", result.parent.name))
    main(["publish", "run=mine", "to=hf://owner/hidden", "private=true"])
    assert online.repos["owner/hidden"]["private"]
    hidden = online.repos["owner/hidden"]
    assert {name: hidden["commits"][hidden["refs"]["main"]][name] for name in FILES} == files

    # What is public stays so, and the one who asks for something private hears it before anything is uploaded.
    commits = len(found["commits"])
    assert "private=true" in refusal("publish", "run=mine", "to=hf://owner/name", "private=true")
    assert len(found["commits"]) == commits


def test_what_is_refused_before_anything_is_uploaded(
    online: Hub, trained: Path, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_writer")
    shutil.copytree(trained, "run")
    assert "to=" in refusal("publish", "run=run")
    assert "hf://owner/name" in refusal("publish", "run=run", "to=hf://owner/name@main")
    assert "to=hf://owner" in refusal("publish", "run=run", "to=hf://owner")
    assert "to=hf:/owner/name" in refusal("publish", "run=run", "to=hf:/owner/name")
    assert "nearest: to=run_2" in refusal("publish", "run=run", "to=run")
    assert "private=false" in refusal("publish", "run=run", "to=look", "private=true")
    (result,) = Path("run").glob("eval/*/result.json")
    wrong = result.read_text().replace('"parameters": ', '"parameters": "x", "": ')
    huge = re.sub(r'"bytes": \d+', f'"bytes": 1{"0" * 400}', result.read_text())
    for content in ("{}", "[]", "", '{"run": 3}', wrong, huge, "[" * 100_000):
        result.write_text(content)
        assert "result.json" in refusal("publish", "run=run", "to=hf://owner/name")
    shutil.rmtree("run/eval")
    assert "sheeplike eval run=run" in refusal("publish", "run=run", "to=hf://owner/name")
    assert (online.asked, Path("mine").exists()) == ([], False)


def test_a_directory_gets_what_would_be_uploaded(trained: Path, files: dict[str, bytes]) -> None:
    main(["publish", f"run={trained}", "to=look"])
    found = {path.name: path.read_bytes() for path in Path("look").iterdir()}
    assert found == files | {name: found[name] for name in ("README.md", "render.gif")}
    assert b"eval run=look\n" in found["README.md"]
    main(["publish", f"run={trained}", "to=again"])
    assert Path("again/README.md").read_bytes() == found["README.md"].replace(b"run=look\n", b"run=again\n")


# The card


def test_the_newest_evaluation_makes_the_card_and_its_film(trained: Path) -> None:
    shutil.copytree(trained, "run")
    (old,) = Path("run").glob("eval/*/result.json")
    new = shutil.copytree(old.parent, old.parent.with_name(f"{old.parent.name}_seed_9")) / "result.json"
    record = json.loads(new.read_text())
    record["metrics"]["eval/return_mean"] = 123.5
    new.write_text(json.dumps(record))
    for name in ("front.gif", "scene.gif", "a?b.gif"):
        (new.parent / name).write_bytes(b"GIF89a")
    os.utime(old, (1, 1))
    main(["publish", "run=run", "to=look"])
    text = Path("look/README.md").read_text()
    assert front_of(text)["model-index"][0]["results"][0]["metrics"][0]["value"] == 123.5
    assert "](scene.gif)" in text
    assert sorted(path.suffix for path in Path("look").iterdir()) == [".gif", ".json", ".md", ".safetensors", ".yaml"]


def test_the_command_on_a_card_composes_the_configuration_that_was_trained(trained: Path) -> None:
    saved = [trained, *(exported.DEMOS / name for name in exported.demos())]
    for place in saved:
        config = load_saved(place / "config.yaml").config
        words = shlex.split(card.command_of(config))
        assert words[:3] == ["python", "-m", "sheeplike"]
        assert not changes(to_data(load(words[3:], Sources()).config), config)
    assert card.command_of(config.replace(exp="of_another_machine")) is None


def test_a_card_from_strangers_words_holds_neither_markup_nor_lines_of_theirs(trained: Path) -> None:
    (result,) = trained.glob("eval/*/result.json")
    record = json.loads(result.read_text())
    evil = "x\n---\n# <script>alert(1)</script> | `a` [b](c) \x1b[31m"
    record["run"] |= {"env": evil, "id": evil, "agent": evil}
    record["metrics"][f"eval/reward_terms/{evil}"] = 1.0
    record["command"] = evil
    text = card.render(record, [evil], commit=evil, film=Path("a](b).gif"), license=None)
    front, body = text.removeprefix("---\n").split("\n---\n", 1)
    assert yaml.safe_load(front)["tags"][2] == evil
    outside = "".join(body.split("\n```\n")[::2]).replace("<br>", "")
    assert not re.findall(r"(?<!\\)[<`\[]", outside.replace("![Film", ""))
    assert not [line for line in body.splitlines() if line.startswith(("---", "# <"))]
    assert "\x1b" not in body


@pytest.mark.parametrize("place", [*exported.DEMOS.glob("*/"), *ZOO.glob("*/")], ids=lambda place: place.name)
def test_the_cards_that_come_along_are_of_their_agents(place: Path) -> None:
    run = f"demo:{place.name}" if place.parent == exported.DEMOS else f"howto/zoo/{place.name}"
    text = (place / "README.md").read_text(encoding="utf-8")
    (scores,) = front_of(text)["model-index"][0]["results"]
    values = {metric["type"]: metric["value"] for metric in scores["metrics"]}
    assert values.get("success_rate", 1) >= 0.95
    assert values["mean_reward"] > 0
    assert f"{json.loads((place / 'model.json').read_text())['step']:,} policy steps" in text
    networks = load_agent(place).state_dict().values()
    assert f"{sum(value.numel() for value in networks):,} parameters" in text
    assert f"eval run={run}\n" in text
    assert card.command_of(load_saved(place / "config.yaml").config) in text
