"""Publishing to a hub that speaks the real protocol: what arrives, what is refused, and every way it can go wrong."""

import json

import pytest
from huggingface_hub import constants, snapshot_download

from compress import hub_errors
from compress.errors import GateFailed, Inconclusive, InputError, PushFailed, Refused
from compress.hub import check_login
from compress.push import push, show
from compress.push_options import PushOptions
from compress.verify import verify
from tests.hub_server import TOKEN, HubServer

REPO = "org/model"
OPTIONS = PushOptions(repo=REPO)


@pytest.fixture
def server(monkeypatch, tmp_path):
    server = HubServer()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    yield server
    server.close()


@pytest.fixture
def passed(make_run):
    return make_run()[0]


def files(server, revision="main"):
    return {path: file.content for path, file in server.repos[REPO].tree(revision).items()}


def local(directory):
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_a_pass_arrives_whole_in_a_private_repository_as_one_commit(server, passed):
    pushed = push(passed, OPTIONS)
    repo = server.repos[REPO]
    arrived = files(server)
    assert {path: arrived[path] for path in local(passed)} == local(passed)
    assert arrived.keys() - local(passed).keys() == {"README.md", ".gitattributes"}
    assert repo.private and list(repo.refs) == ["main"] and repo.refs["main"] == pushed.commit
    assert pushed.url == f"{server.url}/{REPO}/tree/main" and pushed.pull_request is None


def test_what_is_there_already_is_not_sent_again(server, passed):
    first = push(passed, OPTIONS)
    server.log.clear()
    assert push(passed, OPTIONS) == first
    assert server.sent("^PUT ") == server.sent("/commit/") == 0


def test_files_of_an_earlier_version_disappear_and_the_hubs_own_stay(server, passed):
    server.create(REPO, **{"model-00001-of-00002.safetensors": b"old", ".gitattributes": b"mine", "notes.txt": b"x"})
    push(passed, OPTIONS)
    assert not {"model-00001-of-00002.safetensors", "notes.txt"} & files(server).keys()
    assert files(server)[".gitattributes"] == b"mine"


def test_a_fetched_copy_verifies(server, passed, tmp_path):
    push(passed, OPTIONS)
    copy = tmp_path / "copy"
    snapshot_download(REPO, local_dir=copy, token=TOKEN, endpoint=server.url)
    assert (copy / ".gitattributes").exists() and (copy / ".cache" / "huggingface").exists()
    report = verify(copy)
    assert (report.problems, report.verdict, report.seal) == ((), "PASS", verify(passed).seal)
    (copy / "model.safetensors").write_bytes(b"other")
    assert verify(copy).problems == ("model.safetensors has other bytes than those in the manifest",)


def test_results_that_people_add_on_the_hub_leave_a_fetched_copy_valid(server, passed, tmp_path):
    push(passed, OPTIONS)
    repo = server.repos[REPO]
    tree = repo.tree("main")
    repo.commit("main", {**tree, ".eval_results/gsm8k.yaml": tree["config.json"]})
    copy = tmp_path / "copy"
    snapshot_download(REPO, local_dir=copy, token=TOKEN, endpoint=server.url)
    assert (copy / ".eval_results" / "gsm8k.yaml").is_file() and verify(copy).problems == ()


def test_another_branch_is_made_from_main_and_main_stays(server, passed):
    server.create(REPO)
    before = server.repos[REPO].refs["main"]
    pushed = push(passed, PushOptions(repo=REPO, revision="v2"))
    assert server.repos[REPO].refs == {"main": before, "v2": pushed.commit}
    assert "model.safetensors" in files(server, "v2")


def test_a_pull_request_is_opened_once_and_main_stays(server, passed):
    server.create(REPO)
    before = server.repos[REPO].refs["main"]
    options = PushOptions(repo=REPO, create_pr=True)
    pushed = push(passed, options)
    assert pushed.pull_request == f"{server.url}/{REPO}/discussions/1"
    assert push(passed, options).pull_request == pushed.pull_request
    assert server.repos[REPO].refs == {"main": before, "refs/pr/1": pushed.commit}
    assert "model.safetensors" in files(server, "refs/pr/1")


@pytest.mark.parametrize(("shift", "error"), [(0.2, GateFailed), (0.028, Inconclusive)], ids=["fail", "inconclusive"])
def test_what_did_not_pass_is_not_published(server, make_run, shift, error):
    directory, _ = make_run(shift)
    with pytest.raises(error, match=r"^not published: the verdict is (FAIL|INCONCLUSIVE)$"):
        push(directory, OPTIONS)
    assert server.log == []


