import pytest


@pytest.fixture(autouse=True)
def _alone(alone: None) -> None: ...
