import pytest

from sheeplike.options import nearest, one_of


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


def test_nearest_but_not_anything():
    assert nearest("xyz", ["dreamer_v3", "ppo"], cutoff=0.6) is None
    assert nearest("dreamer", ["ppo", "dreamer_v3"], cutoff=0.6) == "dreamer_v3"


def test_one_of():
    assert one_of("wrap", ("warp", "none")) == "one of warp, none (nearest: warp)"
