"""HTTP servers for tests: a WSGI application on loopback, in threads of the test's own process."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from socket import SHUT_RDWR
from typing import Any

from werkzeug import Response
from werkzeug.serving import make_server

WSGI = Callable[[dict[str, Any], Any], Iterable[bytes]]
logging.getLogger("werkzeug").setLevel(logging.ERROR)  # not a line for each request


@contextmanager
def serving(application: WSGI) -> Iterator[str]:
    """Yield the server's address; afterwards connections are refused."""
    server = make_server("127.0.0.1", 0, application, threaded=True)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def hang_up(environ: dict[str, Any]) -> None:
    """End the connection of a request where it stands."""
    environ["werkzeug.socket"].shutdown(SHUT_RDWR)


def break_off(response: Response, environ: dict[str, Any], start: Any) -> Iterator[bytes]:
    """Send the first half of an answer."""
    start(response.status, response.get_wsgi_headers(environ).to_wsgi_list())
    yield response.data[: len(response.data) // 2]
    hang_up(environ)
