"""The program `gradveil`, also as `python -m gradveil`."""

import sys


def main() -> int:
    """The command line. Its imports take a moment, in which Ctrl-C must end the program as it does later."""
    try:
        from gradveil.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("gradveil: stopped.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
