"""``python -m sheeplike [command] overrides…``, also installed as the console script ``sheeplike``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; ``arguments`` default to those of the process.

    Raises:
        SystemExit: status 2 and one line on stderr when the request cannot be met, or another that the error names.
            ``SHEEPLIKE_DEBUG=1`` lets the exception through instead, with its traceback. Status 130 after Ctrl-C.
    """
    from sheeplike.commands.cli import dispatch
    from sheeplike.commands.errors import CommandError

    try:
        dispatch(list(sys.argv[1:] if arguments is None else arguments))
    except CommandError as error:
        if os.environ.get("SHEEPLIKE_DEBUG") == "1":
            raise
        print(f"sheeplike: {error}", file=sys.stderr)
        raise SystemExit(error.status) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
