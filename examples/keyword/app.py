"""Print the commands that a microphone hears, as soon as they are spoken.

arecord --quiet --format S16_LE --rate 8000 --file-type raw | python examples/keyword/app.py
"""

import os
import sys

import numpy as np

from edgert import Client
from edgert.errors import EdgeRTError

CHUNK_BYTES = 1600  # a tenth of a second


def main() -> None:
    client = Client()
    names = client.labels("keyword")
    last = -1
    with client.session("keyword") as stream:
        while chunk := sys.stdin.buffer.read(CHUNK_BYTES):
            answer = stream.infer(np.frombuffer(chunk, np.int16))
            for number in answer["scores_classes"].ravel():
                if number not in (last, -1):
                    print(names[number], flush=True)
                last = number


try:
    main()
except EdgeRTError as error:
    sys.exit(str(error))
except BrokenPipeError:  # the reader of the output has ended, as with `| head`
    os._exit(1)
