"""A run and everything around the loop: directory, parts, record, end."""

import time

STARTED = time.monotonic()
