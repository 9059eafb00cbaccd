from typing import Annotated, Literal

import pytest
from pydantic import Field

from sheeplike.options import (
    HEADLINE,
    LINE,
    RESUMABLE,
    Options,
    explain_keys,
    is_within,
    keys_of,
    marked,
    nearest,
    one_of,
)


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("gravty", ["opt.gravity", "opt.wind", "gravity"], "gravity"),
        ("CHEETAHRUN", ["CartpoleBalance", "CheetahRun"], "CheetahRun"),
        ("fist", ["second", "first"], "first"),
        ("Box", ["BOX", "box"], "BOX"),
        (3, ["30", "4"], "30"),
        ("a", [], None),
        ("lr", ["learning_starts", "actor_lr", "learning_rate"], "learning_rate"),
        ("e", ["env", "exp_e"], "env"),
    ],
)
def test_nearest(name, known, expected):
    assert nearest(name, known) == expected
    assert nearest(name, iter(known)) == expected


def test_long_meanings_are_wrapped_below_their_column():
    class Wide(Options):
        size: int = Field(1, description="many words " * 30)
        other: int = Field(2, description="few words")

    first, *rest, last = explain_keys(keys_of(Wide)).splitlines()[1:]
    assert max(map(len, [first, *rest, last])) <= LINE
    column = first.index("many")
    assert len(rest) > 1
    assert all(line[:column].isspace() and line[column] != " " for line in rest)
    assert last.index("few") == column


def test_nearest_but_not_anything():
    assert nearest("xyz", ["dreamer_v3", "ppo"], cutoff=0.6) is None
    assert nearest("dreamer", ["ppo", "dreamer_v3"], cutoff=0.6) == "dreamer_v3"


def test_one_of():
    assert one_of("wrap", ("warp", "none")) == "one of warp, none (nearest: warp)"


class Section(Options):
    wide: int = Field(1, description="width")


class Marked(Options):
    """Marks beside every kind of type."""

    plain: int = Field(1, description="none")
    number: Annotated[int | None, RESUMABLE, HEADLINE] = Field(None, ge=1, description="two")
    needed: Annotated[str, HEADLINE] = Field(description="one without a default")
    section: Annotated[Section, RESUMABLE] = Field(Section(), description="of a section")
    size: Annotated[Literal["1m"] | Section, HEADLINE] = Field("1m", description="of a union")


def test_marks_of_keys():
    assert marked(keys_of(Marked, "agent."), "headline") == {"agent.number", "agent.needed", "agent.size"}
    resumable = marked(keys_of(Marked), "resumable")
    assert resumable == {"number", "section"}
    assert is_within("section.wide", resumable)
    assert is_within("number", resumable)
    assert not is_within("size.wide", resumable)
    assert not is_within("number_of", resumable)


def test_a_marked_option_is_checked_as_before():
    assert Marked(needed="a", number=3).number == 3
    with pytest.raises(ValueError, match="number"):
        Marked(needed="a", number=0)
