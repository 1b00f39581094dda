from __future__ import annotations

import codecs
import csv
import json
import os

import pytest

from blendkv.errors import DocumentError
from blendkv.retrieval import load_corpus, source_names


def load(*sources, **options):
    """Documents by id, and the messages of what was skipped."""
    skipped: list[str] = []
    documents = list(load_corpus(sources, on_skip=lambda error: skipped.append(str(error)), **options))
    assert len({d.id for d in documents}) == len(documents)
    for message in skipped:
        assert "\n" not in message
    return {d.id: d for d in documents}, skipped


def one_error(*sources, **options):
    documents, skipped = load(*sources, **options)
    assert not documents
    assert len(skipped) == 1
    return skipped[0]


def test_a_folder_is_read_recursively_sorted_without_hidden_files(tmp_path):
    folder = tmp_path / "docs"
    for name in ["b.txt", "a.md", "sub/c.py", ".hidden", ".git/config", "sub/.x"]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# Text of {name}\n")
    documents, skipped = load(folder)
    assert list(documents) == ["docs/a.md", "docs/b.txt", "docs/sub/c.py"]
    assert not skipped
    assert documents["docs/a.md"].metadata == {"source": "docs", "path": "docs/a.md", "title": "Text of a.md"}
    assert documents["docs/b.txt"].metadata["title"] == "b"
    assert documents["docs/sub/c.py"].text == "# Text of sub/c.py\n"


def test_ids_do_not_depend_on_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("text")
    absolute, _ = load(tmp_path / "docs")
    monkeypatch.chdir(tmp_path)
    relative, _ = load("docs")
    monkeypatch.chdir(tmp_path / "docs")
    here, _ = load(".")
    assert list(absolute) == list(relative) == list(here) == ["docs/a.txt"]


def test_sources_of_one_name_are_told_apart(tmp_path):
    for name in ["x/docs", "y/docs", "y/other"]:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.txt").write_text(name)
    sources = [tmp_path / "x/docs", tmp_path / "y/docs", tmp_path / "y/other", tmp_path / "y" / ".." / "x/docs"]
    documents, skipped = load(*sources)
    assert {key: d.text for key, d in documents.items()} == {
        "x/docs/a.txt": "x/docs",
        "y/docs/a.txt": "y/docs",
        "other/a.txt": "y/other",
    }
    assert not skipped
    assert source_names(sources) == ["x/docs", "y/docs", "other"]


