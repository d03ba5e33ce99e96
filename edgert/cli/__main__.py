"""`python -m edgert.cli`: as `edgertd`, for where the script is not on the path."""

import sys

from edgert.cli import main

sys.exit(main())
