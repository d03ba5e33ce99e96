"""Run `edgert` as `python -m edgert_deploy.cli` if the script `edgert` is not on the PATH."""

import sys

from edgert_deploy.cli import main

sys.exit(main())
