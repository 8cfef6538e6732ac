"""A model that `mantissa pull` fetched is found by huggingface_hub, and the other way round.

A server on this machine answers as the hub does, so nothing is fetched from the network:

    python tests/interop/hub_cache.py target/ci/mantissa tests/data/tiny/llama2-gqa-tied
"""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def digest(name: str, data: bytes) -> str:
    """The hash that names a file: SHA-256 of weights, git's id of the others."""
    if name.endswith(".safetensors"):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def serve(files: dict[str, bytes]) -> str:
    """Starts the hub with the model `org/m`; returns its address."""

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(False)

        def do_GET(self):
            self.answer(True)

        def log_message(self, *_):
            pass

        def answer(self, with_body: bool):
            path = self.path.split("?")[0]
            if path in (f"/api/models/org/m/revision/{revision}" for revision in ("main", COMMIT)):
                siblings = []
                for name, data in files.items():
                    entry = {"rfilename": name, "size": len(data), "blobId": digest(name, data)}
                    if name.endswith(".safetensors"):
                        entry["lfs"] = {"sha256": digest(name, data), "size": len(data), "pointerSize": 134}
                    siblings.append(entry)
                body = json.dumps({"id": "org/m", "sha": COMMIT, "siblings": siblings}).encode()
                return self.reply(200, body, {"Content-Type": "application/json"}, with_body)
            if path in (f"/api/models/org/m/tree/{revision}" for revision in ("main", COMMIT)):
                entries = []
                for name, data in files.items():
                    entry = {"type": "file", "path": name, "size": len(data), "oid": digest(name, data)}
                    if name.endswith(".safetensors"):
                        entry["lfs"] = {"oid": digest(name, data), "size": len(data), "pointerSize": 134}
                    entries.append(entry)
                return self.reply(200, json.dumps(entries).encode(), {"Content-Type": "application/json"}, with_body)
            name = path.removeprefix(f"/org/m/resolve/{COMMIT}/").removeprefix("/org/m/resolve/main/")
            if name not in files:
                return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
            headers = {"ETag": f'"{digest(name, files[name])}"', "X-Repo-Commit": COMMIT}
            self.reply(200, files[name], headers, with_body)

        def reply(self, status: int, body: bytes, headers: dict[str, str], with_body: bool):
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


def tree(folder: Path) -> dict[str, str]:
    """Every file and link below a folder, with the text of the link or the hash of the file."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def main() -> None:
    binary, model = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    files = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
    os.environ["HF_ENDPOINT"] = serve(files)
    os.environ["HF_HUB_DISABLE_XET"] = "1"
    from huggingface_hub import snapshot_download

    with tempfile.TemporaryDirectory() as temp:
        ours, theirs = Path(temp) / "ours", Path(temp) / "theirs"
        os.environ["HF_HUB_CACHE"] = str(ours)
        subprocess.run([binary, "pull", "org/m", "--quiet"], check=True)
        found = Path(snapshot_download("org/m", local_files_only=True, cache_dir=ours))
        assert {path.name: path.read_bytes() for path in found.iterdir()} == files, "other files"
        snapshot_download("org/m", cache_dir=theirs)
        parts = ["snapshots", "refs", "blobs"]
        for part in parts:
            made, expected = (tree(cache / "models--org--m" / part) for cache in (ours, theirs))
            assert made == expected, f"{part}: {made} is not {expected}"
        os.environ["HF_HUB_CACHE"] = str(theirs)
        report = subprocess.run([binary, "pull", "org/m", "--json"], check=True, capture_output=True)
        assert json.loads(report.stdout)["fetched_bytes"] == 0, "fetched what is there"
        subprocess.run([binary, "inspect", "org/m"], check=True, stdout=subprocess.DEVNULL)
    print(f"ok: {len(files)} files, the same cache by both")


if __name__ == "__main__":
    main()
