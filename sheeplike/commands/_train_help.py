"""``train --help``: every key with its default and meaning."""

from __future__ import annotations

from collections.abc import Sequence

from sheeplike import envs
from sheeplike.agents import registry
from sheeplike.commands import Request
from sheeplike.config.errors import as_command_errors
from sheeplike.config.schema import Start, all_keys, to_data
from sheeplike.config.sources import Sources
from sheeplike.envs.mjx.options import SimulationOptions
from sheeplike.envs.registry import options_of
from sheeplike.options import explain_keys, keys_of
from sheeplike.terminal import echo

OFTEN = ("resume", "seeds", "total_steps", "run_dir")  # beside the headlines of a run


def main(request: Request) -> None:
    """Print the help; Hydra, torch and JAX are not imported unless the values of a run are asked for."""
    echo(usage(request.arguments, Sources(request.config_dirs)))


def usage(arguments: Sequence[str], sources: Sources) -> str:
    """Return the text of ``python -m sheeplike train --help``.

    With ``agent=<name>`` it lists the keys of that agent alone, with ``env=<name>`` also the options of that task, and
    with ``exp=`` too the values that the run would have.
    """
    asked = dict(argument.partition("=")[::2] for argument in arguments)
    if "agent" in asked:
        with as_command_errors(ValueError):
            registry.find(asked["agent"])
    agents, task, values = {*registry.list_agents()} & {asked.get("agent"), asked.get("exp")}, asked.get("env"), {}
    if {"exp", "env"} <= asked.keys():
        from sheeplike.config.compose import load, start_of  # Hydra takes half a second to import

        config = load(start_of(arguments)[1], sources).config
        agents, task, values = {config.agent.name}, config.env.name, to_data(config)
    with as_command_errors(ValueError):
        named = [registry.find(name).config for name in agents] or registry.built_in()
        known = task in envs.list_envs()
        own = [key for key in keys_of(options_of(task)) if key.path != "id"] if known else []
        # An environment that renders itself takes none of the simulation's keys.
        left_out = {f"env.{name}" for name in SimulationOptions.model_fields if known and not envs.simulated(task)}
    parts = ["python -m sheeplike [train] exp=<recipe> env=<task> [key=value ...]", "", sources.describe(), ""]
    if not values:
        parts.append(
            "Defaults are those of the code. Files in configs/ change some: name exp= and env= here to see the\n"
            "values of a run beside them; show=config prints the file that each comes from. Environments of Gymnasium\n"
            f"take no {', '.join(f'env.{name}' for name in SimulationOptions.model_fields)}."
        )
    of_a_run = [*keys_of(Start), *(key for key in all_keys() if key.path not in {"agent", *left_out})]
    often = [key for key in of_a_run if key.path in OFTEN or "headline" in key.schema]
    rest = [key for key in of_a_run if key not in often]
    parts += ["keys that many runs change", explain_keys(often, values), "", "all others", explain_keys(rest, values)]
    if own:
        options = [key._replace(path=f"env.options.{key.path}") for key in own]
        parts += ["", f"keys with env.name={task}", explain_keys(options, values)]
    for options in named:
        name = options.model_fields["name"].default
        own = sorted(keys_of(options, "agent."), key=lambda key: "headline" not in key.schema)
        parts += ["", f"keys with agent.name={name}, the main ones first", explain_keys(own, values)]
    return "\n".join(parts)
