"""Captures of graphs are counted where Warp makes them; the loop's own are counted beside the agent that needs few."""

import pytest
import warp

from sheeplike.envs.mjx.graphs import count_captures


def test_every_capture_is_counted_and_no_replay() -> None:
    values = warp.zeros(4, dtype=float, device="cpu")
    with count_captures() as captures:
        for count in (1, 2):
            with warp.ScopedCapture(device="cpu") as capture:
                values.fill_(float(count))
            assert captures.count == count
        for _ in range(3):
            values.zero_()
            warp.capture_launch(capture.graph)
            assert (values.numpy() == 2).all(), "a capture that is counted is a capture all the same"
    assert captures.count == 2


def test_nothing_is_counted_afterwards_nor_changed() -> None:
    begin = warp.capture_begin
    with pytest.raises(RuntimeError, match="left early"), count_captures() as captures:
        raise RuntimeError("left early")
    assert warp.capture_begin is begin
    with warp.ScopedCapture(device="cpu"):
        pass
    assert captures.count == 0
