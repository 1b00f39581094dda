"""URLs of remote tiers: strict, and never with a secret in them."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from blendkv.errors import InputError
from blendkv.store.guard import Limits
from blendkv.store.remote import open_remote
from blendkv.store.remote_url import parse_url

SCHEMES = ("redis", "rediss", "unix", "s3", "gs", "az", "memory", "file", "x")
OPTIONS = ("zstd=3", "ttl=5", "db=1", "cluster=1", "encrypt=0", "zstd=", "ttl=-1")
PIECES = st.lists(
    st.one_of(
        st.sampled_from([f"{scheme}://" for scheme in SCHEMES]),
        st.sampled_from(OPTIONS),
        st.sampled_from(["host", "bucket", "6379", "99999", "%00", "%ff", "::1", "..", *":/?&=@#%[]"]),
        st.text(max_size=6),
    ),
    max_size=8,
).map("".join)


@given(text=PIECES)
@example(text="redis://[::1]:6379")
@example(text="redis://host:port")
@example(text="redis://[")
@example(text="s3://bucket/\ud800")
@example(text="x://" + "a" * 3000)
def test_any_text_is_taken_apart_or_refused(text: str) -> None:
    try:
        url = parse_url(text)
    except InputError:
        return
    assert "@" not in url.host
    assert ".." not in url.path.split("/")
    assert str(url).startswith(f"{url.scheme}://")


@given(text=PIECES)
def test_any_text_opens_a_tier_or_is_refused(text: str) -> None:
    with contextlib.suppress(InputError):
        open_remote(text, environ={}).close()  # nothing is sent


@pytest.mark.parametrize(
    "url",
    ["redis://user:hunter2@host", "redis://:hunter2@host:6379", "s3://id:hunter2@bucket/x", "rediss://hunter2@h?ttl=5"],
)
def test_secrets_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InputError, match="environment") as caught:
        open_remote(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://host/x", "allowed: redis://"),
        ("host", "redis://HOST"),
        ("redis://host/0", r"\?db=N"),
        ("redis://", "host and port"),
        ("redis://host:99999", "redis://HOST"),
        ("redis://host?ttl=0", "from 1 to"),
        ("redis://host?zstd=20", "from 1 to 19"),
        ("redis://host?zstd=x", "whole number"),
        ("redis://host?color=red", "allowed: zstd, encrypt, ttl"),
        ("redis://host?ttl=1&ttl=2", "twice"),
        ("redis://host?cluster=1&db=2", "database 0"),
        ("unix://host/x", "unix:///PATH"),
        ("unix://", "unix:///PATH"),
        ("s3:///prefix", "s3://BUCKET"),
        ("s3://bucket?ttl=5", "allowed: zstd, encrypt"),
        ("s3://bucket/a/../b", "plain one"),
        ("file://host/x", "file:///FOLDER"),
        ("memory://", "memory://NAME"),
        ("memory://x?encrypt=1", "BLENDKV_ENCRYPTION_KEY"),
        ("memory://x y", "spaces"),
    ],
)
def test_what_is_wrong_is_said(url: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        open_remote(url, environ={})


@pytest.mark.parametrize("name", ["", "/", "a//b", "../x", "a b", "é", "a/", "{x}", "*", "x" * 65, "a=b"])
def test_namespaces_that_could_reach_others_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="namespace"):
        open_remote("memory://x", namespace=name, environ={})


def test_limits_are_checked() -> None:
    for name in ("deadline_s", "put_s", "threads", "failures", "first_back_off_s", "longest_back_off_s"):
        for value in (0, -1, float("nan")):
            with pytest.raises(InputError, match=name):
                Limits(**{name: value})


def test_clouds_open_without_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    for url, name in (("az://container/prefix", "az"), ("gs://bucket", "gs"), ("s3://bucket/prefix", "s3")):
        tier = open_remote(url, environ={})
        assert tier.name == name
        tier.close()


def test_remote_tiers_live_without_torch() -> None:
    program = "import sys, blendkv.store.redis, blendkv.store.objects; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", program], check=False).returncode == 0
