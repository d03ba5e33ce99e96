"""HTTP requests with limits on every wait, answer and redirect; failures become EdgeRT errors.

The registry and the network are not trusted. If a server sends single bytes now and then, a socket's time-out never
ends the wait. So a timer shuts the socket if the head of an answer, or a whole small answer, is late. For a large blob,
client.py adds up the waiting time.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
import urllib.request
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from http.client import RemoteDisconnected
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import HTTPError, LocationParseError, ProtocolError, ProxyError, SSLError, SystemTimeWarning

from edgert import __version__
from edgert.bundle.expiry import time_text
from edgert.durable import os_error_as
from edgert.errors import ConfigInvalid, RegistryError, RegistryUnreachable
from edgert.toml_file import refuse_pipe

CONNECT_S_MAX = 20.0
STALL_S_MAX = 30.0  # the longest wait for the next bytes
ANSWER_S_MAX = 60.0  # the longest wait for the head of an answer, or for the whole of a small answer
REDIRECTS_MAX = 5
_BY_THE_CLOCK = (9, 10)  # OpenSSL's codes for a certificate that is not yet valid, or has expired
_REDIRECTS = (301, 302, 303, 307, 308)

Body = bytes | Iterable[bytes]


class Connection:
    """Requests to one host, and to the hosts of its redirects. One thread at a time may use a Connection.

    `ca` is a file with the authorities of the servers' certificates; None means the system's authorities.
    """

    def __init__(self, ca: Path | None = None, *, answer_s: float = ANSWER_S_MAX) -> None:
        self.answer_s = answer_s
        self._open: weakref.WeakSet[HTTPConnection] = weakref.WeakSet()
        self._ca = ca
        self.date_s: float | None = None  # the time that the last answer states, in seconds since 1970
        self._managers: dict[tuple[str, str], urllib3.PoolManager] = {}  # by scheme and proxy

    def close(self) -> None:
        for manager in self._managers.values():
            manager.clear()
        for connection in list(self._open):  # after an error, a pool may exist until the next garbage collection
            connection.close()

    @contextmanager
    def request(
        self, method: str, url: str, headers: Mapping[str, str], body: Body | None = None, answer_s: float = 0.0
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """Send one request and yield its answer with an unread body; follow the redirects of a GET.

        A server may close an idle connection just before the next request. Then this method sends the request once
        more, if the body can be sent again. A redirect to another host drops the login. A redirect from https to http
        is refused. `answer_s` is the time limit for the answer's head; 0 for the limit of this Connection. Raises
        RegistryUnreachable and RegistryError.
        """
        for _ in range(REDIRECTS_MAX + 1):
            try:
                response = self._send(method, url, headers, body, answer_s or self.answer_s)
            except RegistryUnreachable as error:
                if not _closed_before_answer(error) or not (body is None or isinstance(body, bytes)):
                    raise
                response = self._send(method, url, headers, body, answer_s or self.answer_s)
            with contextlib.suppress(ValueError, TypeError, OverflowError):
                date_s = parsedate_to_datetime(response.headers.get("Date", "")).timestamp()
                time_text(date_s)  # raises for a year beyond 9999, which counts as no time
                self.date_s = date_s
            location = response.headers.get("Location") if method in ("GET", "HEAD") else None
            if response.status not in _REDIRECTS or location is None:
                break
            response.close()
            target = checked_location(url, location)
            if urlsplit(target).netloc != urlsplit(url).netloc:
                headers = {name: value for name, value in headers.items() if name != "Authorization"}
            url = target
        else:
            raise RegistryError(
                f"{_host(url)} redirected more than {REDIRECTS_MAX} times: check the registry's address"
            )
        try:
            yield response
        finally:
            if response.connection is not None:  # the body was not read to its end
                response.close()
            response.release_conn()

    def _send(
        self, method: str, url: str, headers: Mapping[str, str], body: Body | None, answer_s: float
    ) -> urllib3.BaseHTTPResponse:
        with self.limited(url, answer_s):
            return self._manager(url).urlopen(
                method,
                url,
                body=body,
                headers={"User-Agent": f"edgert/{__version__}", "Accept-Encoding": "identity", **headers},
                redirect=False,
                retries=False,
                preload_content=False,
                decode_content=False,
            )

    @contextmanager
    def limited(self, url: str, seconds: float) -> Iterator[None]:
        """Shut the sockets if the block takes longer than `seconds`, and translate HTTP errors."""
        late = threading.Event()

        def shut() -> None:
            late.set()
            for connection in list(self._open):
                with contextlib.suppress(OSError, AttributeError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, shut)
        timer.daemon = True
        timer.start()
        try:
            with translated(url):
                yield
        except RegistryUnreachable as error:
            if late.is_set():
                raise RegistryUnreachable(
                    f"{_host(url)} did not answer within {seconds:g} s: check the network and the registry, then try again"
                ) from error
            raise
        finally:
            timer.cancel()

    def _manager(self, url: str) -> urllib3.PoolManager:
        parts = urlsplit(url)
        proxy = "" if urllib.request.proxy_bypass(parts.hostname or "") else _proxy(parts.scheme)
        key = parts.scheme, proxy
        if key not in self._managers:
            self._managers[key] = self._new_manager(*key)
        return self._managers[key]

    def _new_manager(self, scheme: str, proxy: str) -> urllib3.PoolManager:
        # The error about a certificate names a wrong clock; urllib3 would print a warning for each connection.
        warnings.simplefilter("ignore", SystemTimeWarning)
        options: dict[str, Any] = {
            "timeout": urllib3.Timeout(connect=CONNECT_S_MAX, read=STALL_S_MAX),
            "ssl_context": _tls(self._ca) if "https" in (scheme, urlsplit(proxy).scheme) else None,
            "num_pools": 4,
        }
        manager = urllib3.ProxyManager(proxy, **options) if proxy else urllib3.PoolManager(**options)
        manager.pool_classes_by_scheme = _pools(self._open)
        return manager


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Translate HTTP errors to EdgeRT errors."""
    try:
        yield
    except LocationParseError as error:
        raise RegistryError(f"{_host(url)} is not an address: {error}. Correct the address of the registry") from error
    except (HTTPError, OSError, ValueError) as error:
        raise RegistryUnreachable(_reason(url, error)) from error


