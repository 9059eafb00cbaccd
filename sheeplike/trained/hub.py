"""Agents on the Hugging Face Hub, ``hf://owner/name[@revision]``: downloaded as data, and uploaded.

``huggingface_hub`` has the cache, the token and the variables (``HF_ENDPOINT``, ``HF_HOME``, ``HF_HUB_OFFLINE``, …). It
is imported only when an address asks for it.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, partialmethod
from pathlib import Path

from sheeplike.host import install
from sheeplike.options import CommandError, InvalidOption
from sheeplike.terminal import first_sentence, info, is_terminal

HUB = "hf://"
LIMIT = 2**32  # bytes of a file
_NAME = r"(?!.*\.\.)[\w-][\w.-]*"  # a revision becomes a path in the cache
_ADDRESS = re.compile(rf"{HUB}({_NAME}/{_NAME})(?:@({_NAME}(?:/{_NAME})*))?", re.ASCII)


def parse(key: str, address: str) -> tuple[str, str | None]:
    """Return the repository and the revision in ``key=hf://owner/name[@revision]``; refuses if it cannot be reached."""
    if not (found := _ADDRESS.fullmatch(address)):
        raise InvalidOption(key, address, "hf://<owner>/<name>, or with @<branch, tag or commit> behind it")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise CommandError(f"{key}={address} needs huggingface_hub: {install('hub')}")
    return found[1], found[2]


def download(address: str, names: Sequence[str]) -> Path:
    """Return the directory in the hub's cache that has the files ``names`` of an agent; says which commit it is."""
    repo, revision = parse("run", address)
    with _explain("run", address):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import DryRunError, LocalEntryNotFoundError
        from huggingface_hub.utils import tqdm

        class Silent(tqdm):
            __init__ = partialmethod(tqdm.__init__, disable=True)

        fetch = partial(snapshot_download, repo, allow_patterns=list(names))
        commit, whence = revision, ""
        try:
            for file in fetch(revision=revision, dry_run=True, tqdm_class=Silent):
                if (file.file_size or 0) > LIMIT:
                    raise CommandError(f"run={address}: {file.filename} has more than {LIMIT:,} bytes")
                commit = file.commit_hash  # a branch may move before the download
            place = Path(fetch(revision=commit, tqdm_class=tqdm if is_terminal(sys.stderr) else Silent))
        except DryRunError as error:  # the hub gave no list of files: what is cached will do
            try:
                place, whence = Path(fetch(revision=revision, local_files_only=True)), ", from the cache"
            except LocalEntryNotFoundError as missing:
                raise missing from error.__cause__
    if missing := [name for name in names if not (place / name).is_file()]:
        raise CommandError(f"run={address}: {' and '.join(missing)} not there: expected an export of sheeplike")
    pin = "" if revision == place.name else f"; to keep to it: run={HUB}{repo}@{place.name}"
    info(f"{address} is commit {place.name}{whence}{pin}")
    return place


def upload(repo: str, folder: Path, message: str, *, private: bool) -> str:
    """Upload the files of a directory in one commit, into a repository that is created if need be; returns its URL."""
    with _explain("to", HUB + repo):
        from huggingface_hub import CommitOperationAdd, HfApi

        api = HfApi()
        api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.model_info(repo).private:
            raise InvalidOption("private", True, f"false, or another name: {HUB}{repo} exists, and is public", False)
        files = [CommitOperationAdd(path.name, path) for path in sorted(folder.iterdir())]
        return api.create_commit(repo, files, commit_message=message).commit_url


def cached(place: Path) -> str | None:
    """Return a name for a directory in the hub's cache, ``<owner>--<name>/<commit>``; None for any other."""
    *_, repo, snapshots, commit = ("", "", *place.resolve().parts)
    is_cached = snapshots == "snapshots" and repo.startswith("models--")
    return f"{repo.removeprefix('models--')}/{commit[:12]}" if is_cached else None


@contextmanager
def _explain(key: str, address: str) -> Iterator[None]:
    """Turn what the hub, the network and their packages raise into one line."""
    from huggingface_hub import errors

    try:
        yield
    except CommandError:
        raise
    except Exception as raised:
        error = raised.__cause__ if isinstance(raised.__cause__, errors.HfHubHTTPError) else raised
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, errors.RevisionNotFoundError):
            reason = "there is no such branch, tag or commit"
        elif isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
            reason = "it does not exist, or not for you: expected another name, or a token (hf auth login, or HF_TOKEN)"
        elif isinstance(error, errors.LocalEntryNotFoundError):
            cause = first_sentence(error.__cause__ or "HF_HUB_OFFLINE is set")
            reason = f"it is not in the cache, and the hub cannot be reached: {cause}"
        else:
            reason = f"{type(error).__name__}: {first_sentence(error)}; nearest: the same command again"
        raise CommandError(f"{key}={address}: {reason}") from raised
