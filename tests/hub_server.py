"""The part of the Hugging Face hub's HTTP protocol that publishing and fetching a model need, in this process.

Written from what the client sends: repositories, branches, pull requests, preupload, LFS batch and upload, commits,
trees, and files. Sizes and hashes it reports are those of the bytes it holds. `faults` make it fail on purpose.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_0123456789secret"
WHEN = "2026-01-01T00:00:00.000Z"


@dataclass
class Fault:
    """What happens instead to the next `times` requests `METHOD path` that match: a status, or `drop` or `corrupt`."""

    pattern: str
    action: int | str
    times: int = 1
    message: str = "fault"


@dataclass
class File:
    content: bytes
    large: bool

    @property
    def blob(self):
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    @property
    def sha256(self):
        return hashlib.sha256(self.content).hexdigest()

    def record(self, path):
        found = {"type": "file", "path": path, "size": len(self.content), "oid": self.blob}
        if self.large:
            found["lfs"] = {"oid": self.sha256, "size": len(self.content), "pointerSize": 130}
        return found


@dataclass
class Repo:
    private: bool
    commits: dict = field(default_factory=dict)  # commit -> path -> File
    refs: dict = field(default_factory=dict)  # branch -> commit
    requests: list = field(default_factory=list)  # pull requests

    def commit(self, ref, tree):
        oid = hashlib.sha1(f"{ref}{len(self.commits)}".encode()).hexdigest()
        self.commits[oid] = tree
        self.refs[ref] = oid
        return oid

    def tree(self, revision):
        return self.commits.get(self.refs.get(revision, revision))


class HubServer:
    """Started on creation; `url` is its endpoint, `log` every request as `METHOD path`."""

    def __init__(self):
        self.repos, self.objects, self.faults, self.log, self.tokens = {}, {}, [], [], set()
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()

    def create(self, name, *, private=True, **files):
        """A repository as somebody else has left it."""
        repo = self.repos[name] = Repo(private)
        repo.commit("main", {".gitattributes": File(b"*.safetensors filter=lfs\n", large=False)})
        if files:
            repo.commit("main", {path: File(content, large=False) for path, content in files.items()})
        return repo

    def fault(self, *arguments, **options):
        self.faults.append(Fault(*arguments, **options))

    def sent(self, pattern):
        """How many requests matched."""
        return sum(bool(re.search(pattern, line)) for line in self.log)


class Answer(Exception):
    """An answer that ends the work on a request."""

    def __init__(self, status, body=b"", **headers):
        super().__init__(status)
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()


def missing(what):
    return Answer(404, {"error": f"{what} not found"}, X_Error_Code=f"{what}NotFound", X_Error_Message=f"no {what}")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub = None

    def log_message(self, *_):
        pass

    def serve(self):
        split = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(split.query).items()}
        line = f"{self.command} {unquote(split.path)}"
        self.server_hub.log.append(line)
        self.content = self.body()
        authorization = self.headers.get("Authorization", "")
        if authorization:
            self.server_hub.tokens.add(authorization)
        try:
            self.fail(line)
            if self.command not in ("GET", "HEAD") and not split.path.startswith("/lfs/"):
                self.authorize(authorization)
            self.dispatch(line)
        except Answer as answer:
            self.reply(answer)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = serve

    def body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def fail(self, line):
        for fault in self.server_hub.faults:
            if fault.times > 0 and re.search(fault.pattern, line):
                fault.times -= 1
                if fault.action == "drop":
                    self.close_connection = True
                    self.connection.close()
                    raise Answer(0)
                if fault.action == "corrupt":
                    self.content = bytes([self.content[0] ^ 1]) + self.content[1:]
                    return
                raise Answer(fault.action, {"error": fault.message}, X_Error_Message=fault.message)

    def authorize(self, authorization):
        if authorization != f"Bearer {TOKEN}":
            raise Answer(401, {"error": "Invalid username or password."})

    def reply(self, answer):
        if answer.status == 0:
            return
        self.send_response(answer.status)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(answer.body))} | answer.headers
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def dispatch(self, line):
        for pattern, name in ROUTES:
            if found := re.fullmatch(pattern, line):
                getattr(self, name)(**found.groupdict())
        raise Answer(404, {"error": f"no route for {line}"})

    def repo(self, name):
        if name not in self.server_hub.repos:
            raise missing("Repo")
        return self.server_hub.repos[name]

    def tree(self, name, revision):
        tree = self.repo(name).tree(revision)
        if tree is None:
            raise missing("Revision")
        return tree

    def create_repo(self):
        asked = json.loads(self.content)
        name = f"{asked['organization']}/{asked['name']}"
        url = {"url": f"{self.server_hub.url}/{name}", "id": name}
        if name in self.server_hub.repos:
            raise Answer(409, url | {"error": "You already created this model repo"})
        self.server_hub.create(name, private=asked.get("visibility") == "private")
        raise Answer(200, url)

    def info(self, name, revision="main"):
        repo, tree = self.repo(name), self.tree(name, revision)
        commit = repo.refs.get(revision, revision)
        siblings = [{"rfilename": path} for path in tree]
        raise Answer(200, {"id": name, "sha": commit, "private": repo.private, "siblings": siblings})

    def branch(self, name, branch):
        repo = self.repo(name)
        if self.command == "DELETE":
            if branch not in repo.refs:
                raise missing("Revision")
            del repo.refs[branch]
            raise Answer(200, {})
        if branch in repo.refs:
            raise Answer(409, {"error": "Reference already exists"})
        start = json.loads(self.content or b"{}").get("startingPoint", "main")
        repo.refs[branch] = repo.refs.get(start, start)
        raise Answer(200, {})

    def preupload(self, name, revision):
        tree = self.tree(name, revision)
        files = []
        for asked in json.loads(self.content)["files"]:
            large, old = asked["path"].endswith(".safetensors"), tree.get(asked["path"])
            oid = (old.sha256 if old.large else old.blob) if old else None
            mode = "lfs" if large else "regular"
            files.append({"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        raise Answer(200, {"files": files})

    def batch(self, name):
        self.repo(name)
        objects = []
        for asked in json.loads(self.content)["objects"]:
            upload = {"upload": {"href": f"{self.server_hub.url}/lfs/{asked['oid']}", "header": {}}}
            objects.append(asked if asked["oid"] in self.server_hub.objects else asked | {"actions": upload})
        raise Answer(200, {"transfer": "basic", "objects": objects})

    def store(self, oid):
        self.server_hub.objects[oid] = self.content
        raise Answer(200, {})

    def commit(self, name, revision):
        repo, tree = self.repo(name), dict(self.tree(name, revision))
        lines = [json.loads(line) for line in self.content.splitlines()]
        parent = lines[0]["value"].get("parentCommit")
        if parent and parent != repo.refs[revision]:
            raise Answer(412, {"error": "A commit has happened since. Please refresh and try again."})
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "deletedFile":
                del tree[value["path"]]
            elif line["key"] == "file":
                tree[value["path"]] = File(base64.b64decode(value["content"]), large=False)
            else:
                if value["oid"] not in self.server_hub.objects:
                    raise Answer(400, {"error": f"LFS object {value['oid']} was not uploaded"})
                tree[value["path"]] = File(self.server_hub.objects[value["oid"]], large=True)
        oid = repo.commit(revision, tree)
        raise Answer(200, {"commitOid": oid, "commitUrl": f"{self.server_hub.url}/{name}/commit/{oid}"})

    def list_tree(self, name, revision):
        raise Answer(200, [file.record(path) for path, file in self.tree(name, revision).items()])

    def paths(self, name, revision):
        tree, asked = self.tree(name, revision), parse_qs(self.content.decode())["paths"]
        raise Answer(200, [tree[path].record(path) for path in asked if path in tree])

    def resolve(self, name, revision, path):
        tree, repo = self.tree(name, revision), self.repo(name)
        if path not in tree:
            raise missing("Entry")
        file = tree[path]
        etag = file.sha256 if file.large else file.blob
        commit = repo.refs.get(revision, revision)
        raise Answer(200, file.content, X_Repo_Commit=commit, ETag=f'"{etag}"', Content_Type="application/octet-stream")

    def requests(self, name):
        repo = self.repo(name)
        if self.command == "POST":
            number = len(repo.requests) + 1
            repo.requests.append({"num": number, "title": json.loads(self.content)["title"], "status": "draft"})
            repo.refs[f"refs/pr/{number}"] = repo.refs["main"]
            raise Answer(200, {"num": number})
        found = [self.request_record(name, number) for number in range(1, len(repo.requests) + 1)]
        raise Answer(200, {"discussions": found, "count": len(found), "start": 0})

    def request_record(self, name, number):
        found = self.repo(name).requests[int(number) - 1]
        common = {"author": {"name": "me"}, "createdAt": WHEN, "isPullRequest": True, "events": []}
        place = {"repo": {"name": name, "type": "model"}, "changes": {"base": "main"}, "filesWithConflicts": []}
        return found | common | place

    def one_request(self, name, number):
        raise Answer(200, self.request_record(name, number))

    def status(self, name, number):
        asked = json.loads(self.content)
        self.repo(name).requests[int(number) - 1] |= asked
        event = {"id": "1", "type": "status-change", "createdAt": WHEN, "data": {"status": asked["status"]}}
        raise Answer(200, {"newStatus": event})

    def validate(self):
        raise Answer(200, {"errors": [], "warnings": []})


NAME = r"(?P<name>[\w.-]+/[\w.-]+)"
API = rf"/api/models/{NAME}"
REVISION = r"(?P<revision>refs/pr/\d+|[\w.-]+)"
ROUTES = (
    ("POST /api/repos/create", "create_repo"),
    ("POST /api/validate-yaml", "validate"),
    (rf"GET {API}", "info"),
    (rf"GET {API}/revision/{REVISION}", "info"),
    (rf"(POST|DELETE) {API}/branch/(?P<branch>[\w.-]+)", "branch"),
    (rf"POST {API}/preupload/{REVISION}", "preupload"),
    (rf"POST /{NAME}\.git/info/lfs/objects/batch", "batch"),
    (r"PUT /lfs/(?P<oid>\w+)", "store"),
    (rf"POST {API}/commit/{REVISION}", "commit"),
    (rf"GET {API}/tree/{REVISION}", "list_tree"),
    (rf"POST {API}/paths-info/{REVISION}", "paths"),
    (rf"(GET|HEAD) /{NAME}/resolve/{REVISION}/(?P<path>.+)", "resolve"),
    (rf"(GET|POST) {API}/discussions", "requests"),
    (rf"GET {API}/discussions/(?P<number>\d+)", "one_request"),
    (rf"POST {API}/discussions/(?P<number>\d+)/status", "status"),
)
