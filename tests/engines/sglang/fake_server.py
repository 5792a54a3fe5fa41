"""What the launcher sees of SGLang, without SGLang: processes that come up, answer `/health`, and would live on by themselves."""

from __future__ import annotations

import http.server
import subprocess
import sys


class Health(http.server.BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self) -> None:
        """503 at first, as while a server warms up."""
        Health.asked += 1
        self.send_response(200 if self.path == "/health" and Health.asked > 2 else 503)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Silent."""


if __name__ == "__main__":
    arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
    if "--fail" in sys.argv:
        sys.exit("no such model")
    # In the group of its parent, like SGLang's schedulers; it holds stderr open, and nothing else ends it.
    child = subprocess.Popen(["sleep", "600"])
    print(f"child {child.pid}", file=sys.stderr, flush=True)
    http.server.HTTPServer((arguments["--host"], int(arguments["--port"])), Health).serve_forever()
