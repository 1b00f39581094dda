"""Chunk KVs in Redis or Valkey: a hash per chunk, with a field per layer.

The hash is filled under a temporary name, which expires if its writer dies, and renamed when it is whole: a chunk is
seen as a whole or not at all, the first of several writers wins, and the layers of two never mix. One key per chunk
means that Redis evicts and expires chunks, not single layers, whose loss would leave the others of no use. Names share
a hash tag, the chunk key: in a cluster a chunk lies on one node, and all its commands are legal there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.exceptions import OutOfMemoryError, RedisClusterException, RedisError, ResponseError
from redis.retry import Retry

from blendkv.errors import DamagedChunkError, InputError, StoreError, StoreFullError, TierUnavailableError
from blendkv.store.remote import Head, Place, checked_key, is_key, parse_head
from blendkv.store.segments import Packer, Traffic

USERNAME_VARIABLE = "BLENDKV_REDIS_USERNAME"
PASSWORD_VARIABLE = "BLENDKV_REDIS_PASSWORD"
VALUE_LIMIT = 512 << 20
"""Most bytes of a value: Redis's ``proto-max-bulk-len`` unless it is set otherwise."""
_WEEK = 7 * 24 * 3600
_WRITING_TTL = 300  # seconds between two commands of a writer, after which it is taken for dead
_BATCH = 32 << 20  # bytes on their way to the server before its answers are awaited
_HEAD, _WRITING = b"head", b"writing"

# Asked again when the first answer was lost, it answers the same. Fields are counted because the temporary hash may
# have expired or been evicted while it was filled.
_COMMIT = """
if redis.call('HGET', KEYS[2], 'writing') == ARGV[3] then return 1 end
if redis.call('HLEN', KEYS[1]) ~= tonumber(ARGV[1]) then
  redis.call('UNLINK', KEYS[1])
  return -1
end
if redis.call('RENAMENX', KEYS[1], KEYS[2]) == 0 then
  redis.call('UNLINK', KEYS[1])
  return 0
end
redis.call('EXPIRE', KEYS[2], ARGV[2])
return 1
"""
_FORGET = "if redis.call('HGET', KEYS[1], 'writing') == ARGV[1] then return redis.call('UNLINK', KEYS[1]) end return 0"


