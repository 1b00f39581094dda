"""The crash run: a daemon and clients under load, killed and stopped at random moments, and a checker of all they say.

``python soak.py --points 200 --seed 1`` (or SOAK_POINTS, SOAK_SEED); `make soak` does that, the tests run a short form.

Rounds of 20 points, each on a store of its own: without a limit, with a disk limit, and on a full device (a small
tmpfs, which takes root). In each round two engines, a putter and an ingest work (soak_client.py) while the daemon or
one of them is killed with SIGKILL, or stopped and then continued or killed. What must hold:

- what is read is the truth, at once and for as long as it is kept, or a miss, or `UnavailableChunkError`;
- what was put is there after every restart (without a limit), whole, and no file is without a row;
- no request waits much longer than the deadline, whatever the daemon does; clients find it again;
- when all clients have ended nothing is lent, and what is not free in shared memory is the memory tier's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from soak_client import chunk, same

from blendkv.config import parse_bytes
from blendkv.daemon.client import DaemonStore
from blendkv.store import KVStore

NUMBERS, DEADLINE, MARGIN = 150, 0.5, 8.0
"""Chunks there are; the clients' deadline, and what a request may take beyond it on a loaded machine, in seconds."""
MEMORY, LIMIT, DEVICE = "2MB", "8MB", "12m"
LIMITS = ("none", "disk", "device")
_WAIT = 60.0  # seconds after which something that must come is missing


class Fault(AssertionError):
    """What must never happen has happened."""


@dataclass
class Client:
    """What the driver knows of a client."""

    name: str
    kind: str
    pid: int = 0
    alive: bool = True
    served: float = 0.0
    removing: int | None = None
    stops: list[tuple[float, float]] = field(default_factory=list)


