from __future__ import annotations

import io

import pytest
from pypdf import PdfReader, PdfWriter
from reportlab.pdfgen import canvas

from blendkv.retrieval import load_corpus


def pdf(*pages: str, title: str | None = None) -> bytes:
    buffer = io.BytesIO()
    drawing = canvas.Canvas(buffer)
    if title:
        drawing.setTitle(title)
    for text in pages:
        drawing.drawString(72, 720, text)
        drawing.showPage()
    drawing.save()
    return buffer.getvalue()


def locked(data: bytes, user: str, owner: str) -> bytes:
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(data)))
    writer.encrypt(user, owner, algorithm="AES-256")
    buffer = io.BytesIO()
    writer.write(buffer)
    return buffer.getvalue()


def load(path, **options):
    errors: list[str] = []
    documents = list(load_corpus([path], on_skip=lambda error: errors.append(str(error)), **options))
    return documents, errors


@pytest.fixture
def path(tmp_path):
    return tmp_path / "paper.pdf"


def test_pages_are_joined(path):
    path.write_bytes(pdf("Page one.", "Page two.", title="A paper"))
    documents, errors = load(path)
    assert not errors
    assert documents[0].text == "Page one.\n\nPage two."
    assert documents[0].metadata["title"] == "A paper"


def test_an_empty_user_password_is_none(path):
    path.write_bytes(locked(pdf("Readable."), user="", owner="secret"))
    documents, _ = load(path)
    assert documents[0].text == "Readable."


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (locked(pdf("Hidden."), user="secret", owner="secret"), "protected by a password; save a copy without one"),
        (pdf("Damaged.")[:300], "damaged PDF"),
        (b"%PDF-1.7\n" + b"\x00garbage\xff" * 50, "damaged PDF"),
        (b"no pdf at all", "damaged PDF"),
        (pdf(""), "PDF without text (1 pages of images?); run OCR on it first"),
        (pdf("word " * 30), "more than 100 characters of text"),
    ],
    ids=["password", "truncated", "garbage", "text", "images", "long"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pdfs_that_cannot_be_read(path, data, message, monkeypatch):
    path.write_bytes(data)
    if "characters" in message:
        # The file is larger than its text: only the text is to exceed the limit.
        monkeypatch.setattr("blendkv.retrieval.formats.read_bytes", lambda path, limit: data)
    documents, errors = load(path, max_document_bytes=100 if "characters" in message else 2**20)
    assert not documents
    assert len(errors) == 1
    assert message in errors[0]
    assert "paper.pdf" in errors[0]
    assert "\n" not in errors[0]