class RedisTier:
    """Chunk KVs in Redis or Valkey; see `blendkv.store.remote.RemoteTier`.

    Parameters
    ----------
    connect
        Makes the client, at the first call: a cluster's asks the servers for their slots at once.
    folder
        What the names of the keys begin with.
    packer
        Packs the segments.
    ttl
        Seconds that a chunk is kept after its last use.
    """

    name = "redis"

    def __init__(self, connect: Callable[[], Any], folder: str, packer: Packer, ttl: int) -> None:
        self._connect, self._folder, self._packer, self._ttl = connect, folder, packer, ttl
        self._client: Any = None
        self._lock = threading.Lock()

    @classmethod
    def open(cls, place: Place) -> RedisTier:
        """The tier of a ``redis``, ``rediss`` or ``unix`` URL.

        Raises
        ------
        InputError
            If the URL has no host or socket, or an option is out of range.
        """
        url, timeout = place.url, place.limits.deadline_s
        ttl = url.number("ttl", 1, 10**9) or _WEEK
        database = url.number("db", 0, 10**6) or 0
        settings: dict[str, Any] = {
            "username": place.environ.get(USERNAME_VARIABLE) or None,
            "password": place.environ.get(PASSWORD_VARIABLE) or None,
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            # Once more, at once: a connection of the pool may have been closed by a server that has restarted since.
            "retry": Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
        }
        if url.number("cluster", 0, 1):
            return cls(_cluster(place, settings), place.folder, place.packer, ttl)
        if url.scheme == "unix":
            if url.host or not url.path:
                raise InputError(f"{url}: give the socket's absolute path: unix:///PATH")
            settings["unix_socket_path"] = f"/{url.path}"
        else:
            if not url.host or url.path:
                raise InputError(f"{url}: give host and port only, and the database as ?db=N: {url.scheme}://HOST:6379")
            settings |= {"host": url.host, "port": url.port or 6379, "ssl": url.scheme == "rediss"}
        return cls(lambda: redis.Redis(db=database, **settings), place.folder, place.packer, ttl)

    @property
    def traffic(self) -> Traffic:
        """Bytes of segments that were written and read."""
        return self._packer.traffic

    def contains(self, keys: Sequence[str]) -> set[str]:
        """Those of ``keys`` that are there; all are asked for at once."""
        if not keys:
            return set()
        with self._errors() as client:
            pipe = client.pipeline(transaction=False)
            for key in keys:
                pipe.exists(self._place(key))
            return {key for key, there in zip(keys, pipe.execute(), strict=True) if there}

    def head(self, key: str) -> Head | None:
        """The head of the chunk, or None; its time to live starts anew."""
        with self._errors(key) as client:
            pipe = client.pipeline(transaction=False)
            pipe.hget(self._place(key), _HEAD)
            pipe.expire(self._place(key), self._ttl)
            leading = pipe.execute()[0]
        return None if leading is None else parse_head(memoryview(leading), key, self._packer)

    def read(self, head: Head, first: int, count: int) -> list[memoryview]:
        """The bytes of ``count`` layers from layer ``first`` on."""
        fields: list[Any] = [_WRITING, *(str(index) for index in range(first, first + count))]
        with self._errors(head.key) as client:
            writing, *values = client.hmget(self._place(head.key), fields)
        if writing != head.table.writing:
            raise DamagedChunkError(head.key, "missing: evicted, expired or replaced")
        if any(value is None for value in values):
            self._forget(head)
            raise DamagedChunkError(head.key, "missing: a layer is gone")
        return [
            self._packer.unpack(head.key, head.table, first + 1 + place, memoryview(value))
            for place, value in enumerate(values)
        ]

    def put(self, key: str, head: memoryview, layers: Sequence[memoryview]) -> bool:
        """Store a chunk; False if it is there.

        Raises
        ------
        StoreFullError
            If Redis has no memory left and evicts nothing.
        StoreError
            If a layer is larger than a value of Redis may be.
        """
        if self.contains([key]):
            return False
        table, packed = self._packer.pack(key, [head, *layers])
        largest = max(len(data) for data in packed)
        if largest > VALUE_LIMIT:
            raise StoreError(
                f"a layer of chunk KV {key[:12]} has {largest} bytes and Redis takes {VALUE_LIMIT} in one value; use "
                "shorter chunks, zstd, or an object store"
            )
        leading = b"".join([table.encode(), packed[0]])
        named = [(str(index), data) for index, data in enumerate(packed[1:])]
        return self._write(key, table.writing, [(_WRITING, table.writing), (_HEAD, leading), *named])

    def delete(self, key: str) -> bool:
        """Forget a chunk; return whether it was there."""
        with self._errors(key) as client:
            return bool(client.unlink(self._place(key)))

    def keys(self) -> Iterator[str]:
        """The keys of all chunks; a key may come twice."""
        with self._errors() as client:
            for name in client.scan_iter(match=f"{self._folder}:{{*}}", count=1000):
                key = name.decode(errors="replace")[len(self._folder) + 2 : -1]
                if is_key(key):
                    yield key

    def close(self) -> None:
        """Close the connections. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _place(self, key: str) -> str:
        return f"{self._folder}:{{{checked_key(key)}}}"

    def _write(self, key: str, writing: bytes, fields: list[tuple[Any, Any]]) -> bool:
        """Fill a temporary hash and give it its name; return whether that was free."""
        temporary = f"{self._place(key)}:{os.urandom(8).hex()}"
        with self._errors(key) as client:
            try:
                for batch in _batches(fields):
                    # A transaction, so that a server that dies keeps all or nothing; and the expiry right behind the
                    # first field: Redis 7.0 may keep what precedes the tear in its log, and run it later.
                    pipe = client.pipeline(transaction=True)
                    for number, (name, value) in enumerate(batch):
                        pipe.hset(temporary, name, value)
                        if not number:
                            pipe.expire(temporary, _WRITING_TTL)
                    pipe.execute()
                done = client.eval(_COMMIT, 2, temporary, self._place(key), len(fields), self._ttl, writing)
            except OutOfMemoryError:
                client.unlink(temporary)
                raise
        if done < 0:
            raise StoreFullError(
                f"Redis evicted chunk KV {key[:12]} while it was written; give it more memory (maxmemory)"
            )
        return bool(done)

    def _forget(self, head: Head) -> None:
        """Delete what is left of this very writing of a chunk."""
        with self._errors(head.key) as client:
            client.eval(_FORGET, 1, self._place(head.key), head.table.writing)

    @contextmanager
    def _errors(self, key: str = "") -> Iterator[Any]:
        """The client; what it raises, in the store's words."""
        try:
            with self._lock:
                if self._client is None:
                    self._client = self._connect()
                client = self._client
            yield client
        except OutOfMemoryError as error:
            raise StoreFullError(
                "Redis has no memory left; raise maxmemory or set maxmemory-policy allkeys-lru"
            ) from error
        except (RedisError, RedisClusterException, OSError) as error:
            if isinstance(error, ResponseError) and "WRONGTYPE" in str(error):
                raise DamagedChunkError(key, "header: another kind of value") from error
            raise TierUnavailableError(f"Redis: {type(error).__name__}: {str(error)[:300]}") from error


def _cluster(place: Place, settings: dict[str, Any]) -> Callable[[], Any]:
    url = place.url
    if url.scheme == "unix" or not url.host or url.path or "db" in url.options:
        raise InputError(f"{url}: a cluster has host and port, and database 0 only: redis://HOST:6379?cluster=1")
    return lambda: RedisCluster(host=url.host, port=url.port or 6379, ssl=url.scheme == "rediss", **settings)


def _batches(fields: list[tuple[Any, Any]]) -> Iterator[list[tuple[Any, Any]]]:
    batch: list[tuple[Any, Any]] = []
    size = 0
    for field in fields:
        if batch and size + len(field[1]) > _BATCH:
            yield batch
            batch, size = [], 0
        batch.append(field)
        size += len(field[1])
    yield batch