def test_refused_evidence_is_not_published(server, make_run):
    with pytest.raises(Refused, match="the verdict is REFUSED"):
        push(make_run(refusals=["the tokenizers differ"])[0], OPTIONS)


def test_bytes_that_are_not_those_of_the_evidence_are_not_published(server, passed):
    (passed / "model.safetensors").write_bytes(b"other bytes")
    with pytest.raises(Refused, match=r"^not published: model\.safetensors has other bytes"):
        push(passed, OPTIONS)
    assert server.log == []


def test_a_directory_without_evidence_is_an_input_error(server, tmp_path):
    with pytest.raises(InputError, match=r"holds no evidence/gate\.json"):
        push(tmp_path, OPTIONS)


def test_a_corrupted_object_fails_and_leaves_the_old_revision(server, passed):
    server.create(REPO, **{"config.json": b"old"})
    before, old = server.repos[REPO].refs["main"], files(server)
    server.fault("^PUT /lfs/", "corrupt")
    with pytest.raises(PushFailed) as caught:
        push(passed, OPTIONS)
    assert str(caught.value) == (
        "org/model: the hub holds other bytes of model.safetensors than those in the manifest; "
        "the old revision was left as it was"
    )
    assert caught.value.exit_code == 6
    assert server.repos[REPO].refs == {"main": before} and files(server) == old


def test_a_corrupted_pull_request_is_closed(server, passed):
    server.fault("^PUT /lfs/", "corrupt")
    with pytest.raises(PushFailed, match="other bytes of model"):
        push(passed, PushOptions(repo=REPO, create_pr=True))
    assert server.repos[REPO].requests[0]["status"] == "closed"
    assert "model.safetensors" not in files(server)


@pytest.mark.parametrize("action", ["drop", 429, 500, 503], ids=str)
@pytest.mark.parametrize(
    "request_line",
    ["^POST /api/repos/create", "/branch/", "/preupload/", "objects/batch", "^PUT /lfs/", "/commit/compress-staging",
     "/commit/main", "^GET .*/tree/", "^GET /api/models/org/model/revision/main"],
    ids=["create", "branch", "preupload", "batch", "upload", "stage", "move", "compare", "head"],
)  # fmt: skip
def test_what_passes_is_tried_again(server, passed, monkeypatch, request_line, action):
    monkeypatch.setattr(hub_errors.time, "sleep", lambda _: None)
    server.fault(request_line, action)
    pushed = push(passed, OPTIONS)
    assert server.faults[0].times == 0
    assert server.repos[REPO].refs["main"] == pushed.commit and files(server).keys() > local(passed).keys()


@pytest.mark.parametrize(
    ("action", "sentence"),
    [
        (401, "401 no; log in with `hf auth login` or set HF_TOKEN"),
        (403, "403 no; your token may not write there: use one with write access to it"),
        (409, "409 no; someone else is changing it: run the same command again"),
        (412, "412 no; it was changed meanwhile: run the same command again"),
        (429, "429 no; the hub asks to slow down: run the same command again later, what was sent is kept"),
        (500, "500 no; the hub has a fault: run the same command again later, what was sent is kept"),
    ],
    ids=lambda value: str(value)[:3],
)
def test_what_stays_wrong_is_one_sentence_and_the_old_revision_stays(server, passed, monkeypatch, action, sentence):
    monkeypatch.setattr(hub_errors.time, "sleep", lambda _: None)
    before = server.create(REPO, **{"config.json": b"old"}).refs["main"]
    server.fault("/commit/", action, times=99, message="no.")
    with pytest.raises(PushFailed) as caught:
        push(passed, OPTIONS)
    assert str(caught.value) == f"org/model was not pushed: {sentence}"
    assert server.repos[REPO].refs["main"] == before


def test_a_line_that_stays_down_is_one_sentence(server, passed, monkeypatch):
    monkeypatch.setattr(hub_errors.time, "sleep", lambda _: None)
    server.fault("^PUT ", "drop", times=99)
    with pytest.raises(PushFailed, match=r"not pushed: the connection failed \(.*\); run the same command again"):
        push(passed, OPTIONS)


