"""A Hugging Face hub on the loopback: the part of its protocol that fetching a dataset takes.

Small files come by a redirect within the hub, parquet files from another host: by plain HTTP (LFS) or in chunks (xet).
`localhost` is that other host; for the hub's library it is not 127.0.0.1.
"""

import hashlib
import json
import re
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CHUNK = 64 * 1024
REPOSITORY = r"([^/]+/[^/]+)"


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


def as_json(content: object, **headers: str) -> Answer:
    return Answer(200, json.dumps(content).encode(), {"Content-Type": "application/json", **headers})


def not_found(code: str) -> Answer:
    return Answer(404, b"", {"X-Error-Code": code, "X-Error-Message": code})


def name_of(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def is_large(body: bytes) -> bool:
    return body.startswith(b"PAR1")


def in_chunks(body: bytes) -> bytes:
    """Pack a file as xet does: version 0, length as sent, scheme 0 (not compressed), length unpacked, the bytes."""
    packed = []
    for start in range(0, len(body), CHUNK):
        chunk = body[start : start + CHUNK]
        length = struct.pack("<I", len(chunk))[:3]
        packed += [b"\0", length, b"\0", length, chunk]
    return b"".join(packed)


class Hub:
    """Answer for some repositories, and note what was asked.

    Args:
        repositories: name -> path -> content.
        xet: the repositories whose large files are sent in chunks.
        mute: those answered with a bare 404, as by a server that is no hub.
    """

    def __init__(
        self, repositories: Mapping[str, Mapping[str, bytes]], xet: Collection[str] = (), mute: Collection[str] = ()
    ) -> None:
        self.repositories, self.xet, self.mute = repositories, xet, mute
        self.bodies = {name_of(body): body for files in repositories.values() for body in files.values()}
        self.asked: list[str] = []
        self.port = 0
        self.routes: dict[str, Callable[..., Answer]] = {
            rf"/api/datasets/{REPOSITORY}(?:/revision/[^/]+)?": self.about,
            rf"/api/datasets/{REPOSITORY}/tree/[^/]+(?:/(.+))?": self.tree,
            rf"/datasets/{REPOSITORY}/resolve/[^/]+/(.+)": self.resolve,
            rf"/api/resolve-cache/datasets/{REPOSITORY}/{COMMIT}/(.+)": self.small,
            rf"/api/datasets/{REPOSITORY}/xet-read-token/{COMMIT}": self.token,
            r"/lfs/(\w+)": lambda name: Answer(200, self.bodies[name]),
            r"/v1/reconstructions/(\w+)": self.reconstruction,
            r"/chunks/(\w+)": lambda name: Answer(200, in_chunks(self.bodies[name])),
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def storage(self) -> str:
        return f"http://localhost:{self.port}"

    def answer(self, target: str) -> Answer:
        path = urlsplit(target).path
        for pattern, respond in self.routes.items():
            if found := re.fullmatch(pattern, path):
                first, *more = [unquote(part or "") for part in found.groups()]
                if first in self.mute:
                    break
                known = first in self.repositories or first in self.bodies
                return respond(first, *more) if known else not_found("RepoNotFound")
        return Answer(404)

    def about(self, repository: str) -> Answer:
        siblings = [{"rfilename": path} for path in self.repositories[repository]]
        flags = {"private": False, "gated": False, "disabled": False}
        return as_json({"id": repository, "sha": COMMIT, "tags": [], "siblings": siblings, **flags})

    def tree(self, repository: str, folder: str) -> Answer:
        """List one folder, without those below it."""
        above = f"{folder}/" if folder else ""
        entries = {}
        for path, body in self.repositories[repository].items():
            if path.startswith(above):
                name, below, _ = path.removeprefix(above).partition("/")
                more = {"type": "directory", "size": 0} if below else self.described(repository, body)
                entries[name] = {"path": above + name, "oid": name_of(name.encode())[:40], **more}
        return as_json(list(entries.values())) if entries else not_found("EntryNotFound")

    def described(self, repository: str, body: bytes) -> dict[str, object]:
        known: dict[str, object] = {"type": "file", "size": len(body)}
        if is_large(body):
            known["lfs"] = {"oid": name_of(body), "size": len(body), "pointerSize": 130}
            known |= {"xetHash": name_of(body)} if repository in self.xet else {}
        return known

    def resolve(self, repository: str, path: str) -> Answer:
        """Redirect: large files to the storage, with all that is known of them; others within the hub."""
        body = self.repositories[repository].get(path)
        if body is None:
            return not_found("EntryNotFound")
        if not is_large(body):
            place = f"/api/resolve-cache/datasets/{repository}/{COMMIT}/{path}"
            return Answer(307, b"", {"Location": place, "X-Repo-Commit": COMMIT})
        headers = {
            "Location": f"{self.storage}/lfs/{name_of(body)}",
            "X-Repo-Commit": COMMIT,
            "X-Linked-ETag": f'"{name_of(body)}"',
            "X-Linked-Size": str(len(body)),
        }
        if repository in self.xet:
            token = f"{self.url}/api/datasets/{repository}/xet-read-token/{COMMIT}"
            headers |= {"X-Xet-Hash": name_of(body), "Link": f'<{token}>; rel="xet-auth"'}
        return Answer(302, b"", headers)

    def small(self, repository: str, path: str) -> Answer:
        body = self.repositories[repository][path]
        return Answer(200, body, {"ETag": f'"{name_of(body)[:40]}"', "X-Repo-Commit": COMMIT})

    def token(self, repository: str) -> Answer:
        place, token, until = self.storage, "some", int(time.time()) + 3600
        headers = {"X-Xet-Cas-Url": place, "X-Xet-Access-Token": token, "X-Xet-Token-Expiration": str(until)}
        return as_json({"casUrl": place, "accessToken": token, "exp": until}, **headers)

    def reconstruction(self, name: str) -> Answer:
        """Tell of which chunks a file is made, and where they are."""
        size, packed = len(self.bodies[name]), len(in_chunks(self.bodies[name]))
        chunks = {"start": 0, "end": -(-size // CHUNK)}
        place = {"range": chunks, "url": f"{self.storage}/chunks/{name}", "url_range": {"start": 0, "end": packed - 1}}
        term = {"hash": name, "unpacked_length": size, "range": chunks}
        return as_json({"offset_into_first_range": 0, "terms": [term], "fetch_info": {name: [place]}})


class Handler(BaseHTTPRequestHandler):
    """Send the hub's answers, or the range of a stored file that is asked for."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        answer = self.hub.answer(self.path)
        status, body, headers = answer.status, answer.body, dict(answer.headers)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted and self.path.startswith(("/lfs/", "/chunks/")):
            first, last = int(wanted[1]), min(int(wanted[2] or len(body)), len(body) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
            status, body = 206, body[first : last + 1]
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        """Keep silent."""


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve a hub on a free port of the loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    hub.port = server.server_port
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
