"""`python -m edgert_deploy.cli`: as `edgert`, for where the script is not on the path."""

import sys

from edgert_deploy.cli import main

sys.exit(main())
