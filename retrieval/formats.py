"""Reading one file into text: plain text and Markdown, HTML, PDF. Wrong files get one clear line each."""

from __future__ import annotations

import codecs
import io
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from bs4 import BeautifulSoup, NavigableString
from bs4.dammit import EncodingDetector
from pypdf import PdfReader

from blendkv.errors import DocumentError

KNOWN_FORMATS = "text, Markdown, HTML, PDF, JSONL and CSV are allowed"

# UTF-32's little-endian mark begins with UTF-16's: the longer ones come first.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


def shown(path: str | Path) -> str:
    """Return a path as printable text; bytes of a name that are no UTF-8 are written as escapes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def open_file(path: Path, limit: int | None) -> BinaryIO:
    """Open a regular, non-empty file of at most ``limit`` bytes (None: of any size) for reading.

    Raises
    ------
    DocumentError
        If the file is missing, no regular file, empty, too large, or not permitted.
    """
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise DocumentError(f"{shown(path)}: not a regular file; name a file or a folder")
        if not info.st_size:
            raise DocumentError(f"{shown(path)}: the file is empty; remove it or fill it")
        if limit is not None and info.st_size > limit:
            raise DocumentError(
                f"{shown(path)}: {info.st_size} bytes; at most {limit} are allowed: split the file, or raise the "
                "limit (max-document-bytes)"
            )
        return path.open("rb")
    except FileNotFoundError:
        raise DocumentError(f"{shown(path)}: no such file or folder; check the path") from None
    except PermissionError:
        raise DocumentError(f"{shown(path)}: no permission to read it; change its mode or run as its owner") from None
    except OSError as error:
        raise DocumentError(f"{shown(path)}: cannot be read ({error.strerror}); check the path and the disk") from error


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the bytes of a file of at most ``limit`` bytes; its size is checked before it is read.

    Raises
    ------
    DocumentError
        As ``open_file``.
    """
    with open_file(path, limit) as file:
        return file.read(limit)


def mark_of(data: bytes) -> tuple[bytes, str]:
    """Return the byte order mark that ``data`` begins with, and its encoding; ``(b"", "utf-8")`` without one."""
    return next(((mark, name) for mark, name in _MARKS if data.startswith(mark)), (b"", "utf-8"))


def decode(data: bytes, name: str, declared: str | None = None) -> str:
    r"""Decode UTF-8 (or ``declared``), or what a byte order mark says; line ends become ``"\n"``.

    Raises
    ------
    DocumentError
        If the bytes are not text, or not valid in their encoding; the message has the byte offset.
    """
    mark, encoding = mark_of(data)
    if declared and not mark:
        encoding = declared
    try:
        text = data[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        if b"\0" in data and not mark:
            raise binary_error(name) from None
        offset = error.start + len(mark)
        raise DocumentError(
            f"{name}: invalid {encoding.upper()} at byte {offset}; save the file as UTF-8 (for instance with iconv)"
        ) from None
    if "\0" in text:
        raise binary_error(name)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def binary_error(name: str) -> DocumentError:
    """Return the error for bytes that are no text."""
    return DocumentError(f"{name}: a binary file; {KNOWN_FORMATS}: convert it first")


def read_text(path: Path, limit: int) -> tuple[str, str | None]:
    """Read plain text or Markdown as it is. Returns the text and, for Markdown, its first heading as title."""
    text = decode(read_bytes(path, limit), shown(path))
    heading = None
    if path.suffix.lower() in (".md", ".markdown"):
        heading = re.search(r"^#{1,6}[ \t]+(.+?)[ \t#]*$", text, re.MULTILINE)
    return text, heading[1] if heading else None


_DROPPED = ("script", "style", "noscript", "template", "head", "svg", "iframe")
_LINES = ("br", "tr", "li", "dt", "dd", "option")
_BLOCKS = (
    *("p", "div", "section", "article", "header", "footer", "main", "nav", "aside", "ul", "ol", "dl", "table"),
    *("blockquote", "pre", "figure", "figcaption", "form", "fieldset", "details", "summary", "address", "hr"),
)


def read_html(path: Path, limit: int) -> tuple[str, str | None]:
    """Read HTML as text: headings become ``# `` lines, scripts and styles go. Returns text and title."""
    data = read_bytes(path, limit)
    declared = EncodingDetector.find_declared_encoding(data, is_html=True)
    source = decode(data, shown(path), declared if declared and _known_encoding(declared) else None)
    soup = BeautifulSoup(source, "lxml")
    title = " ".join(soup.title.get_text().split()) if soup.title else ""
    for element in soup.find_all(_DROPPED):
        element.decompose()
    for string in soup.find_all(string=True):
        if type(string) is not NavigableString:
            string.extract()
        elif not string.find_parent(("pre", "textarea")):
            string.replace_with(re.sub(r"\s+", " ", string))
    for heading in soup.find_all(re.compile(r"^h[1-6]$")):
        heading.insert_before("\n\n")
        heading.insert(0, "#" * int(heading.name[1]) + " ")
        heading.insert_after("\n\n")
    for block in soup.find_all(_BLOCKS):
        block.insert_before("\n\n")
        block.insert_after("\n\n")
    for line in soup.find_all(_LINES):
        line.insert_before("\n- " if line.name == "li" else "\n")
    for cell in soup.find_all(("td", "th")):
        cell.insert_after("\t")
    text = re.sub(r"[ \t]+\n", "\n", soup.get_text())
    text = re.sub(r"\n +(?=\S)", "\n", text) if not soup.find("pre") else text
    return re.sub(r"\n{3,}", "\n\n", text).strip(), title or None


def _known_encoding(name: str) -> bool:
    try:
        codecs.lookup(name)
    except LookupError:
        return False
    return True


def read_pdf(path: Path, limit: int) -> tuple[str, str | None]:
    """Read the text of every page of a PDF, joined by blank lines. Returns text and title.

    Raises
    ------
    DocumentError
        If the file needs a password, is damaged, has no text, or more than ``limit`` bytes of it.
    """
    data = read_bytes(path, limit)
    pages: list[str] = []
    size = 0
    try:
        reader = PdfReader(io.BytesIO(data))
        # Many PDFs are encrypted with an empty password: anybody may read them.
        if reader.is_encrypted and not reader.decrypt(""):
            raise DocumentError(f"{shown(path)}: protected by a password; save a copy without one")
        for page in reader.pages:
            pages.append(page.extract_text().strip())
            size += len(pages[-1])
            if size > limit:
                raise DocumentError(f"{shown(path)}: more than {limit} characters of text; split the file")
        title = reader.metadata.title if reader.metadata else None
    except DocumentError:
        raise
    except Exception as error:  # a damaged file makes pypdf raise nearly anything
        raise DocumentError(
            f"{shown(path)}: damaged PDF ({type(error).__name__}: {error}); print it to a new PDF and try that"
        ) from error
    text = "\n\n".join(page for page in pages if page)
    if not text:
        raise DocumentError(f"{shown(path)}: PDF without text ({len(pages)} pages of images?); run OCR on it first")
    return text, str(title) if title else None


READERS: Mapping[str, Callable[[Path, int], tuple[str, str | None]]] = {
    ".html": read_html,
    ".htm": read_html,
    ".xhtml": read_html,
    ".pdf": read_pdf,
}
"""Readers by suffix, in lower case: ``reader(path, limit)`` gives text and title. ``read_text`` has all the others."""
