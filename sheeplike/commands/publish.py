"""Publish an agent on the Hugging Face Hub, with its card.

``python -m sheeplike publish run=<run_dir> to=hf://<owner>/<name> [key=value …]`` uploads the files of an export, and
the card and a film of that checkpoint's newest evaluation; with ``to=<directory>`` it writes them there.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from pydantic import Field

from sheeplike.commands import Request
from sheeplike.commands.export import refuse_taken, save_weights
from sheeplike.config.compose import load_options
from sheeplike.config.errors import as_command_errors, expand, require_writable
from sheeplike.files import open_regular, read_text, write_atomically
from sheeplike.options import CommandError, InvalidOption, Options, explain_keys, keys_of
from sheeplike.run.layout import EVALUATIONS
from sheeplike.terminal import echo, info
from sheeplike.trained import card, exported, hub
from sheeplike.trained.hub import HUB
from sheeplike.trained.playing import AgentOptions, open_trained, results_of

LIMIT = 2**28  # bytes of result.json


class PublishOptions(Options):
    """Keys of this command."""

    run: str | None = AgentOptions.model_fields["run"]
    checkpoint: str = AgentOptions.model_fields["checkpoint"]
    to: str | None = Field(
        None, description="hf://<owner>/<name>; or a new or empty directory, to look at what would be uploaded"
    )
    private: bool = Field(False, description="true: in a new repository that others cannot see")
    license: str | None = Field(None, description="the agent's licence, such as apache-2.0; null: none on the card")


def main(request: Request) -> None:
    """Export, write the card, and upload both in one commit."""
    if request.help:
        echo("python -m sheeplike publish run=<run_dir> to=hf://<owner>/<name> [key=value ...]", "")
        echo(explain_keys(keys_of(PublishOptions)), "")
        echo("The card tells the newest evaluation of that checkpoint: run eval first. The token comes from")
        echo("hf auth login, or from HF_TOKEN.")
        return
    asked = load_options(PublishOptions, request.about_run())
    repo, place = None, None
    if asked.to is None:
        raise CommandError("to= is missing: expected hf://<owner>/<name>, or a directory to look at the files first")
    if asked.to.startswith("hf:"):
        repo, revision = hub.parse("to", asked.to)
        if revision:
            raise InvalidOption("to", asked.to, "no revision: the commit goes to the main branch", HUB + repo)
    elif asked.private:
        raise InvalidOption("private", True, "false: nothing is uploaded to a directory", False)
    else:
        place = expand(asked.to)
        refuse_taken(place)
        require_writable("to", place)
    agent = AgentOptions(run=asked.run, checkpoint=asked.checkpoint, accelerator="cpu")
    run_dir, config, _ = open_trained(agent, "publish", None)
    info("loading torch")
    meta, weights = exported.read(run_dir, asked.checkpoint)
    evaluations = results_of(run_dir, EVALUATIONS).glob(f"step_{meta['step']:012d}_*/result.json")
    if not (result := max(evaluations, key=lambda file: file.stat().st_mtime, default=None)):
        evaluate = card.command("eval", f"run={asked.run}", f"checkpoint={asked.checkpoint}")
        raise CommandError(f"run={asked.run} has no evaluation at policy step {meta['step']:,}; make one: {evaluate}")
    film = card.choose_film(result.parent)
    with as_command_errors(OSError):
        try:
            record = json.loads(read_text(result, LIMIT))
            text = card.render(
                record, [f"run={asked.to}"], commit=card.commit_of(run_dir), film=film, license=asked.license
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            raise CommandError(f"{result}: tells too little for a card: expected a new evaluation") from None
        with tempfile.TemporaryDirectory() as temporary:
            folder = place or Path(temporary, "agent")
            save_weights(folder, run_dir, config, meta, weights)
            write_atomically(folder / "README.md", text)
            if film:
                with open_regular(film) as file:
                    write_atomically(folder / film.name, file.read())
            saved = hub.upload(repo, folder, f"Policy step {meta['step']:,}", private=asked.private) if repo else folder
    echo(f"saved: {saved}", *([f"play it: {card.command('eval', f'run={asked.to}')}"] if repo else []))
