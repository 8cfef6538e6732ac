"""The command ``mantissa``: ``python -m mantissa`` and the script of the wheel."""

import sys

if not __package__:
    # Started as a file, by the program itself, without the paths of an environment.
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mantissa import _core


def main() -> int:
    """Run the command line of this process."""
    return _core.main(["mantissa", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
