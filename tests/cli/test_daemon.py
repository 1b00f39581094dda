"""`blendkv daemon`: what it tells, refuses, and leaves behind. tests/store/daemon runs it as a process."""

from __future__ import annotations

import json
import signal
from contextlib import closing

import pytest

from blendkv.daemon.address import socket_path
from blendkv.daemon.client import DaemonStore
from blendkv.market.policies import POLICIES


@pytest.fixture
def ended(monkeypatch):
    """The signal that ends it comes when what was appended here has been done."""
    steps = []

    def wait(signals):
        assert signals == {signal.SIGTERM, signal.SIGINT}
        for step in steps:
            step()
        return signal.SIGTERM

    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: set())
    monkeypatch.setattr(signal, "sigwait", wait)
    return steps


def test_it_serves_the_store_until_its_end(cli, store, ended):
    seen = []

    def ask():
        with closing(DaemonStore(store, 20.0)) as client:
            seen.append(len(client.ls()))
        result = (store / "daemon.sock").stat().st_mode
        seen.append(result & 0o777)

    ended.append(ask)
    done = cli("daemon", "--store", store, "--memory", "16MB", "--socket-mode", "660", "--metrics-port", 0, "--json")
    assert done.code == 0, done.err
    printed = json.loads(done.out)
    (row,) = printed["rows"]
    assert (printed["command"], row["memory_bytes"], row["disk_bytes"]) == ("daemon", 16_000_000, None)
    assert row["metrics"].startswith("http://127.0.0.1:")
    assert seen == [row["chunks"], 0o660]
    assert seen[0] > 0
    assert not socket_path(store).exists()


def test_a_line_for_people(cli, store, ended):
    done = cli("daemon", "--store", store, "--memory", "16MB", "--disk", "1GB")
    assert (done.code, done.out) == (0, "")
    assert "chunk KVs is open to engines; 16 MB of shared memory" in done.err


def test_store_commands_go_through_it(cli, store, ended):
    shown = []

    def look():
        with closing(DaemonStore(store, 20.0)) as client:
            shown.append(client.daemon_stats().clients)
            shown.append(client.verify().damaged)

    ended.append(look)
    assert cli("daemon", "--store", store, "--memory", "16MB").code == 0
    assert shown == [1, ()]


@pytest.mark.parametrize("policy", POLICIES.names())
def test_every_policy_can_be_chosen_and_is_shown(cli, store, ended, policy):
    shown = []

    def look():
        shown.append(json.loads(cli("store", "stat", "--store", store, "--json").out)["daemon"]["policy"])
        shown.append(f"free, policy {policy}" in cli("store", "stat", "--store", store).out)

    ended.append(look)
    done = cli("daemon", "--store", store, "--memory", "16MB", "--policy", policy)
    assert done.code == 0, done.err
    assert shown == [policy, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "random"], f"unknown eviction policy 'random'; allowed: {', '.join(POLICIES.names())}"),
        (["--socket-mode", "999"], "socket mode '999' is not allowed; give 600, 660 or 666"),
        (["--remote", "ftp://x"], "ftp"),
        (["--remote", "memory://x", "--namespace", "../x"], "namespace '../x'"),
        (["--memory", "much"], "much"),
    ],
)
def test_wrong_options_are_one_line(cli, store, ended, options, message):
    done = cli("daemon", "--store", store, *options)
    assert done.code == 2
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_a_second_daemon_is_refused(cli, store, ended):
    codes = []
    ended.append(lambda: ended.clear())
    ended.insert(0, lambda: codes.append(second()))

    def second():
        from blendkv.daemon.server import Daemon
        from blendkv.errors import InputError

        with pytest.raises(InputError, match="a daemon runs already"):
            Daemon(store, 1 << 20)
        return 2

    assert cli("daemon", "--store", store, "--memory", "16MB").code == 0
    assert codes == [2]
