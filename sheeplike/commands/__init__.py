"""The command line. Nothing outside this package sees a config object."""

import time

STARTED = time.monotonic()  # this package is imported first, before anything that takes long
