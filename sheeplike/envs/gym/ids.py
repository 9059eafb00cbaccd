"""Which environments a family has, read from the files of its package: nothing of it is imported.

Where a package looks otherwise than expected nothing is known here, and whoever builds the environment finds out.
"""

import functools
import importlib.util
import re
from pathlib import Path

from sheeplike.envs.errors import InvalidOption, Unusable
from sheeplike.names import nearest

PACKAGES = {"minigrid": "minigrid", "atari": "ale_py", "dmc": "dm_control"}
"""The package that each family needs."""
SEVERAL_PLAYERS = frozenset({"combat", "joust", "maze_craze", "warlords"})
"""Atari games without a mode for one player, which ale_py does not register."""
ALIASES = {"cup": "ball-in-cup"}
"""Domains of the control suite by the names that DreamerV3 has for them."""


def require(family: str) -> Path:
    """The directory of the package that a family needs.

    Raises:
        Unusable: it is not installed.
    """
    try:
        spec = importlib.util.find_spec(PACKAGES[family])
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise Unusable(f"env={family} needs {PACKAGES[family]}: pip install 'sheeplike[{family}]'")
    return Path(spec.submodule_search_locations[0])


@functools.cache
def minigrid(package: Path) -> tuple[str, ...]:
    """Ids that MiniGrid registers one by one; those of WFC are made from a table."""
    try:
        text = (package / "__init__.py").read_text(encoding="utf-8")
    except OSError:
        return ()
    return tuple(dict.fromkeys(re.findall(r"""register\(\s*(?:id=)?["']((?:MiniGrid|BabyAI)-[\w-]+)["']""", text)))


@functools.cache
def atari(package: Path) -> tuple[str, ...]:
    """``ALE/<Game>-v5`` of every game that comes with ale_py."""
    games = sorted(path.stem for path in (package / "roms").glob("*.bin") if path.stem not in SEVERAL_PLAYERS)
    return tuple(f"ALE/{game.title().replace('_', '')}-v5" for game in games)


@functools.cache
def dmc(package: Path) -> tuple[str, ...]:
    """``<domain>-<task>`` of the control suite."""
    found: list[str] = []
    for file in sorted((package / "suite").glob("*.py")):
        try:
            text = file.read_text(encoding="utf-8")
        except OSError:
            continue
        tasks = re.findall(r"^@SUITE\.add\([^)]*\)\s*^def (\w+)\(", text, re.MULTILINE)
        found += [f"{file.stem}-{task}" for task in tasks]
    return tuple(found)


def resolve(family: str, id: str) -> str:
    """The id as the family has it, however it was spelt: ``pong``, ``walker_walk``, ``cup_catch``.

    Raises:
        Unusable: the family's package is not installed.
        InvalidOption: there is no such environment.
    """
    package = require(family)
    known = {"minigrid": minigrid, "atari": atari, "dmc": dmc}[family](package)
    by_key = {_key(name): name for name in known}
    if id in known or not known:
        return id
    if family == "minigrid" and id.startswith("MiniGrid-WFC-"):
        return id
    wanted = id
    if family == "dmc":
        domain, _, task = id.replace("_", "-").partition("-")
        wanted = f"{ALIASES.get(domain, domain)}-{task}"
    if family != "minigrid" and _key(wanted) in by_key:
        return by_key[_key(wanted)]
    what = {
        "minigrid": "one of MiniGrid's environments",
        "atari": "one of ale_py's games",
        "dmc": "a task of the suite",
    }
    raise InvalidOption("id", id, what[family], nearest(wanted, known))


def _key(id: str) -> str:
    """What two spellings of one name have in common."""
    return re.sub(r"^ale/|-v\d+$|[-_]", "", id.lower())
