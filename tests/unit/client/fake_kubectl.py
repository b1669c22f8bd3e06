#!/usr/bin/env python3
"""A kubectl that answers `config view` and serves what `proxy` would, on the socket. The file beside it has the answers."""

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
        status, text = ANSWERS.get(
            f"{self.command} {self.path.split('?')[0]}", [404, json.dumps({"reason": "NotFound"})]
        )
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_PATCH = do_POST = do_DELETE = answer

    def address_string(self) -> str:
        return "socket"

    def log_message(self, *_: object) -> None:
        pass


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
    with socketserver.ThreadingUnixStreamServer(path, Handler) as server:
        print(f"Starting to serve on {path}", flush=True)
        server.serve_forever()
