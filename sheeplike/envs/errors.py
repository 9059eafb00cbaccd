"""What is wrong with the choice of an environment, told before anything is built."""


class Unusable(ValueError):
    """An environment that cannot be used here, whatever its options: something that it needs is missing."""


class InvalidOption(ValueError):
    """The value of an option that the environment cannot serve.

    Args:
        key: the option, or ``id``.
        value: what was given.
        expected: what would have been valid, in words.
        nearest: the valid value nearest to ``value``, where there is one.
    """

    def __init__(self, key: str, value: object, expected: str, nearest: object = None) -> None:
        super().__init__(key, value, expected, nearest)
        self.key, self.value, self.expected, self.nearest = key, value, expected, nearest

    def __str__(self) -> str:
        hint = "" if self.nearest is None else f"; nearest: {self.nearest}"
        return f"{self.key}={self.value!r}: expected {self.expected}{hint}"
