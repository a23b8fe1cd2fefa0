"""Stands in for vLLM's OpenAI server: it knows health, metrics and completions, and what `retain` counts.

Run in place of an interpreter: `stub_server.py -m vllm.entrypoints.openai.api_server --port PORT ...`. It
leaves a child behind, as a server that is killed may.
"""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from retain.vllm.demo import write_question
from retain.vllm.settings import Settings, options_of

COUNTS = {"evictions": 0, "entries_freed": 0, "blocks_freed": 0, "requests_in_full": 0}
LOCK = threading.Lock()
RIGHT = f" {write_question(0)[2]}. More"


class Handler(BaseHTTPRequestHandler):
    """Answers of two parts, and of chats the answer of the demonstration's first question."""

    def _send(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        counted = "".join(f'vllm:retain_{name}_total{{engine="0"}} {n}\n' for name, n in COUNTS.items())
        idle = 'vllm:num_requests_running{engine="0"} 0.0\nvllm:kv_cache_usage_perc{engine="0"} 0.0\n'
        self._send(f'# HELP x\n{counted}{idle}vllm:cache_config_info{{num_gpu_blocks="129"}} 1.0\n')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            budget, _ = options_of(Settings(keep_ratio=0.2), body.get("vllm_xargs"), None)
        except ValueError as error:
            self._send(json.dumps({"error": {"message": str(error)}}), 400)
            return
        with LOCK:
            if budget is None:
                COUNTS["requests_in_full"] += 1
            else:
                COUNTS["evictions"] += 1
                COUNTS["blocks_freed"] += 7
        if body.get("stream"):
            parts = [{"choices": [{"text": text}]} for text in (f"{budget.keep_ratio}", "!")]
            self._send("".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n")
        else:
            self._send(json.dumps({"choices": [{"message": {"content": RIGHT}}]}))

    def log_message(self, *args: object) -> None:
        return


if __name__ == "__main__":
    if "--broken" in sys.argv:
        sys.exit("this engine cannot evict: it is broken")
    child = subprocess.Popen(["sleep", "600"])
    print("child", child.pid, flush=True)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
