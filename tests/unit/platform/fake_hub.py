"""A server that speaks as much of the Hugging Face hub's protocol as uploads and downloads by huggingface_hub need."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SHA = "a" * 40


class FakeHub:
    """Models by name, each a dict with "private" and "files"; a context manager that serves them on loopback."""

    def __init__(self):
        self.models, self.lfs, self.requests = {}, {}, []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def handle_any(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                hub.requests.append((self.command, self.path, self.headers.get("Authorization")))
                status, headers, content = hub.answer(self.command, self.path.partition("?")[0], body)
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(content))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_HEAD = handle_any

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method, path, body):  # noqa: PLR0911 - one a kind of request
        parts = path.strip("/").split("/")
        if path == "/api/repos/create":
            fields = json.loads(body)
            name = f"{fields.get('organization') or 'me'}/{fields['name']}"
            private = fields.get("private", fields.get("visibility") == "private")
            self.models.setdefault(name, {"private": bool(private), "files": {}})
            return self._json({"url": f"{self.url}/{name}", "id": name})
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if method == "PUT" and parts[0] == "lfs":
            self.lfs[parts[1]] = body
            return 200, {}, b""
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            upload = [one | {"actions": {"upload": {"href": f"{self.url}/lfs/{one['oid']}"}}} for one in objects]
            return self._json({"transfer": "basic", "objects": upload})
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        model = self.models.get(name)
        if model is None:
            return 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b""
        if parts[0] == "api":
            return self._of_api(name, model, parts[4:], body)
        content = model["files"].get("/".join(parts[4:]))
        if parts[2] != "resolve" or content is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": SHA}, content

    def _of_api(self, name, model, what, body):
        if what[:1] == ["preupload"]:
            mode = {True: "lfs", False: "regular"}
            files = [one["path"] for one in json.loads(body)["files"]]
            found = [
                {"path": one, "uploadMode": mode[one.endswith("safetensors")], "shouldIgnore": False} for one in files
            ]
            return self._json({"files": found})
        if what[:1] == ["commit"]:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    model["files"][value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    model["files"][value["path"]] = self.lfs[value["oid"]]
            url = f"{self.url}/{name}/commit/{SHA}"
            return self._json({"success": True, "commitUrl": url, "commitOid": SHA, "hookOutput": ""})
        if what[:1] == ["tree"]:
            return self._json(
                [{"type": "file", "path": path, "size": len(data), "oid": SHA} for path, data in model["files"].items()]
            )
        siblings = [{"rfilename": path} for path in model["files"]]
        return self._json({"id": name, "sha": SHA, "private": model["private"], "siblings": siblings})

    def _json(self, value):
        return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()
