"""The stream of all episodes, cut into pieces that run side by side."""

import numpy as np
import pytest

from sheeplike.data.episodes import Episode, deal


def episodes(*lengths):
    """Each step has a number of its own, the same in all arrays."""
    ends = np.cumsum(lengths)
    numbers = [np.arange(end - steps, end) for end, steps in zip(ends, lengths, strict=True)]
    return [Episode({"x": n[:, None]}, n, n.astype(np.float32), bool(i % 2)) for i, n in enumerate(numbers)]


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 16, 40])
@pytest.mark.parametrize("lengths", [(7,), (2, 2, 2), (5, 9, 3, 11), (2, 30)])
def test_pieces_cover_the_stream(lengths, columns):
    steps = list(deal(episodes(*lengths), columns))
    seen = np.stack([step["obs"]["x"][:, 0] for step in steps], axis=1)  # (columns, time)
    total = sum(lengths)
    assert seen.shape == (columns, -(-total // columns))
    assert set(seen.reshape(-1)) == set(range(total))
    assert seen.size - total < columns  # that many steps are in two pieces
    assert (np.diff(seen, axis=1) == 1).all()
    first, last, terminal, reward = (
        np.stack([step[name] for step in steps], axis=1) for name in ("is_first", "is_last", "is_terminal", "reward")
    )
    ends = np.cumsum(lengths)
    begins = ends - lengths
    assert first[:, 0].all()
    assert (first[:, 1:] == np.isin(seen[:, 1:], begins)).all()
    assert (last == np.isin(seen, ends - 1)).all()
    assert (terminal == np.isin(seen, ends[1::2] - 1)).all()
    assert (reward == np.where(np.isin(seen, begins), 0, seen)).all()
    assert (np.stack([step["action"] for step in steps], axis=1) == seen).all()
    assert (reward.dtype, last.dtype) == (np.float32, bool)
