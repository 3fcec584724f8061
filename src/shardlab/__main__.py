"""`python -m shardlab` is the command `shardlab`."""

import sys

from shardlab.cli import main

if __name__ == "__main__":
    sys.exit(main())
