"""A run and what surrounds the loop: its directory, its parts, its record, its end."""

import time

STARTED = time.monotonic()  # the package is imported before anything that takes long
