"""A receiver of notices."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread


@contextmanager
def webhook(statuses: Iterable[int]) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A server that gives these answers, and its requests: (signature, body)."""
    requests: list[tuple[str, bytes]] = []
    answers = iter(statuses)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append((self.headers["X-Vitflow-Signature"], body))
            self.send_response(next(answers))
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/secret-path", requests
        server.shutdown()
        thread.join()
