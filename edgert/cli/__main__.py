"""`python -m edgert.cli`: the same as `edgertd`, for use if the script is not on the path."""

import sys

from edgert.cli import main

sys.exit(main())