def _closed_before_answer(error: RegistryUnreachable) -> bool:
    """Return whether the server closed the connection without an answer, as servers do when it is idle."""
    cause = error.__cause__
    closed = (RemoteDisconnected, ConnectionResetError, BrokenPipeError)
    return isinstance(cause, ProtocolError) and any(isinstance(inner, closed) for inner in cause.args)


def checked_location(url: str, location: str) -> str:
    """Return the absolute URL of an answer's `location`. Raises RegistryError if it is wrong or drops TLS."""
    try:
        target = urljoin(url, location)
        scheme = urlsplit(target).scheme
    except ValueError as error:
        raise RegistryError(
            f"{_host(url)} points to {location[:80]!r}, which is not an address: correct the settings of the registry or its proxy"
        ) from error
    if scheme not in ("http", "https"):
        raise RegistryError(
            f"{_host(url)} points to {target[:80]!r}, which is not an HTTP address: correct the settings of the registry or its proxy"
        )
    if urlsplit(url).scheme == "https" and scheme == "http":
        raise RegistryError(
            f"{_host(url)} points to {target[:80]!r}, which is without TLS: nothing was sent there. If a "
            "proxy terminates TLS for the registry, let it send X-Forwarded-Proto"
        )
    return target


def _pools(opened: weakref.WeakSet[HTTPConnection]) -> dict[str, type[HTTPConnectionPool]]:
    """Return urllib3's pools with connections that add themselves to `opened`."""

    class Plain(HTTPConnection):
        def connect(self) -> None:
            opened.add(self)
            super().connect()

    class Secure(HTTPSConnection):
        def connect(self) -> None:
            opened.add(self)
            super().connect()

    class PlainPool(HTTPConnectionPool):
        ConnectionCls = Plain

    class SecurePool(HTTPSConnectionPool):
        ConnectionCls = Secure

    return {"http": PlainPool, "https": SecurePool}


def _tls(ca: Path | None) -> ssl.SSLContext:
    # ssl.SSLError is an OSError, too
    with os_error_as(ConfigInvalid, f"cannot read the certificates in {ca}", "give the CA certificate in PEM form"):
        if ca is not None:
            refuse_pipe(ca)
        return ssl.create_default_context(cafile=ca)


def _proxy(scheme: str) -> str:
    """Return the address of the environment's proxy for `scheme`, or ""."""
    proxy = urllib.request.getproxies_environment().get(scheme, "")
    return proxy if "://" in proxy or not proxy else f"http://{proxy}"


def _host(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2][:200]


def _reason(url: str, error: BaseException) -> str:
    inner: BaseException | None = error
    by_proxy = False
    while isinstance(inner, HTTPError):  # urllib3 keeps the wrapped error as the cause, or among the arguments
        by_proxy = by_proxy or isinstance(inner, ProxyError)
        error, inner = (
            inner,
            inner.__cause__ or next((cause for cause in inner.args if isinstance(cause, Exception)), None),
        )
    inner = inner or error
    text = str(inner) or type(inner).__name__
    if by_proxy:
        scheme = urlsplit(url).scheme
        why = (inner.strerror if isinstance(inner, OSError) else "") or text[:200]
        return (
            f"cannot reach {_host(url)} through the proxy {_host(_proxy(scheme))}: {why.lower()}. Check {scheme}_proxy and "
            "that proxy, or name the registry's host in no_proxy"
        )
    if isinstance(inner, ssl.SSLCertVerificationError):
        advice = "Give the file of the CA that signed it (ca), or replace the certificate"
        if inner.verify_code in _BY_THE_CLOCK:
            advice = f"This machine's clock says {time_text(time.time())}: set it, or renew the certificate"
        return f"the certificate of {_host(url)} is not trusted: {inner.verify_message}. {advice}"
    if isinstance(inner, (ssl.SSLError, SSLError)):
        return f"no TLS with {_host(url)}: {text}. Check that the port speaks TLS, or use oci+http:// without TLS"
    if isinstance(inner, socket.gaierror):
        return f"cannot find the address of {_host(url)}: {inner.strerror}. Check its name and this machine's DNS"
    if isinstance(inner, OSError) and inner.errno is not None:
        reason = os.strerror(inner.errno).lower()
        return f"cannot reach {_host(url)}: {reason}. Check the address, and that the registry runs there"
    return f"the connection with {_host(url)} broke: {text[:200]}. Check the network, then try again"
