"""`python -m gradveil` is the command line."""

import sys

from gradveil.cli import main

if __name__ == "__main__":
    sys.exit(main())