def test_a_hub_without_xet_is_said_with_the_way_out(server, passed, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)  # the server has no route for it: 404
    with pytest.raises(PushFailed, match=r"404 .*; this hub takes no Xet uploads: set HF_HUB_DISABLE_XET=1$"):
        push(passed, OPTIONS)
    assert "compress-staging" in str(server.repos[REPO].refs) and "model.safetensors" not in files(server)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ConnectionError("reset by peer"), r"the connection failed \(reset by peer\); run the same command again"),
        (TimeoutError("too slow"), r"the connection failed \(too slow\); run the same command again"),
        (PermissionError("expired"), "expired; log in with `hf auth login` or set HF_TOKEN"),
    ],
    ids=["connection", "time", "login"],
)
def test_what_the_client_of_large_files_raises_is_one_sentence(monkeypatch, error, sentence):
    monkeypatch.setattr(hub_errors.time, "sleep", lambda _: None)
    tries = []

    def send():
        tries.append(1)
        raise error

    with pytest.raises(PushFailed, match=rf"^org/model was not pushed: {sentence}"), hub_errors.explained(REPO):
        hub_errors.patiently(send)
    assert len(tries) == (1 if isinstance(error, PermissionError) else 3)


def test_an_error_of_the_disk_is_not_the_hubs():
    with pytest.raises(OSError, match="full"), hub_errors.explained(REPO):
        raise OSError(28, "the disk is full")


def test_an_interrupted_push_goes_on_where_it_stopped(server, passed, monkeypatch):
    monkeypatch.setattr(hub_errors.time, "sleep", lambda _: None)
    server.fault("/commit/compress-staging", 500, times=3)
    with pytest.raises(PushFailed):
        push(passed, OPTIONS)
    assert server.sent("^PUT ") == 1
    push(passed, OPTIONS)
    assert server.sent("^PUT ") == 1 and "compress-staging" not in str(server.repos[REPO].refs)


def test_a_push_of_somebody_else_meanwhile_is_not_overwritten(server, passed, monkeypatch):
    repo = server.create(REPO, **{"config.json": b"old"})
    commit = repo.commit

    def meanwhile(ref, tree):
        oid = commit(ref, tree)
        if ref.startswith("compress-staging"):
            commit("main", {**repo.tree("main"), "theirs.txt": next(iter(repo.tree("main").values()))})
        return oid

    monkeypatch.setattr(repo, "commit", meanwhile)
    with pytest.raises(PushFailed, match=r"412 .*; it was changed meanwhile"):
        push(passed, OPTIONS)
    assert set(files(server)) == {"config.json", "theirs.txt"}


def test_the_token_is_sent_and_never_shown_or_stored(server, passed, capsys):
    server.fault("/preupload/", 403, message=f"token {TOKEN} may not; Bearer {TOKEN}")
    with pytest.raises(PushFailed) as caught:
        push(passed, OPTIONS)
    assert "[token] may not; [token]" in str(caught.value) and TOKEN not in str(caught.value)
    show(passed, OPTIONS, as_json=True)
    output = capsys.readouterr()
    assert TOKEN not in output.out + output.err
    assert server.tokens == {f"Bearer {TOKEN}"}
    assert not any(TOKEN.encode() in content for content in [*files(server).values(), *local(passed).values()])


def test_a_public_repository_is_not_used_where_a_private_one_is_asked(server, passed):
    server.create(REPO, private=False)
    with pytest.raises(PushFailed, match="exists and is public: make it private in its settings, or leave out private"):
        push(passed, PushOptions(repo=REPO, private=True))
    assert push(passed, OPTIONS).commit and not server.repos[REPO].private


def test_a_public_repository_on_request(server, passed):
    push(passed, PushOptions(repo=REPO, private=False))
    assert not server.repos[REPO].private


def test_without_the_hub_it_says_so(server, passed, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PushFailed, match="HF_HUB_OFFLINE is set, unset it to reach the hub"):
        push(passed, OPTIONS)


def test_a_run_that_will_push_needs_a_login_before_the_work(server, monkeypatch):
    check_login(OPTIONS)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"^push\.repo is org/model and HF_HUB_OFFLINE is set: unset it"):
        check_login(OPTIONS)
    monkeypatch.setattr("compress.hub.get_token", lambda: None)
    with pytest.raises(InputError, match=r"^push\.repo is org/model and there is no login: set HF_TOKEN or run "):
        check_login(OPTIONS)


def test_the_card_on_the_hub_is_merged_and_wins_over_the_local_one(server, passed):
    server.create(REPO, **{"README.md": b"---\nlicense: mit\n---\n\n# Theirs\n\nby hand\n"})
    (passed / "README.md").write_text("# Local\n")
    push(passed, OPTIONS)
    text = files(server)["README.md"].decode()
    assert "license: mit" in text and "by hand" in text and "# Local" not in text
    assert (passed / "README.md").read_text() == "# Local\n"


def test_show_prints_where_it_is(server, passed, capsys):
    assert show(passed, OPTIONS, as_json=False) == 0
    assert capsys.readouterr().out.startswith(f"published org/model at main: {server.url}/org/model/tree/main\n")
    assert show(passed, OPTIONS, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["revision"] == "main"
