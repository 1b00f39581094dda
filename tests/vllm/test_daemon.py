"""vLLM on a store that a daemon serves: the same answers; without it full prefill, counted; then blends again."""

from __future__ import annotations

import gc
import signal
import threading
from dataclasses import replace
from functools import partial

import pytest
from blending import blending as start
from blending import close
from daemon_process import STUCK_DISK, DaemonProcess, eventually

from blendkv.blend import parse_mode
from blendkv.daemon.client import DaemonStore
from blendkv.daemon.opening import open_store
from blendkv.daemon.reader import LentReader
from blendkv.store import KVStore

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.filterwarnings("ignore")]
MODES = ("reuse", "blend:head_query@0.4")
SIZES = (33, 70, 45)
DEADLINE = 3.0
"""Of the connector's client here: a loaded machine must not look like a dead daemon."""
HOW = {"boundaries": "own", "content": None}


def answers(running, salt):
    """By mode, and how chunks are found."""
    return {
        (mode, how): running.ask(mode=mode, salt=f"{salt}-{how}", segments=segments)
        for mode in MODES
        for how, segments in HOW.items()
    }


@pytest.fixture(scope="module")
def seeded():
    """One prompt for all engines of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLENDKV_TEST_SEED", "11")
        patch.setattr("blendkv.engines.vllm.stores.open_store", partial(open_store, deadline=DEADLINE))
        yield


@pytest.fixture(scope="module")
def expected(seeded, tmp_path_factory):
    """What vLLM answers over a store in its own process."""
    with start(tmp_path_factory.mktemp("embedded"), sizes=SIZES) as running:
        running.ask(mode="reuse", salt="fill")
        running.store.flush()
        assert isinstance(running.store, KVStore)
        return answers(running, "embedded")


class Served:
    """A vLLM, and the daemon of its store, which can be replaced."""

    def __init__(self, running, daemon):
        self.running, self.daemon = running, daemon

    def begin(self, **options):
        self.daemon = DaemonProcess(self.running.folder / "store", **options)
        eventually(lambda: self.running.store.up)

    def lose(self):
        self.daemon.kill()
        eventually(lambda: not self.running.store.up)


@pytest.fixture(scope="module")
def served(expected, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    daemon = DaemonProcess(folder / "store")
    daemon.kill(signal.SIGSTOP)  # an engine that starts meanwhile must not fail, nor open the store itself
    with start(folder, sizes=SIZES) as running:
        assert isinstance(running.store, DaemonStore)
        assert not running.store.up
        daemon.kill(signal.SIGCONT)
        eventually(lambda: running.store.up)
        running.ask(mode="reuse", salt="fill")
        running.store.flush()
        place = Served(running, daemon)
        yield place
    place.daemon.close()


def agree(found, expected):
    return all(close(found[name], expected[name]) for name in expected)


def test_the_answers_are_those_of_the_embedded_store(served, expected):
    found = answers(served.running, "served")
    assert served.running.told["outcome"] == "blended"
    assert agree(found, expected)
    assert not all(close(found[name], served.running.ask()) for name in found), "a full prefill would pass as well"


@pytest.mark.parametrize("how", HOW)
def test_without_its_daemon_it_prefills_and_says_so(served, expected, how):
    running = served.running
    plain = running.ask()
    before = running.scheduler.outcomes["store"]
    served.lose()
    for number in range(2):
        assert close(running.ask(mode="reuse", salt=f"lost-{how}-{number}", segments=HOW[how]), plain)
        assert (running.told["outcome"], running.told["reason"]) == ("full", "store")
    assert running.scheduler.outcomes["store"] == before + 2
    served.begin()
    assert close(running.ask(mode="reuse", salt=f"again-{how}", segments=HOW[how]), expected["reuse", how])
    assert running.told["outcome"] == "blended"


def test_a_daemon_that_hangs_is_not_waited_for(served, expected):
    running = served.running
    plain = running.ask()
    served.daemon.kill(signal.SIGSTOP)
    for number in range(3):
        assert close(running.ask(mode="reuse", salt=f"hung-{number}"), plain)
        assert running.told["reason"] == "store"
    served.daemon.kill(signal.SIGCONT)
    eventually(lambda: running.store.up)
    assert close(running.ask(mode="reuse", salt="goes-on"), expected["reuse", "boundaries"])
    assert running.told["outcome"] == "blended"


@pytest.mark.parametrize("how", HOW)
def test_a_daemon_killed_while_it_loads(served, expected, monkeypatch, how):
    """Where a chunk is known by its tokens it is computed instead; what was only found in the store is prefilled."""
    running, read, killed = served.running, LentReader._parts, []
    plain = running.ask()
    served.lose()
    served.begin(before=STUCK_DISK.format(layer=2))

    def parts(self, index):
        if index >= 2 and not killed:
            killed.append(self.key)
            served.daemon.kill()
        return read(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(LentReader, "_parts", parts)
        found = running.ask(mode="reuse", salt=f"during-{how}", segments=HOW[how])
    assert killed
    if how == "boundaries":
        assert running.told["outcome"] == "blended"
        assert close(found, expected["reuse", how])
    else:
        assert (running.told["outcome"], running.told["reason"]) == ("full", "store")
        assert close(found, plain)
    served.begin()
    assert agree(answers(running, f"after-{how}"), expected)


def test_what_a_blend_has_read_is_given_back_at_its_end(served):
    """At once, not when cycles are collected: until then it could not be evicted."""
    running = served.running
    running.ask(mode="reuse", salt="back-1", segments=HOW["boundaries"])
    gc.collect()
    gc.disable()
    try:
        running.ask(mode="blend:head_query@0.3", salt="back-2", segments=HOW["boundaries"])
        assert running.told["outcome"] == "blended"
        with DaemonStore(running.folder / "store", DEADLINE) as client:
            eventually(lambda: client.daemon_stats().loans == 0)
    finally:
        gc.enable()


def test_a_torch_client_and_vllm_share_a_daemon(served, expected):
    """Chunks that another process's model computed are blended, while that one reads and puts."""
    running = served.running
    fingerprint, recipe = running.worker.blender().fingerprint, running.library.recipe
    kvs = [replace(kv, fingerprint=fingerprint, recipe=recipe) for kv in running.world.chunks]
    ending, reads, wrong = threading.Event(), [], []
    with DaemonStore(running.folder / "store", DEADLINE) as client:
        for kv in kvs:
            client.remove(kv.key)
            client.put(kv)

        def work():
            while not ending.is_set():
                for kv in kvs:
                    reader = client.get(kv.key, kv.token_ids)
                    same = reader is not None and all(
                        (found == put).all() for found, put in zip(reader.layer(1), kv.layer(1), strict=True)
                    )
                    (reads if same else wrong).append(kv.key)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            found = answers(running, "shared")
        finally:
            ending.set()
            thread.join()
        assert client.daemon_stats().clients == 2
    assert (bool(reads), wrong) == (True, [])
    assert running.told["outcome"] == "blended"
    assert {name: answer[0] for name, answer in found.items()} == {name: a[0] for name, a in expected.items()}
    token, log_prob = running.embedded(parse_mode(MODES[1]).settings)
    assert found[MODES[1], "boundaries"][0][0] == token
    assert abs(found[MODES[1], "boundaries"][1][0] - log_prob) < 1e-3
