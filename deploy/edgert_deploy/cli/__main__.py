"""`python -m edgert_deploy.cli`: the same as `edgert`, if the script `edgert` is not on the PATH."""

import sys

from edgert_deploy.cli import main

sys.exit(main())
