"""Checkpoints at a URL: in memory, in another folder, and in a server that stands in for S3."""

import shutil
import uuid

import pytest

fsspec = pytest.importorskip("fsspec")

from megatron.optimus.checkpoint import CheckpointError, Manifest, Saver, load, load_manifest  # noqa: E402
from megatron.optimus.checkpoint.mirror import Mirror, fetch_newest  # noqa: E402
from megatron.optimus.platform.ranks import Ranks  # noqa: E402
from tests.unit.checkpoint.helpers import CONFIG, assert_holds, owned, whole_requests, whole_state  # noqa: E402


def saved(root, step):
    header = Manifest("full", step, step, CONFIG, {}, {}, {})
    saver = Saver(root, asynchronous=False, tokenizer={"tokenizer.json": b"{}"})
    return saver.start(owned(whole_state(step)), header, retain=1)[-1].path


def upload(mirror, path):
    """Uploads and waits; returns what went wrong."""
    failures = []
    mirror.start(path, failures.append)
    mirror.close()
    return failures


@pytest.fixture(scope="module")
def s3():
    """The URL of an empty bucket."""
    pytest.importorskip("s3fs")
    server_of = pytest.importorskip("moto.server").ThreadedMotoServer
    server = server_of(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        }.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
        yield "s3://bucket/run"
    server.stop()


@pytest.fixture(params=["memory", "file", "s3"])
def url(request, tmp_path):
    if request.param == "s3":
        return request.getfixturevalue("s3")
    return f"file://{tmp_path}/mirror" if request.param == "file" else f"memory://{uuid.uuid4().hex}"


def test_what_is_uploaded_comes_back_to_an_empty_folder(tmp_path, url):
    """The newest whole one, with its tokenizer; one whose manifest, or a part of a file, is missing is not whole."""
    mirror, ranks = Mirror(url), Ranks.alone()
    assert fetch_newest(url, tmp_path / "new", ranks) is None
    for step in (1, 2, 3):
        path = saved(tmp_path / "root", step)
        assert upload(mirror, path) == []
    fs, root = fsspec.core.url_to_fs(url)
    place = f"{root}/step-00000003/node-00000-0.safetensors"
    fs.pipe_file(place, fs.cat_file(place)[:-1])
    fs.rm_file(f"{root}/step-00000002/manifest.json")
    assert mirror.newest() == "step-00000001"
    found = fetch_newest(url, tmp_path / "new", ranks)
    assert found == str(tmp_path / "new" / "step-00000001") and fetch_newest(url, tmp_path / "new", ranks) is None
    requests = whole_requests(whole_state(1))
    load(tmp_path / "new" / "step-00000001", requests)
    assert_holds(requests, whole_state(1))
    assert (tmp_path / "new" / "step-00000001" / "tokenizer" / "tokenizer.json").read_bytes() == b"{}"
    assert upload(mirror, path) == [] and mirror.newest() == "step-00000003"


def test_an_upload_that_ends_in_the_midst_is_not_whole(tmp_path, monkeypatch):
    """Also where another run's checkpoint of that step was there, whose files are replaced one by one."""
    url = f"file://{tmp_path}/mirror"
    mirror = Mirror(url)
    first = saved(tmp_path / "a", 4)
    assert upload(mirror, first) == [] and mirror.newest() == "step-00000004"
    other = saved(tmp_path / "b", 4)
    (other / "tokenizer" / "tokenizer.json").write_bytes(b"[]")
    (other / "manifest.json").write_bytes((other / "manifest.json").read_bytes() + b"\n")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", lambda source, out, length: out.write(source.read(10)))
        [failure] = upload(mirror, other)
    assert "step-00000004 could not be uploaded to file://" in failure and "has 10 bytes there" in failure
    assert mirror.newest() is None
    with pytest.raises(CheckpointError, match="cannot be downloaded"):
        mirror.fetch("step-00000004", tmp_path / "c")
    assert not list(tmp_path.glob("c/*"))


def test_what_does_not_come_whole_is_not_committed(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/mirror"
    mirror = Mirror(url)
    assert upload(mirror, saved(tmp_path / "a", 4)) == []
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", lambda source, out, length: out.write(source.read(10)))
        with pytest.raises(CheckpointError, match=r"cannot be downloaded: .*has 10 bytes, the manifest says"):
            mirror.fetch("step-00000004", tmp_path / "c")
    assert not list(tmp_path.glob("c/*"))
    (tmp_path / "mirror" / "step-00000004").rename(tmp_path / "mirror" / "step-00000009")
    with pytest.raises(CheckpointError, match="is of a 'full' checkpoint of step 4"):
        mirror.fetch("step-00000009", tmp_path / "c")
    assert mirror.newest() is None and not list(tmp_path.glob("c/*"))


def test_an_upload_goes_on_when_its_checkpoint_is_deleted(tmp_path, monkeypatch):
    mirror = Mirror(f"file://{tmp_path}/mirror")
    path, failures = saved(tmp_path / "root", 5), []
    size = (path / "node-00000-0.safetensors").stat().st_size
    copy, calls = shutil.copyfileobj, []

    def slow(*args):
        if not calls:
            shutil.rmtree(path)
            mirror.start(path, failures.append)  # meanwhile
        calls.append(args)
        copy(*args)

    monkeypatch.setattr(shutil, "copyfileobj", slow)
    mirror.start(path, failures.append)
    mirror.close()
    assert failures == [
        f"step-00000005 is not uploaded to file://{tmp_path}/mirror, which still receives the one before"
    ]
    assert load_manifest(tmp_path / "mirror" / "step-00000005").files["node-00000-0.safetensors"] == size


def test_a_mirror_that_cannot_work_says_why(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere://x.*Protocol not known"):
        Mirror("nowhere://x")
    (tmp_path / "file").touch()
    mirror = Mirror(f"file://{tmp_path}/file")
    [failure] = upload(mirror, saved(tmp_path / "root", 1))
    assert "could not be uploaded" in failure


def test_steps_that_went_wrong_are_withdrawn(tmp_path, url):
    """A start on an empty disk goes on from the newest one before them; uploaded again, a step counts again."""
    mirror, ranks = Mirror(url), Ranks.alone()
    paths = {
        step: shutil.copytree(saved(tmp_path / str(step), step), tmp_path / f"step-{step:08}") for step in (2, 4, 6)
    }
    for path in paths.values():
        assert upload(mirror, path) == []
    mirror.withdraw_after(2)
    assert mirror.newest() == "step-00000002"
    assert fetch_newest(url, tmp_path / "disk", ranks).endswith("step-00000002")
    assert upload(mirror, paths[4]) == [] and mirror.newest() == "step-00000004"
