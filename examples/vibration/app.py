"""Print the state of a machine for each CSV file of its vibration.

python examples/vibration/app.py recordings/*.csv
"""

import os
import sys
from pathlib import Path

from edgert import Client
from edgert.errors import EdgeRTError
from edgert.processing.signals.csv_table import read_csv


def main() -> None:
    client = Client()
    names = client.labels("vibration")
    for path in map(Path, sys.argv[1:]):
        try:
            answer = client.infer("vibration", read_csv(path))  # FP32 [1024, 3]
        except (OSError, EdgeRTError) as error:
            sys.exit(f"{path}: {error}")
        number, probability = answer["scores_classes"][0], answer["scores_probabilities"][0]
        print(f"{path}: {names[number]} ({probability:.0%})", flush=True)


try:
    main()
except EdgeRTError as error:
    sys.exit(str(error))
except BrokenPipeError:  # the reader of the output has ended, as with `| head`
    os._exit(1)
