"""Serves repositories on the loopback address by the protocol of the Hugging Face hub.

What `huggingface_hub`, `transformers` and `datasets` ask for is answered as the hub answers it: commits with
full shas, branches and tags, git ids of blobs, ranges, pages with a `Link` header, error codes in
`X-Error-Code`. Clients are asked to upload files inside the commit. No file is a large one, and no xet hash
is named, so that all is downloaded by plain HTTP.

    with Hub() as hub:
        sha = hub.commit("models", "owner/name", {"config.json": b"{}"})
        ...  # processes with HF_ENDPOINT=hub.url
"""

import threading
from collections.abc import Mapping
from http.server import ThreadingHTTPServer

from tests.hub.repositories import Blob, Repository
from tests.hub.requests import Handler


class Hub:
    """A hub on a free port of the loopback address.

    Args:
        page: entries of a page of a listing.
    """

    def __init__(self, *, page: int = 3):
        self.page = page
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.log: list[tuple[str, str, str]] = []  # method, path, range
        self.lock = threading.RLock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "Hub":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def commit(self, kind: str, name: str, files: Mapping[str, bytes], *, private: bool = False) -> str:
        """Commits files to a repository (`models` or `datasets`), made if missing; returns the sha."""
        with self.lock:
            own = self.repositories.setdefault((kind, name), Repository(kind, name, private))
            return own.add("main", {path: Blob(data, path) for path, data in files.items()}, "add files")
