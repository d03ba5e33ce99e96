"""A user without an account and without a home, such as a user of `docker run --user 54321`."""

from __future__ import annotations

import os
import subprocess
import sys

UID = 54_321
_PROGRAM = """
import os
{imported}
os.setuid({uid})
try:
    print({function}())
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""


def as_nobody(imported: str, function: str) -> str:
    """Return the result or the error of `function` for that user, after the statement `imported`. Needs root."""
    own = ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME", "EDGERT_CONFIG_DIR", "EDGERT_STATE", "EDGERT_SOCKET")
    environment = {name: value for name, value in os.environ.items() if name not in own and name[:4] != "XDG_"}
    program = _PROGRAM.format(imported=imported, function=function, uid=UID)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()
