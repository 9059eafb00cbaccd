"""The machine: checks for `doctor`, measurements for `bench`."""
