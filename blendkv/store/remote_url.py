"""URLs of remote tiers: parsed strictly, and never with a password in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from blendkv.errors import InputError

_MOST_CHARACTERS = 2048
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class RemoteUrl:
    """The parts of ``scheme://host:port/path?options``; ``path`` is decoded and without its leading slash."""

    scheme: str
    host: str
    port: int | None
    path: str
    options: Mapping[str, str]

    def __str__(self) -> str:
        port = "" if self.port is None else f":{self.port}"
        return f"{self.scheme}://{self.host}{port}/{self.path}"

    def check_options(self, *allowed: str) -> None:
        """Raise `InputError` if there is an option other than ``allowed``."""
        for name in self.options:
            if name not in allowed:
                raise InputError(f"{self}: unknown option {name!r}; allowed: {', '.join(allowed)}")

    def number(self, name: str, least: int, most: int) -> int | None:
        """The whole number of an option; None if it is not given.

        Raises
        ------
        InputError
            If it is something else, or not from ``least`` to ``most``.
        """
        text = self.options.get(name)
        if text is None:
            return None
        if not re.fullmatch(r"[0-9]{1,12}", text) or not least <= int(text) <= most:
            raise InputError(f"{self}: {name}={text}: give a whole number from {least} to {most}")
        return int(text)


def parse_url(url: str) -> RemoteUrl:
    """Take a remote tier's URL apart.

    Raises
    ------
    InputError
        If it is none, or holds a user name or a password: those belong in the environment. The message repeats neither.
    """
    if len(url) > _MOST_CHARACTERS or _CONTROL.search(url) or " " in url:
        raise InputError("a remote tier's URL has no spaces or control characters and at most 2048 characters")
    try:
        parts = urlsplit(url)
        host, port, secret = parts.hostname or "", parts.port, "@" in parts.netloc
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query), errors="strict")
        path = unquote(parts.path, errors="strict").removeprefix("/")
    except ValueError as error:
        raise InputError("not a URL of a remote tier; give one like redis://HOST:6379 or s3://BUCKET/PREFIX") from error
    if secret:
        raise InputError(
            f"a {parts.scheme} URL with a user name or password; leave them out and set them in the environment, see "
            "docs/remote.md"
        )
    if not parts.scheme or parts.fragment or "://" not in url:
        raise InputError(f"{url!r} is no URL of a remote tier; give one like redis://HOST:6379 or s3://BUCKET/PREFIX")
    if len(dict(pairs)) != len(pairs):
        raise InputError(f"{parts.scheme}://{host}: an option is given twice; give it once")
    if _CONTROL.search(path) or ".." in path.split("/"):
        raise InputError(f"{parts.scheme}://{host}: the path has '..' or control characters; give a plain one")
    return RemoteUrl(parts.scheme, host, port, path, dict(pairs))
