"""A receiver of notices."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from werkzeug import Request, Response

from tests.support.serving import serving


@contextmanager
def webhook(statuses: Iterable[int]) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A server that gives these answers, and its requests: (signature, body)."""
    requests: list[tuple[str, bytes]] = []
    answers = iter(statuses)

    def receive(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        request = Request(environ)
        requests.append((request.headers["X-Vitflow-Signature"], request.data))
        return Response(status=next(answers), headers={"Location": "/elsewhere"})(environ, start)

    with serving(receive) as address:
        yield f"{address}/secret-path", requests
