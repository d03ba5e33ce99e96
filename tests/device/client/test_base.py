"""The settings that the blocking and the asyncio client share."""

from __future__ import annotations

import asyncio
import math
import pickle
from typing import Any

import numpy as np
import pytest

from edgert import AsyncClient, Client
from edgert.client.base import check_timeout, request_flags
from edgert.errors import RequestError
from edgert.protocol import wire


@pytest.mark.parametrize("timeout_s", [-1, -math.inf, math.nan, None, "5", [1.0]])
def test_a_time_out_that_is_not_a_number_of_seconds_is_refused(timeout_s: Any) -> None:
    with pytest.raises(RequestError, match="give seconds, 0 or more"):
        check_timeout(timeout_s)
    with pytest.raises(RequestError, match="give seconds, 0 or more"):
        Client("/nowhere", timeout_s=timeout_s)


def test_a_request_has_its_own_time_out_or_the_time_out_of_the_client() -> None:
    client = Client("/nowhere", timeout_s=5.0)
    assert [client.timeout_of(each) for each in (None, 0, 2.5, math.inf)] == [5.0, 0, 2.5, math.inf]


def test_the_flags_follow_the_options_and_an_unknown_priority_is_refused() -> None:
    assert request_flags(True, "normal") == 0
    assert request_flags(False, "high") == wire.FLAG_NO_CACHE | wire.FLAG_HIGH_PRIORITY
    with pytest.raises(RequestError, match="'urgent' is not known; give normal or high"):
        request_flags(True, "urgent")


@pytest.mark.parametrize("model", [b"digits", ["digits"], None, 7])
def test_a_model_whose_name_is_no_string_is_refused_before_a_connection(model: Any) -> None:
    client, item = Client("/nowhere"), np.zeros((1, 4), np.float32)

    async def open_session() -> None:
        async with AsyncClient("/nowhere").session(model):
            pass

    for call in (
        lambda: client.infer(model, item),
        lambda: client.session(model),
        lambda: client.metadata(model),
        lambda: asyncio.run(AsyncClient("/nowhere").infer(model, item)),
        lambda: asyncio.run(AsyncClient("/nowhere").metadata(model)),
        lambda: asyncio.run(open_session()),
    ):
        with pytest.raises(RequestError, match=r"the name of the model is .*; give a str \(models"):
            call()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_pickled_copy_has_only_the_settings(kind: type[Client] | type[AsyncClient]) -> None:
    with pytest.raises(RequestError, match="give one of auto, socket"):
        kind("/nowhere", transport="tcp")
    copy = pickle.loads(pickle.dumps(kind("/nowhere", timeout_s=2.5, transport="socket")))
    assert type(copy) is kind
    assert (str(copy.path), copy.timeout_s, copy.transport) == ("/nowhere", 2.5, "socket")