class Clients:
    """The process that forks the clients, and a thread that hears what they say."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("soak_client.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.all: dict[str, Client] = {}
        self.stored: set[int] = set()
        self.unsure: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.faults: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._hear)
        self._thread.start()

    def begin(self):
        """Another round: nothing is stored."""
        with self._lock:
            self.all, self.stored, self.unsure = {}, set(), set()

    def start(self, kind, root, seed):
        """Start a client; return when it runs."""
        client = Client(f"{kind}-{seed}", kind)
        with self._lock:
            self.all[client.name] = client
        self._process.stdin.write(f"{client.name} {kind} {root} {seed} {NUMBERS} {DEADLINE}\n")
        self._process.stdin.flush()
        until(lambda: client.pid, f"{client.name} does not start")

    def living(self):
        with self._lock:
            return [client for client in self.all.values() if client.alive and client.pid]

    def certain(self):
        """Numbers of chunks that must be there."""
        with self._lock:
            return sorted(self.stored - self.unsure)

    def kill(self, client, number=signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(client.pid, number)
        if number == signal.SIGKILL:
            client.alive = False

    def close(self):
        for client in self.living():
            self.kill(client)
        self._process.stdin.close()
        self._process.wait(30)
        self._thread.join()
        self._process.stdout.close()

    def _hear(self):
        for line in self._process.stdout:
            name, word, *rest = line.split(maxsplit=2)
            with self._lock:
                client = self.all.get(name)
                if client is not None:
                    self._take(client, word, rest[0].strip() if rest else "")

    def _take(self, client, word, value):
        self.counts[f"{client.kind} {word}"] += 1
        if word == "pid":
            client.pid = int(value)
        elif word == "ok":
            when, calls = value.split()
            client.served = float(when)
            self.counts[f"{client.kind} served"] += int(calls)
        elif word == "put":
            self.stored.add(int(value))
        elif word == "removing":  # who dies now leaves it open whether, and when, it is removed
            self.unsure.add(int(value))
            self.stored.discard(int(value))
        elif word == "removed":
            self.unsure.discard(int(value))
        elif word == "took":
            self._took(client, *value.split())
        elif word == "ended":
            client.alive = False
        elif word in ("failed", "refused"):
            self.faults.put(f"{client.name} {word}: {value}")

    def _took(self, client, what, begun, ended):
        """A request was slow: was it the client itself that was stopped?"""
        begun, ended = float(begun), float(ended)
        stopped = sum(max(0.0, min(ended, stop) - max(begun, start)) for start, stop in client.stops)
        if ended - begun - stopped > DEADLINE + MARGIN:
            self.faults.put(f"{client.name}: {what} took {ended - begun - stopped:.1f} s")


class Server:
    """`blendkv daemon`, again and again on one store."""

    def __init__(self, root, options):
        self.root, self._options = root, options
        self.start()

    def start(self):
        code = "from blendkv.cli.main import main; main()"
        options = ["daemon", "--store", str(self.root), "--memory", MEMORY, "--json", *self._options]
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        line = self.process.stdout.readline()
        if not line:
            raise Fault(f"the daemon does not start: {self.process.communicate()[1][-2000:]}")
        self.ready = json.loads(line)
        self._said: list[str] = []
        self._thread = threading.Thread(target=lambda: self._said.extend(self.process.stderr))
        self._thread.start()
        self.since = time.monotonic()

    def kill(self, number=signal.SIGKILL):
        self.process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            code = self.process.wait(_WAIT)
            self._thread.join()
            self.process.stdout.close()
            self.process.stderr.close()
            if number == signal.SIGTERM and code != 0:
                raise Fault(f"the daemon ended with {code} on SIGTERM")
            if any("unforeseen" in line or "Traceback" in line for line in self._said):
                raise Fault("the daemon said: " + "".join(self._said)[-3000:])


class Round:
    """One store, its daemon, and four clients."""

    def __init__(self, clients, rng, root, limit):
        self.clients, self.rng, self.root, self.limit = clients, rng, root, limit
        clients.begin()
        if limit != "none":
            self._fill()
        self.server = Server(root, ["--disk", LIMIT] if limit == "disk" else [])
        for kind in ("engine", "engine", "putter", "ingest"):
            self._new(kind)

    def _fill(self):
        """So much that every put evicts something from the first one on."""
        with KVStore.open(
            self.root, memory_bytes=0, disk_bytes=parse_bytes(LIMIT) if self.limit == "disk" else None
        ) as store:
            for number in range(NUMBERS):
                store.put(chunk(number))
            self._count_evictions(store.stat(), "filled")

    def _count_evictions(self, stat, who):
        for tier in stat.tiers:
            for why, count in tier.evictions.items():
                self.clients.counts[f"{who}: evicted from {tier.name} for {why}"] += count

    def _new(self, kind):
        self.clients.start(kind, self.root, self.rng.randrange(1 << 30))

    def strike(self):
        """Kill or stop something at a random moment, and set it right again."""
        time.sleep(self.rng.uniform(0, 0.25))
        if self.rng.random() < 0.5:
            self._strike_daemon(self.rng.choice(["kill", "stop", "stop, kill"]))
        else:
            self._strike_client(self.rng.choice(self.clients.living()), self.rng.choice(["kill", "stop", "stop, kill"]))
        self.heed()

    def _strike_daemon(self, how):
        if "stop" in how:
            self.server.kill(signal.SIGSTOP)
            time.sleep(self.rng.choice([0.05, 0.3, 2.5 * DEADLINE]))
            if how == "stop":
                self.server.kill(signal.SIGCONT)
                return
        self.server.kill()
        if self.rng.random() < 0.4:
            self.check_files()
        time.sleep(self.rng.choice([0, 0.2]))
        self.server.start()

    def _strike_client(self, client, how):
        if "stop" in how:
            begun = time.monotonic()
            self.clients.kill(client, signal.SIGSTOP)
            time.sleep(self.rng.choice([0.05, 0.5, 1.5]))
            client.stops.append((begun, time.monotonic() + 0.2))
            if how == "stop":
                self.clients.kill(client, signal.SIGCONT)
                return
        self.clients.kill(client)
        self._new(client.kind)

    def heed(self):
        """Raise what the clients found."""
        if not self.clients.faults.empty():
            raise Fault(self.clients.faults.get())

    def check_files(self):
        """While no daemon runs: open the store here. What was put is there, whole; no file is without a row."""
        with KVStore.open(self.root, memory_bytes=0) as store:
            self._check_stored(store)
            files = {path.stem for path in (self.root / "kv").rglob("*") if path.is_file()}
            rows = {info.key for info in store.ls()}
            if files != rows:
                raise Fault(f"{len(files - rows)} files without a row, {len(rows - files)} rows without a file")
            if damaged := store.verify().damaged:
                raise Fault(f"damaged: {damaged}")

    def _check_stored(self, store):
        for number in self.clients.certain() if self.limit == "none" else ():
            kv = chunk(number)
            reader = store.get(kv.key, kv.token_ids)
            if reader is None:
                raise Fault(f"chunk {number} was put and is not there")
            if not all(same(reader.layer(index), kv.layer(index)) for index in range(kv.layers)):
                raise Fault(f"chunk {number} is another")

    def end(self):
        """All clients find the daemon again; when they have ended, all is given back and everything is there."""
        living, since = self.clients.living(), max(self.server.since, time.monotonic())
        until(
            lambda: all(client.served > since for client in living) or not self.clients.faults.empty(),
            lambda: f"not served again: {[c.name for c in living if c.served <= since]}",
        )
        self.heed()
        for client in living:
            self.clients.kill(client, signal.SIGTERM)
        until(lambda: not self.clients.living() or not self.clients.faults.empty(), "clients do not end")
        self.heed()
        with DaemonStore(self.root, 20.0) as store:
            self._check_at_rest(store)
            self._check_stored(store)
        self.server.kill(signal.SIGTERM)
        self.check_files()

    def _check_at_rest(self, store):
        def at_rest():
            stats = store.daemon_stats()
            memory = stats.store.tiers[0]
            return (stats.loans, stats.clients, stats.loading) == (0, 1, 0) and (
                stats.free_bytes + memory.bytes == memory.limit
            )

        until(at_rest, lambda: f"not at rest: {store.daemon_stats()}")
        stats = store.daemon_stats().store
        self._count_evictions(stats, "daemon")
        if stats.discarded or stats.collision or stats.tiers[1].damaged:
            raise Fault(f"chunks were dropped or mixed up: {stats}")
        if stats.tiers[1].limit is not None and stats.tiers[1].bytes > stats.tiers[1].limit:
            raise Fault(f"more than the limit: {stats.tiers[1]}")

    def close(self):
        with contextlib.suppress(Fault):
            if self.server.process.poll() is None:
                self.server.kill()


@contextlib.contextmanager
def folder(limit):
    """A place for a store; a small device of its own for ``device``."""
    place = Path(tempfile.mkdtemp(prefix="blendkv-soak-"))
    if limit == "device":
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DEVICE}", "tmpfs", str(place)], check=True)
    try:
        yield place / "store"
    finally:
        if limit == "device":
            subprocess.run(["umount", "-l", str(place)], check=True)
        shutil.rmtree(place, ignore_errors=True)


def can_mount():
    """Whether this process may mount a small device."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError), folder("device"):
        return True
    return False


