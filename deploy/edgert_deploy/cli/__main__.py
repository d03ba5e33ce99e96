"""`python -m edgert_deploy.cli`: the same as `edgert`, for use if the script is not on the path."""

import sys

from edgert_deploy.cli import main

sys.exit(main())
