"""Answers one request to the hub of the tests: routes, permissions, listings, files, uploads, commits."""

import base64
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.hub.repositories import TOKENS, Blob, Repository, git_id

API = re.compile(r"^/api/(models|datasets)/([^/]+/[^/]+)(?:/(.*))?$")
RESOLVE = re.compile(r"^/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")


class Refused(Exception):
    """An answer that is an error: status, the hub's code, and its sentence."""

    def __init__(self, status: int, code: str = "", said: str = ""):
        self.status, self.code, self.said = status, code, said


class Handler(BaseHTTPRequestHandler):
    """One connection; `hub` is set by the server that opens it."""

    hub: Any
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # a client that has read enough
            super().handle()

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        self.query = {name: own[0] for name, own in parse_qs(parts.query).items()}
        self.headers_more: dict[str, str] = {}
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self._chunks() if "chunked" in self.headers.get("Transfer-Encoding", "") else None
        self.body = self.rfile.read(length) if self.body is None else self.body
        with self.hub.lock:
            self.hub.log.append((self.command, self.path, self.headers.get("Range", "")))
            try:
                answer = self._route(parts.path)
            except Refused as refused:
                more = {"X-Error-Code": refused.code, "X-Error-Message": refused.said}
                self.headers_more |= {name: value for name, value in more.items() if value}
                answer = (refused.status, {"error": refused.said or refused.code})
        if answer is not None:
            status, value = answer
            self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    do_GET = do_HEAD = do_POST = do_PUT = _answer

    def _chunks(self) -> bytes:
        read = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            read += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return read

    def _send(self, status: int, data: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers, **self.headers_more}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    # Who asks, and what for.

    def _user(self) -> tuple[str, bool] | None:
        said = self.headers.get("Authorization", "")
        if not said:
            return None
        if said.removeprefix("Bearer ") not in TOKENS:
            raise Refused(401, said="Invalid credentials in Authorization header")
        return TOKENS[said.removeprefix("Bearer ")]

    def _writer(self, owner: str) -> None:
        user = self._user()
        if user is None:
            raise Refused(401, said="Invalid username or password.")
        if user[0] != owner or not user[1]:
            said = (
                f"you must use a write token to a repository of {owner!r}, and have the right to write to it."
            )
            raise Refused(403, said=f"Forbidden: {said}")

    def _repository(self, kind: str, name: str) -> Any:
        own = self.hub.repositories.get((kind, name))
        user = self._user()
        if own is None or (own.private and (user is None or user[0] != own.owner)):
            # The hub does not say which of the two: 401 without a token, 404 with one. (Of a 401 by https
            # the client concludes that the repository is not there; by http it has to be told.)
            said = "Repository not found" if user is not None else "Invalid username or password."
            raise Refused(401 if user is None else 404, "RepoNotFound", said)
        return own

    def _commit(self, own: Any, revision: str) -> Any:
        sha = own.sha_of(revision)
        if sha is None:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return own.commits[sha]

    def _route(self, path: str) -> tuple[int, Any] | None:
        if (found := RESOLVE.match(path)) is not None:
            return self._file(
                "datasets" if found[1] else "models", found[2], unquote(found[3]), unquote(found[4])
            )
        if path == "/api/whoami-v2":
            return self._whoami()
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            return self._create()
        if (found := API.match(path)) is not None:
            return self._api(self._repository(found[1], found[2]), found[3] or "")
        raise Refused(404, said=f"no such page: {path}")

    def _api(self, own: Any, rest: str) -> tuple[int, Any]:
        what, _, more = rest.partition("/")
        revision, _, inner = more.partition("/")
        revision, inner = unquote(revision), unquote(inner)
        if what in ("", "revision"):
            return 200, self._info(own, self._commit(own, revision or "main"))
        if what == "refs":
            return 200, self._refs(own)
        if what in ("branch", "tag"):
            return self._name(own, what, revision)
        if what in ("preupload", "commit"):
            self._writer(own.owner)
            return self._preupload(own, revision) if what == "preupload" else self._receive(own, revision)
        commit = self._commit(own, revision)
        if what == "tree":
            return 200, self._page(
                self._tree(commit, inner, self.query.get("recursive") in ("True", "true", "1"))
            )
        if what == "paths-info":
            asked = (
                parse_qs(self.body.decode())["paths"]
                if b"paths=" in self.body
                else json.loads(self.body)["paths"]
            )
            tree = {entry["path"]: entry for entry in self._tree(commit, "", True)}
            return 200, [tree[path] for path in asked if path in tree]
        raise Refused(404, said=f"no such page: {rest}")

    # What there is.

    def _whoami(self) -> tuple[int, Any]:
        user = self._user()
        if user is None:
            raise Refused(401, said="Invalid username or password.")
        token = {"displayName": "test", "role": "write" if user[1] else "read"}
        who = {"type": "user", "id": user[0], "name": user[0], "fullname": user[0], "orgs": []}
        return 200, {**who, "auth": {"type": "access_token", "accessToken": token}}

    def _info(self, own: Any, commit: Any) -> dict[str, Any]:
        return {
            "_id": own.name,
            "id": own.name,
            "author": own.owner,
            "sha": commit.sha,
            "private": own.private,
            "gated": False,
            "disabled": False,
            "lastModified": commit.date,
            "createdAt": commit.date,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": [{"rfilename": path} for path in commit.files],
        }

    def _refs(self, own: Any) -> dict[str, Any]:
        def listed(names: Mapping[str, str], kind: str) -> list[dict[str, str]]:
            return [{"name": n, "ref": f"refs/{kind}/{n}", "targetCommit": sha} for n, sha in names.items()]

        return {"branches": listed(own.branches, "heads"), "tags": listed(own.tags, "tags"), "converts": []}

    def _tree(self, commit: Any, folder: str, recursive: bool) -> list[dict[str, Any]]:
        start = f"{folder}/" if folder else ""
        found: dict[str, dict[str, Any]] = {}
        for path, blob in sorted(commit.files.items()):
            if not path.startswith(start):
                continue
            parts = path.removeprefix(start).split("/")
            for depth in range(1, len(parts) if recursive else min(2, len(parts))):
                inner = start + "/".join(parts[:depth])
                found.setdefault(inner, {"type": "directory", "path": inner, "oid": "0" * 40, "size": 0})
            if recursive or len(parts) == 1:
                found[path] = blob.entry()
        if folder and not found:
            raise Refused(404, "EntryNotFound", f"{folder} does not exist")
        return [*found.values()]

    def _page(self, entries: list[Any]) -> list[Any]:
        """A page of a listing, and where the next one is."""
        start = int(self.query.get("cursor", 0))
        if start + self.hub.page < len(entries):
            own = {**self.query, "cursor": str(start + self.hub.page)}
            query = "&".join(f"{name}={quote(value)}" for name, value in own.items())
            self.headers_more["Link"] = f'<{self.hub.url}{urlsplit(self.path).path}?{query}>; rel="next"'
        return entries[start : start + self.hub.page]

    # Files.

    def _file(self, kind: str, name: str, revision: str, path: str) -> None:
        own = self._repository(kind, name)
        commit = self._commit(own, revision)
        self.headers_more["X-Repo-Commit"] = commit.sha
        blob = commit.files.get(path)
        if blob is None:
            raise Refused(404, "EntryNotFound", "Entry not found")
        data = blob.data
        headers = {
            "ETag": f'"{blob.oid}"',
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        status, sent = 200, data
        if (found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))) is not None:
            start, stop = int(found[1]), int(found[2] or len(data) - 1) + 1
            status, sent = (206, data[start:stop]) if start < len(data) else (416, b"")
            headers["Content-Range"] = f"bytes {start}-{start + len(sent) - 1}/{len(data)}"
        self._send(status, sent, headers)

    # What is written.

    def _create(self) -> tuple[int, Any]:
        asked = json.loads(self.body)
        user = self._user()
        owner = asked.get("organization") or (user[0] if user else "")
        self._writer(owner)
        kind, name = f"{asked.get('type') or 'model'}s", f"{owner}/{asked['name']}"
        url = f"{self.hub.url}/{'datasets/' if kind == 'datasets' else ''}{name}"
        if (kind, name) in self.hub.repositories:
            return 409, {"url": url, "error": "You already created this repo"}
        private = asked.get("private", asked.get("visibility") == "private")
        own = self.hub.repositories[kind, name] = Repository(kind, name, bool(private))
        own.add("main", {}, "initial commit")
        return 200, {"url": url, "name": name}

    def _name(self, own: Any, what: str, name: str) -> tuple[int, Any]:
        self._writer(own.owner)
        asked = json.loads(self.body or b"{}")
        names = own.branches if what == "branch" else own.tags
        named = name if what == "branch" else asked["tag"]
        if named in names:
            return 409, {"error": f"{what} {named} exists"}
        start = asked.get("startingPoint", "main") if what == "branch" else name
        names[named] = self._commit(own, start).sha
        return 200, {}

    def _preupload(self, own: Any, revision: str) -> tuple[int, Any]:
        there = self._commit(own, revision).files
        answer = []
        for one in json.loads(self.body)["files"]:
            entry = {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
            if (blob := there.get(one["path"])) is not None:
                # By which the client sees that a file is there already.
                entry["oid"] = git_id(blob.data)
            answer.append(entry)
        return 200, {"files": answer}

    def _receive(self, own: Any, revision: str) -> tuple[int, Any]:
        if revision not in own.branches:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        title, files = "", {}
        for line in self.body.splitlines():
            entry = json.loads(line)
            key, value = entry["key"], entry["value"]
            if key == "header":
                title = value["summary"]
            elif key == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), value["path"])
            else:
                raise Refused(400, said=f"unknown operation {key}")
        sha = own.add(revision, files, title)
        return 200, {
            "success": True,
            "commitOid": sha,
            "commitUrl": f"{self.hub.url}/{own.name}/commit/{sha}",
        }
