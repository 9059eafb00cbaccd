"""The environment names places and nothing else, and the package has no way to run what it reads."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import sheeplike
from sheeplike.__main__ import main
from sheeplike.config.sources import Sources

PACKAGE = Path(sheeplike.__file__).parent


pytestmark = pytest.mark.usefixtures("workplace")


# The environment


@pytest.mark.parametrize(
    "name",
    [
        "a'b",
        'a"b',
        "a]b",
        "a,hydra.run.dir=x",
        "a'],hydra.searchpath=['pkg:",
        "a\\b",
        "a\\'b",
        "a b",
        "${oc.env:SECRET}",
    ],
)
def test_a_search_path_is_a_place_whatever_its_name(workplace, monkeypatch, capsys, name):
    directory = workplace / name
    (directory / "exp").mkdir(parents=True)
    (directory / "exp/mine.yaml").write_text("# @package _global_\ndefaults: [override /agent: ppo]\nseed: 5\n")
    monkeypatch.setenv("SHEEPLIKE_SEARCH_PATH", str(directory))
    try:
        main(["exp=mine", "env=cartpole_balance", "profile=cpu", "show=config"])
    except SystemExit:
        output = capsys.readouterr()
        assert output.err.count("\n") == 1
        assert "SHEEPLIKE_SEARCH_PATH" in output.err
        assert "$" in name
    else:
        output = capsys.readouterr()
        assert "seed: 5  # exp/mine.yaml" in output.out.splitlines()
    assert "do-not-tell" not in output.out + output.err


@pytest.mark.parametrize(
    "entry", ["pkg://", "pkg://..", "pkg://os", "pkg://os.path", "pkg://a'b", "hydra.searchpath=[x]"]
)
def test_a_search_path_that_leads_nowhere(monkeypatch, refusal, entry):
    monkeypatch.setenv("SHEEPLIKE_SEARCH_PATH", entry)
    assert "SHEEPLIKE_SEARCH_PATH" in refusal("exp=dreamer_v3 env=cartpole_balance show=config")


def test_looking_for_configs_in_a_package_imports_nothing(workplace, monkeypatch):
    (workplace / "outer/inner/exp").mkdir(parents=True)
    for folder in ("outer", "outer/inner"):
        (workplace / folder / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(workplace)
    monkeypatch.setenv("SHEEPLIKE_SEARCH_PATH", "pkg://outer.inner")
    assert Sources().directories[1] == workplace / "outer/inner"


@pytest.mark.parametrize(
    "override", ["hydra.searchpath=[x]", "+hydra.run.dir=x", "++_target_=os.system", "defaults=[]"]
)
def test_only_keys_of_a_configuration_can_be_set(refusal, override):
    assert "key" in refusal(f"exp=dreamer_v3 env=cartpole_balance {override}")


def test_a_file_of_variables_in_the_working_directory_is_not_read(workplace):
    (workplace / ".env").write_text(f"SHEEPLIKE_SEARCH_PATH=/nowhere\nSHEEPLIKE_CACHE_DIR={workplace}/cache\nX_Y_Z=1\n")
    code = (
        "import os; before = dict(os.environ); from sheeplike.__main__ import main\n"
        "main(['exp=ppo', 'env=cartpole_balance', 'show=config']); from sheeplike.run import experiment\n"
        "assert 'X_Y_Z' not in os.environ and 'SHEEPLIKE_SEARCH_PATH' not in os.environ\n"
        f"assert not any({str(workplace)!r} in os.environ.get(name, '') for name in ('WARP_CACHE_PATH',))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# The package itself

FORBIDDEN = {
    "weights_only=False": r"weights_only\s*=\s*False",
    "a load without weights_only": r"torch\.load\((?![^\n]*weights_only=True)",
    "pickle": r"\bpickle\.(?:loads?|Unpickler)\b|\b(?:cPickle|dill|cloudpickle|joblib|shelve|marshal)\b",
    "pickled arrays": r"allow_pickle\s*=\s*True",
    "YAML that makes objects": r"yaml\.(?:load|load_all|unsafe_load|full_load|Loader|UnsafeLoader|FullLoader)\b",
    "eval": r"(?<![\w.])eval\(",
    "exec": r"(?<![\w.])exec\(",
    "instantiate": r"hydra\.utils|\binstantiate\(|get_class\(",
    "targets": r"_target_",
    "a shell": r"shell\s*=\s*True|os\.system\(|os\.popen\(",
    "files of variables": r"dotenv",
    "wider loads": r"add_safe_globals|safe_globals\(",
}


@pytest.mark.parametrize("pattern", FORBIDDEN.values(), ids=FORBIDDEN)
def test_the_package_has_no(pattern):
    for source in PACKAGE.rglob("*.py"):
        assert not re.search(pattern, source.read_text(encoding="utf-8")), source
    for config in (PACKAGE.parent / "configs").rglob("*.yaml"):
        assert "_target_" not in config.read_text(encoding="utf-8"), config


def test_all_text_is_shown_in_one_place():
    for source in PACKAGE.rglob("*.py"):
        if source.name not in ("terminal.py", "player.py"):  # the latter is copied to machines without the package
            code = re.sub(r'""".*?"""', "", source.read_text(encoding="utf-8"), flags=re.DOTALL)
            assert not re.search(r"(?<![\w.])print\(|std(?:out|err)\.write\(", code), source


def test_all_files_are_written_in_one_way():
    """A link in the place of a file would be followed; a checkpoint's parts go into a directory that is new."""
    for source in PACKAGE.rglob("*.py"):
        if source.name not in ("files.py", "checkpoint.py"):
            text = re.sub(r"open_regular\([^)\n]*\)", "", source.read_text(encoding="utf-8"))
            assert not re.search(r"open\([^)\n]*[\"'][wax]b?\+?[\"']|\.write_(?:text|bytes)\(", text), source


def test_every_promise_names_its_test():
    promises = (PACKAGE.parent / "SECURITY.md").read_text(encoding="utf-8")
    tests = "".join(file.read_text(encoding="utf-8") for file in (PACKAGE.parent / "tests").rglob("test_*.py"))
    rows = [line for line in promises.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 5
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row.rpartition("|")[0].rpartition("|")[2])
        assert named, row
        for name in named:
            assert f"def {name}(" in tests, name
