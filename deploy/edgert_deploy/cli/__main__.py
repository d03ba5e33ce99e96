"""`python -m edgert_deploy.cli`: the command `edgert`, where its script is not on the path."""

import sys

from edgert_deploy.cli import main

sys.exit(main())
