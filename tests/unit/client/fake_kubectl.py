#!/usr/bin/env python3
"""A kubectl that answers `config view` and serves what `proxy` would, on the socket. The file beside it has the answers.

An answer is [status, text], or a list of them: the next one for each request, and then always the last. A watch of a path has an
answer of its own, under "WATCH PATH". Status null: the text is sent, and the connection stays open.
"""

import contextlib
import http.server
import json
import os
import socketserver
import sys
from pathlib import Path

HERE = Path(sys.argv[0]).parent
ANSWERS = json.loads((HERE / "answers.json").read_text())


class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length).decode()
        with (HERE / "asked").open("a") as asked:
            asked.write(json.dumps([self.command, self.path, self.headers.get("Content-Type"), body]) + "\n")
        verb = "WATCH" if "watch=true" in self.path else self.command
        found = ANSWERS.get(f"{verb} {self.path.split('?')[0]}", [404, json.dumps({"reason": "NotFound"})])
        if isinstance(found[0], list):
            found = found.pop(0) if len(found) > 1 else found[0]
        status, text = found
        if status == 0:  # the connection breaks
            return
        self.send_response(status or 200)
        if status is not None:
            self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(text.encode())
            if status is None:
                self.rfile.read()  # until the other side closes

    do_GET = do_PATCH = do_POST = do_DELETE = answer

    def address_string(self) -> str:
        return "socket"

    def log_message(self, *_: object) -> None:
        pass


with (HERE / "words").open("a") as words:
    words.write(" ".join(sys.argv[1:]) + "\n")
if sys.argv[1] == "config":
    print(ANSWERS.get("namespace", ""), end="")
elif "refuses" in ANSWERS:
    print(ANSWERS["refuses"], file=sys.stderr)
    sys.exit(1)
else:
    path = next(word for word in sys.argv if word.startswith("--unix-socket=")).split("=")[1]
    (HERE / "pid").write_text(str(os.getpid()))
    (HERE / "home").write_text(str(Path(path).parent))
    (HERE / "mode").write_text(oct(Path(path).parent.stat().st_mode & 0o777))
    socketserver.ThreadingUnixStreamServer.request_queue_size = 128
    with socketserver.ThreadingUnixStreamServer(path, Handler) as server:
        print(f"Starting to serve on {path}", flush=True)
        server.serve_forever()