def until(condition, what):
    """Wait until something is so."""
    end = time.monotonic() + _WAIT
    while not condition():
        if time.monotonic() > end:
            raise Fault(what() if callable(what) else what)
        time.sleep(0.01)


def run(points, seed, limits, per_round):
    """All rounds; returns what was counted."""
    rng = random.Random(seed)
    clients = Clients()
    try:
        done = 0
        while done < points:
            limit = limits[done // per_round % len(limits)]
            with folder(limit) as root:
                running = Round(clients, rng, root, limit)
                try:
                    for _ in range(min(per_round, points - done)):
                        running.strike()
                        done += 1
                    running.end()
                finally:
                    running.close()
            print(f"{done} points, {limit}", flush=True)
        return clients.counts
    finally:
        clients.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=int(os.environ.get("SOAK_POINTS", "200")))
    seed = os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(1 << 30)
    parser.add_argument("--seed", type=int, default=int(seed))
    parser.add_argument("--limits", default=",".join(LIMITS), help="what the rounds run with, of none, disk, device")
    parser.add_argument("--per-round", type=int, default=20, help="points in a round")
    options = parser.parse_args()
    print("seed", options.seed, flush=True)
    limits = options.limits.split(",")
    if "device" in limits and not can_mount():
        print("no right to mount a small device: left out")
        limits.remove("device")
    for what, count in sorted(run(options.points, options.seed, limits, options.per_round).items()):
        print(f"{count:8} {what}")


if __name__ == "__main__":
    main()
