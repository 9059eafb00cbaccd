"""A file is whole or absent, even where its writing is ended."""

from __future__ import annotations

import errno
import os

import pytest

from sheeplike.files import check_writable, parse_yaml, write_atomically


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch, failing):
    path = tmp_path / "config.yaml"
    write_atomically(path, "seed: é\n")
    assert path.read_text(encoding="utf-8") == "seed: é\n"

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, full)
        with pytest.raises(OSError, match="No space left"):
            write_atomically(path, b"half")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [(path.name, "seed: é\n".encode())]
    write_atomically(path, b"\x00")
    assert path.read_bytes() == b"\x00"


@pytest.mark.parametrize(("directory", "name"), [(".", "x" * 256), (".", "x" * 254), ("new/" + "x" * 256, "x")])
def test_a_name_that_is_too_long_is_told_before_anything_is_made(tmp_path, directory, name):
    with pytest.raises(OSError, match="x" * 250) as error:
        check_writable(tmp_path / directory, name)
    assert error.value.errno == errno.ENAMETOOLONG
    check_writable(tmp_path / "new", "x" * 240)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", ["1" + "0" * 400, "0x" + "f" * 5000, "1" + ":00" * 20, str(2**64)])
def test_integers_have_64_bits(number):
    assert parse_yaml(f"x: {2**64 - 1}\ny: [-0xff, 1:30]") == {"x": 2**64 - 1, "y": [-255, 90]}
    with pytest.raises(ValueError, match=r"line 2 .* 64"):
        parse_yaml(f"x: 1\ny: {number}")
