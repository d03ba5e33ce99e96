"""MLServer's model: the Open Inference Protocol over REST, JSON both ways because it has no binary tensors.

`mlserver start FOLDER` loads it in the server's own process (`parallel_workers` 0, the fastest for small models).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from mlserver import MLModel
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput

from bench.support.peer_servers.session import open_first


class Digits(MLModel):  # type: ignore[misc]  # MLServer is not followed
    async def load(self) -> bool:
        self._session = open_first(Path(self.settings.parameters.uri))
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        given = payload.inputs[0]
        array = np.array(given.data.root, np.float32).reshape(given.shape)
        answer = self._session.run([array])[0]
        output = ResponseOutput(name="scores", shape=list(answer.shape), datatype="FP32", data=answer.ravel().tolist())
        return InferenceResponse(model_name=self.name, outputs=[output])