def test_links_are_followed_once(tmp_path):
    folder = tmp_path / "docs"
    (tmp_path / "elsewhere").mkdir()
    folder.mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("a")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "loop").symlink_to(folder)
    (folder / "dangling.txt").symlink_to(tmp_path / "gone")
    documents, skipped = load(folder)
    assert list(documents) == ["docs/linked/a.txt"]
    assert len(skipped) == 1
    assert "dangling.txt: no such file" in skipped[0]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"caf\xc3\xa9\r\nline\rend", "café\nline\nend"),
        (codecs.BOM_UTF8 + b"caf\xc3\xa9", "café"),
        (codecs.BOM_UTF16_LE + "café".encode("utf-16-le"), "café"),
        (codecs.BOM_UTF16_BE + "café".encode("utf-16-be"), "café"),
        (codecs.BOM_UTF32_LE + "café".encode("utf-32-le"), "café"),
        (codecs.BOM_UTF32_BE + "café".encode("utf-32-be"), "café"),
    ],
)
def test_encodings(tmp_path, data, text):
    (tmp_path / "a.txt").write_bytes(data)
    documents, _ = load(tmp_path / "a.txt")
    assert documents["a.txt"].text == text


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"", "the file is empty"),
        ("a.txt", b" \n\t\n", "no text in this file"),
        ("a.txt", b"ELF\0\1\2", "a binary file; text, Markdown, HTML, PDF, JSONL and CSV are allowed"),
        ("a.bin", b"\x89PNG\r\n\x1a\n\0\0", "a binary file"),
        ("a.txt", b"fine \xff fine", "invalid UTF-8 at byte 5; save the file as UTF-8"),
        ("a.txt", codecs.BOM_UTF8 + b"abc\xff", "invalid UTF-8 at byte 6"),
        ("a.txt", codecs.BOM_UTF16_LE + b"a\0b\0\0\xd8", "invalid UTF-16-LE at byte 6"),
        ("a.txt", codecs.BOM_UTF16_LE + b"a\0\0\0", "a binary file"),
        ("a.html", b"<script>x</script>", "no text in this file"),
    ],
)
def test_files_that_are_no_text(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    error = one_error(tmp_path / name)
    assert str(tmp_path / name) in error
    assert message in error


def test_a_large_file_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "large.txt"
    with path.open("wb") as file:
        file.truncate(100 * 2**20)  # one line, and sparse
    monkeypatch.setattr("pathlib.Path.open", lambda *_: pytest.fail("opened"))
    assert "104857600 bytes; at most 33554432 are allowed: split the file" in one_error(path)


def test_missing_and_odd_paths(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.txt").write_text("x")
    assert "no such file or folder; check the path" in one_error(tmp_path / "gone.txt")
    assert "not a regular file" in one_error(tmp_path / "pipe")
    assert "no files in this folder" in one_error(tmp_path / "folder")
    assert "a.txt: has no columns; #COLUMN is for .jsonl" in one_error(f"{tmp_path}/a.txt#body")
    assert "cannot be read (File name too long)" in one_error(tmp_path / ("x" * 300))


def test_an_error_does_not_end_the_others(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    documents, skipped = load(tmp_path / "a.txt", tmp_path / "gone", tmp_path / "b.txt")
    assert list(documents) == ["a.txt", "b.txt"]
    assert len(skipped) == 1


def test_the_caller_may_stop_at_an_error(tmp_path):
    def stop(error):
        raise error

    with pytest.raises(DocumentError, match="no such file"):
        list(load_corpus([tmp_path / "gone"], on_skip=stop))


def test_permission_denied(tmp_path, monkeypatch):
    """By a stand-in, since a super-user may read everything."""
    (tmp_path / "docs" / "locked").mkdir(parents=True)
    for name in ["docs/a.txt", "docs/b.txt", "docs/locked/c.txt"]:
        (tmp_path / name).write_text(name)

    def deny(function, name):
        def guarded(path, *args, **kwargs):
            if str(path).endswith(name):
                raise PermissionError(13, "Permission denied", str(path))
            return function(path, *args, **kwargs)

        return guarded

    monkeypatch.setattr("pathlib.Path.open", deny(type(tmp_path).open, "a.txt"))
    monkeypatch.setattr("os.scandir", deny(os.scandir, "locked"))
    documents, skipped = load(tmp_path / "docs")
    assert list(documents) == ["docs/b.txt"]
    assert "a.txt: no permission to read it; change its mode" in skipped[0]
    assert "locked: the folder cannot be read (Permission denied)" in skipped[1]


def test_a_file_name_that_is_no_utf8(tmp_path):
    folder = os.fsencode(tmp_path / "docs")
    os.mkdir(folder)
    with open(os.path.join(folder, b"caf\xe9.txt"), "w") as file:
        file.write("text")
    documents, _ = load(tmp_path / "docs")
    assert list(documents) == ["docs/caf\\xe9.txt"]
    assert documents["docs/caf\\xe9.txt"].metadata["title"] == "caf\\xe9"


def test_html(tmp_path):
    page = """<!DOCTYPE html><html><head><title> The  page </title><style>p {}</style></head><body>
    <h1>Top <em>level</em></h1><p>One
    paragraph &amp; <a href="x">a link</a>.</p><script>evil()</script><!-- a remark -->
    <h3>Third</h3><ul><li>item one<li>item two</ul>
    <table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table><div>last<br>line</div></body></html>"""
    (tmp_path / "page.html").write_text(page)
    documents, skipped = load(tmp_path / "page.html")
    assert not skipped
    assert documents["page.html"].metadata["title"] == "The page"
    assert documents["page.html"].text == (
        "# Top level\n\nOne paragraph & a link.\n\n### Third\n\n- item one\n- item two\n\na\tb\n1\t2\n\nlast\nline"
    )


def test_html_keeps_preformatted_text_and_its_declared_encoding(tmp_path):
    page = '<meta charset="iso-8859-1"><p>caf\xe9</p><pre>def f():\n    return 1</pre>'
    (tmp_path / "page.htm").write_bytes(page.encode("latin-1"))
    documents, _ = load(tmp_path / "page.htm")
    assert documents["page.htm"].text == "café\n\ndef f():\n    return 1"
    assert documents["page.htm"].metadata["title"] == "page"
    (tmp_path / "page.htm").write_bytes(page.replace("iso-8859-1", "no-such-code").encode("latin-1"))
    assert "invalid UTF-8 at byte" in one_error(tmp_path / "page.htm")


def test_deep_html_does_no_harm(tmp_path):
    (tmp_path / "deep.html").write_text("<div>" * 3000 + "core" + "</div>" * 3000 + "<p>tail</p>")
    documents, skipped = load(tmp_path / "deep.html")
    assert documents or skipped


def test_jsonl(tmp_path):
    rows = [
        {"text": "first", "title": "T", "year": 2020, "ok": True, "none": None, "list": [1], "nan": 1.5},
        {"text": "second", "id": "my-id", "title": "U", "metadata": {"k": ["v"]}, "other": 1},
        {"text": "third", "id": 7, "source": "theirs"},
    ]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join([lines[0], "", *lines[1:]]))
    documents, skipped = load(tmp_path / "rows.jsonl")
    assert not skipped
    assert list(documents) == ["rows.jsonl:1", "rows.jsonl:my-id", "rows.jsonl:7"]
    base = {"source": "rows.jsonl", "path": "rows.jsonl"}
    assert documents["rows.jsonl:1"].metadata == {**base, "title": "T", "year": 2020, "ok": True, "nan": 1.5}
    assert documents["rows.jsonl:my-id"].metadata == {**base, "title": "U", "k": ["v"]}
    assert documents["rows.jsonl:7"].metadata == {**base, "source": "theirs"}


def test_jsonl_errors_have_line_numbers_and_the_rest_is_read(tmp_path):
    lines = [
        b'{"text": "good"}',
        b"{not json}",
        b"[1, 2]",
        b'{"text": 5}',
        b'{"text": "  "}',
        b'{"other": 1}',
        b'{"text": "caf\xff"}',
        b'{"text": "\\ud800"}',
        b'{"text": "x", "id": "same"}',
        b'{"text": "y", "id": "same"}',
        b'{"text": "x", "n": NaN}',
        b"[" * 100_000,
        b'{"text": "' + b"x" * 2_000_000 + b'"}',
        b'{"text": "last"}',
    ]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
    documents, skipped = load(tmp_path / "rows.jsonl", max_document_bytes=1_000_000)
    assert [d.text for d in documents.values()] == ["good", "x", "last"]
    wanted = [
        "line 2: not JSON",
        "line 3: a JSON list; one JSON object per line",
        "row 4: column 'text' holds int; text is allowed",
        "row 5: column 'text' is empty",
        "row 6: no column 'text'; columns there: other",
        "line 7: invalid UTF-8 at byte 13",
        "row 8: not expressible as Unicode",
        "rows.jsonl:same: this id came before",
        "line 11: not JSON (NaN is not a JSON value)",
        "line 12: not JSON",
        "line 13: more than 1000000 bytes",
    ]
    assert len(skipped) == len(wanted)
    for message, part in zip(skipped, wanted, strict=True):
        assert part in message


def test_jsonl_columns(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"body": "a", "text": "t"}\n{"body": "b"}\n')
    documents, _ = load(f"{tmp_path}/rows.jsonl#body")
    assert [d.text for d in documents.values()] == ["a", "b"]
    assert documents["rows.jsonl:1"].metadata["text"] == "t"
    documents, _ = load(f"{tmp_path}#body")
    assert [d.text for d in documents.values()] == ["a", "b"]
    message = one_error(f"{tmp_path}/rows.jsonl#wrong")
    assert "line 1: no column 'wrong'; columns there: body, text: name one with #COLUMN" in message


def test_a_file_name_with_a_number_sign_is_a_file_name(tmp_path):
    (tmp_path / "c#.txt").write_text("sharp")
    documents, _ = load(str(tmp_path / "c#.txt"))
    assert list(documents) == ["c#.txt"]


def test_a_long_jsonl_file_of_short_rows_is_no_large_document(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "short"}\n' * 100)
    documents, skipped = load(tmp_path / "rows.jsonl", max_document_bytes=100)
    assert len(documents) == 100
    assert not skipped


def test_utf16_rows(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes('{"text": "é1"}\n{"text": "é2"}\n'.encode("utf-16"))
    (tmp_path / "rows.csv").write_bytes(codecs.BOM_UTF8 + "text,x\né3,1\n".encode())
    documents, _ = load(tmp_path)
    assert sorted(d.text for d in documents.values()) == ["é1", "é2", "é3"]


def test_csv(tmp_path):
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "title", "text"])
        writer.writerow(["a", "T", "line one\nline, two"])
        writer.writerow(["", "U", "y" * 200_000])
        writer.writerow(["c", "V", ""])
    (tmp_path / "rows.tsv").write_text("text\tn\nhello\t1\n")
    documents, skipped = load(tmp_path / "rows.csv", tmp_path / "rows.tsv")
    assert list(documents) == ["rows.csv:a", "rows.csv:2", "rows.tsv:1"]
    assert documents["rows.csv:a"].text == "line one\nline, two"
    assert documents["rows.csv:a"].metadata == {"source": "rows.csv", "path": "rows.csv", "title": "T"}
    assert documents["rows.tsv:1"].metadata["n"] == "1"
    assert len(skipped) == 1
    assert "row 3: column 'text' is empty" in skipped[0]


@pytest.mark.parametrize(
    ("data", "good", "message"),
    [
        (b"title,body\na,b\n", 0, "header: no column 'text'; columns there: title, body: name one with #COLUMN"),
        (b"text,x\na,1,2\nb,2\n", 1, "row 1: more fields than the 2 of the header"),
        (b'text\nfine\n"never closed\n', 1, "after row 1: not CSV (unexpected end of data)"),
        (b"text\nfine\nbad \xff\n", 0, "invalid UTF-8 at byte 14"),
        (codecs.BOM_UTF8 + b"text\n\xff\n", 0, "invalid UTF-8 at byte 8"),
    ],
)
def test_csv_errors(tmp_path, data, good, message):
    (tmp_path / "rows.csv").write_bytes(data)
    documents, skipped = load(tmp_path / "rows.csv")
    assert len(documents) == good
    assert len(skipped) == 1
    assert message in skipped[0]


def test_a_row_over_the_limit(tmp_path):
    (tmp_path / "rows.csv").write_text("text\n" + "x" * 50 + "\nok\n")
    documents, skipped = load(tmp_path / "rows.csv", max_document_bytes=20)
    assert list(documents) == ["rows.csv:2"]
    assert "row 1: 50 bytes of text; at most 20 are allowed" in skipped[0]


def test_python_reference():
    documents, skipped = load("python-reference")
    assert not skipped
    assert len(documents) > 60
    assert documents["python-reference/with"].metadata == {"source": "python-reference", "title": "with"}
    assert "context manager" in documents["python-reference/with"].text
    assert source_names(["python-reference"]) == ["python-reference"]
