"""`python -m kitbuild.guest`: the same as `kit`."""

import sys

from kitbuild.guest.entry import main

if __name__ == "__main__":
    sys.exit(main())
