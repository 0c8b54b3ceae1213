"""``python -m croze`` is the command ``croze``."""

import sys

from croze.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
