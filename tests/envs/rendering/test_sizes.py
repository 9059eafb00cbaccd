import pytest

from sheeplike.envs.contract import resolve_image_size
from sheeplike.envs.mjx.rendering.sizes import resolve_image_sizes

CAMERAS = ("front", "wrist")


def test_one_size_is_that_of_all_cameras():
    assert resolve_image_sizes(64, CAMERAS) == {"front": (64, 64), "wrist": (64, 64)}
    assert resolve_image_sizes([48, 64], CAMERAS) == {"front": (48, 64), "wrist": (48, 64)}


def test_sizes_by_name_come_in_the_order_of_the_cameras():
    sizes = resolve_image_sizes({"wrist": (48, 64), "front": 32}, CAMERAS)
    assert list(sizes.items()) == [("front", (32, 32)), ("wrist", (48, 64))]


@pytest.mark.parametrize(
    ("image_size", "message"),
    [
        ({"front": 64}, r"no size for camera wrist: expected one for each that is rendered, and has front; or fewer"),
        ({}, r"no size for camera front, wrist: .* and has none"),
        ({"front": 64, "wrst": 32}, r"camera 'wrst', which is not rendered: expected front, wrist; nearest: wrist"),
        ({"front": 64, "wrist": 0}, r"image_size=0: expected a positive int or \(height, width\)"),
        ({"front": 64, "wrist": {"x": 1}}, r"image_size=\{'x': 1\}: expected a positive int"),
    ],
)
def test_sizes_that_do_not_fit_the_cameras_are_refused(image_size, message):
    with pytest.raises(ValueError, match=message) as error:
        resolve_image_sizes(image_size, CAMERAS)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", [True, 64.0, "64", None, (64,), (64, 64.0), (64, -1)])
def test_what_is_no_size(size):
    with pytest.raises(ValueError, match=r"expected a positive int or \(height, width\), such as \(48, 64\)"):
        resolve_image_size(size)
