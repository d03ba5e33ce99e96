"""Print the commands that a microphone hears, as soon as they are spoken.

arecord --quiet --format S16_LE --rate 8000 --file-type raw | python examples/keyword/app.py
"""

import sys

import numpy as np

from edgert import Client

CHUNK_BYTES = 1600  # a tenth of a second

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
