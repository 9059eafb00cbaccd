"""Runs that came from elsewhere are data: nothing is followed out of them, waited for, or taken for more than it is."""

import os
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

RUN = Path("dreamer_v3/dreamer_v3/seed_0")


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_no_file_is_not_read(refused, trained, name, kind):
    file = trained({0: [1]}) / RUN / name
    file.rename("elsewhere")
    if kind == "link":
        file.symlink_to(Path("elsewhere").absolute())
    else:
        os.mkfifo(file)
    line = refused("compare", "logs")
    assert f"{file}: cannot be read: is " in line
    assert ("a link" if kind == "link" else "no regular file") in line


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_configuration_alone_that_is_no_file_makes_no_run(compared, trained, kind):
    file = trained({0: [1]}) / "other/config.yaml"
    file.parent.mkdir()
    if kind == "link":
        file.symlink_to((file.parents[1] / RUN / "config.yaml").absolute())
    else:
        os.mkfifo(file)
    assert compared("logs").rows["dreamer_v3"]["seeds"] == "1"


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_events_that_are_no_file_are_not_read(refused, kind):
    with SummaryWriter("runs/sac") as writer:
        writer.add_scalar("eval/return_mean", 1.0, 1000)
    (file,) = Path("runs/sac").iterdir()
    odd = file.with_name("events.out.tfevents.9")
    if kind == "link":
        odd.symlink_to(file.absolute())
    else:
        os.mkfifo(odd)
    assert f"{odd}: cannot be read: is no regular file" in refused("compare", "runs")


def test_a_configuration_that_is_too_large_is_refused(refused, trained):
    file = trained({0: [1]}) / RUN / "config.yaml"
    with file.open("a") as text:
        text.write("# " + "x" * 2**20)
    assert "has more than 1,048,576 bytes" in refused("compare", "logs")


def test_a_configuration_that_multiplies_is_none_of_ours(refused, trained):
    file = trained({0: [1]}) / RUN / "config.yaml"
    with file.open("a") as text:
        text.write("a0: &a0 {x: 1}\n")
        for level in range(1, 40):
            text.write(f"a{level}: &a{level} {{x: *a{level - 1}, y: *a{level - 1}}}\n")
    assert "expected config.yaml of a run beside metrics.jsonl" in refused("compare", "logs")


@pytest.mark.parametrize(
    "row", ["{", "null", '{"step": null, "seconds": 1}', f'{{"step": 1{"0" * 400}, "seconds": 1}}', "[" * 10**5]
)
def test_a_row_that_is_damaged_is_named(refused, trained, row):
    file = trained({0: [1, 2]}) / RUN / "metrics.jsonl"
    file.write_text(row + "\n" + file.read_text())
    assert f"{file}, line 1: expected a JSON object" in refused("compare", "logs")


def test_a_number_that_no_curve_can_show_is_left_out(compared, trained):
    file = trained({0: [1, 2]}) / RUN / "metrics.jsonl"
    with file.open("a") as rows:
        rows.write(f'{{"step": 3000, "seconds": 30, "eval/return_mean": 1{"0" * 400}}}\n')
    result = compared("logs")
    assert result.rows["dreamer_v3"]["best"] == "2"
    assert "not finite, left out: 1" in result.output
