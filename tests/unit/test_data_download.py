"""Finding, fetching and refusing source files, against an HTTP server on this machine."""

import hashlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shardlab.data.download import UnreachableError, download
from shardlab.data.sources import SourceFile, decoded_lines, fetch, find, verify
from shardlab.errors import ShardlabError

CONTENT = b"id\tdocument\tlabel\n" * 1000
OTHER = CONTENT.replace(b"label", b"lebal")

ANSWERS = {
    # path: status, declared length, body
    "/good": (200, len(CONTENT), CONTENT),
    "/truncated": (200, len(CONTENT), CONTENT[:100]),
    "/slow": (200, len(CONTENT), CONTENT),
    "/short": (200, 100, CONTENT[:100]),
    "/long": (200, len(CONTENT) + 1, CONTENT + b"!"),
    "/other": (200, len(CONTENT), OTHER),
    "/missing": (404, 0, b""),
    "/broken": (500, 0, b""),
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a server that answers as ANSWERS says; /slow and /silent take their time."""

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep({"/slow": 0.6, "/silent": 2.0}.get(self.path, 0.0))
            status, length, body = ANSWERS.get(self.path, ANSWERS["/missing"])
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    monkeypatch.setenv("no_proxy", "*")
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as running:
        running.daemon_threads = True
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SHARDLAB_DATA", raising=False)


def published(*mirrors: str) -> SourceFile:
    return SourceFile("some.txt", "some", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), mirrors, instead="knit")


@pytest.mark.parametrize("bad", ["/missing", "/broken", "/truncated", "/short", "/long", "/other", "/silent"])
def test_the_next_mirror_serves_what_the_first_does_not(server: str, bad: str, tmp_path: Path) -> None:
    target = tmp_path / "some.txt"
    began = time.monotonic()
    download(published(server + bad, f"{server}/good"), target, patience=1.0)
    assert target.read_bytes() == CONTENT
    assert time.monotonic() - began < 1.0


def test_a_slow_mirror_has_all_of_the_patience_though_others_were_asked(server: str, tmp_path: Path) -> None:
    download(published(f"{server}/slow", f"{server}/missing"), tmp_path / "some.txt", patience=1.0)
    assert (tmp_path / "some.txt").read_bytes() == CONTENT


REFUSED = [
    # mirror, what the error says of it
    ("/missing", "HTTP 404"),
    ("/truncated", "ended after 100 of 18000 bytes"),
    ("/short", "ended after 100 of 18000 bytes"),
    ("/long", "more than the 18000 bytes"),
    ("/other", f"another file: sha256 {hashlib.sha256(OTHER).hexdigest()}"),
    ("/silent", "no answer in 0.3 s"),
]


@pytest.mark.parametrize(("bad", "reason"), REFUSED)
def test_a_wrong_download_leaves_nothing_that_is_taken_for_the_file(
    server: str, bad: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UnreachableError, match=reason):
        download(published(server + bad), tmp_path / "some.txt", patience=0.3)
    assert [path.name for path in tmp_path.glob("some.txt*")] == ["some.txt.lock"]


def test_what_a_killed_download_left_is_removed(server: str, tmp_path: Path) -> None:
    (tmp_path / "some.txt.part-1").write_bytes(CONTENT[:5])
    download(published(f"{server}/good"), tmp_path / "some.txt", patience=1.0)
    assert not list(tmp_path.glob("*.part-*"))


def test_a_refused_connection_and_an_unknown_host_fail_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:9: .*; nowhere\.invalid: "):
        download(published("http://127.0.0.1:9/x", "http://nowhere.invalid/x"), tmp_path / "some.txt", patience=1.0)
    assert time.monotonic() - began < 1.5


def test_the_error_names_every_place_and_every_way_out(server: str) -> None:
    with pytest.raises(ShardlabError) as raised:
        fetch("some", [published(f"{server}/missing", f"{server}/other")], {}, patience=1.0)
    text = str(raised.value)
    for part in ("some.txt", "$SHARDLAB_DATA (not set)", "cache", "404", "another file", "dataset.path", "or knit"):
        assert part in text
    assert "\n" not in text


def test_places_are_searched_in_their_order(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = published(f"{server}/good")
    monkeypatch.setenv("SHARDLAB_DATA", str(tmp_path / "shared"))
    assert find("some", [file], None) == {}

    fetched = fetch("some", [file], {}, patience=1.0)
    assert fetched == find("some", [file], None) == {"some.txt": file.cached}

    for place in (tmp_path / "shared" / "some", tmp_path / "mine"):
        place.mkdir(parents=True)
        (place / "some.txt").write_bytes(CONTENT)
    assert find("some", [file], None) == {"some.txt": tmp_path / "shared" / "some" / "some.txt"}
    assert find("some", [file], str(tmp_path / "mine")) == {"some.txt": tmp_path / "mine" / "some.txt"}


def test_a_path_that_lacks_a_file_is_refused_though_the_file_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDLAB_DATA", str(tmp_path))
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "some.txt").write_bytes(CONTENT)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ShardlabError, match=r"dataset\.path=.*empty has no some\.txt"):
        find("some", [published()], str(tmp_path / "empty"))
    with pytest.raises(ShardlabError, match="is not a folder"):
        find("some", [published()], str(tmp_path / "nothing"))
    beside = replace(published(), in_path=False)
    assert find("some", [beside], str(tmp_path / "empty")) == {"some.txt": tmp_path / "some" / "some.txt"}


def test_another_file_is_refused_after_its_format_was_read(tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_bytes(OTHER)
    with pytest.raises(ShardlabError, match=r"some\.txt is another file than the published .* sha256 .*, expected"):
        verify("some", published(), tmp_path / "some.txt", lambda path: None)

    def complain(path: Path) -> None:
        raise ShardlabError("line 7: label is '2'")

    with pytest.raises(ShardlabError, match="line 7"):
        verify("some", published(), tmp_path / "some.txt", complain)
    (tmp_path / "some.txt").write_bytes(CONTENT)
    verify("some", published(), tmp_path / "some.txt", complain)


def test_lines_end_at_newlines_alone_and_must_be_utf8(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text("a\u2028b\x0bc\nd\n", encoding="utf-8")
    assert decoded_lines("some", path) == ["a\u2028b\x0bc", "d"]
    path.write_bytes("fine\n영화\n".encode() + "영화\n".encode("cp949"))
    with pytest.raises(ShardlabError, match=r"dataset some: some\.txt line 3: not UTF-8"):
        decoded_lines("some", path)
    path.write_bytes(b"")
    with pytest.raises(ShardlabError, match="is empty"):
        decoded_lines("some", path)
