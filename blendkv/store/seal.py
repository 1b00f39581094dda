"""Encryption at rest: AES-256-GCM of one segment of a stored chunk KV.

A sealed segment is the nonce (12 bytes, random), the ciphertext, and the tag (16 bytes). The chunk's key, the number of
the segment and the scope (whose chunks these are) are authenticated with it: a segment that was moved to another
chunk, place or tenant does not open. One key is good for 2^32 segments (NIST SP 800-38D, 8.3), about 10^8 chunks of an
8B model; then take a new one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

from blendkv.errors import DamagedChunkError, InputError, MissingDependencyError
from blendkv.secret import SECRET_BYTES, secret_from

KEY_VARIABLE = "BLENDKV_ENCRYPTION_KEY"
"""The environment variable with the key: 32 bytes in base64."""
OVERHEAD = 28
"""Bytes by which a sealed segment is longer than what it holds."""
_NONCE_BYTES = 12


class Sealer:
    """Seals and opens segments with one key.

    Parameters
    ----------
    secret
        The key, 32 bytes.
    scope
        Whose chunks these are, and in what format they are kept; a segment opens in its own scope only.

    Raises
    ------
    InputError
        If the key has another length.
    MissingDependencyError
        If ``cryptography`` is not installed.
    """

    def __init__(self, secret: bytes, scope: str = "") -> None:
        if len(secret) != SECRET_BYTES:
            raise InputError(f"the encryption key has {len(secret)} bytes; give {SECRET_BYTES} random ones")
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise MissingDependencyError(
                "encryption needs 'cryptography'; run: pip install 'blendkv[remote]'"
            ) from error
        self._cipher = AESGCM(secret)
        self._scope = scope
        self.key_id = hashlib.blake2b(secret, digest_size=8, person=b"blendkv key id").hexdigest()
        """16 hex digits that tell keys apart and say nothing else of them."""

    @classmethod
    def from_environment(cls, scope: str = "", environ: Mapping[str, str] = os.environ) -> Sealer | None:
        """The sealer of the key in ``BLENDKV_ENCRYPTION_KEY``; None if it is not set.

        Raises
        ------
        InputError
            If it is not 32 bytes in base64; the message does not repeat it.
        """
        secret = secret_from(KEY_VARIABLE, environ)
        return None if secret is None else cls(secret, scope)

    def seal(self, key: str, segment: int, data: bytes | memoryview) -> bytes:
        """Encrypt segment ``segment`` of the chunk under ``key``."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, data, self._context(key, segment))

    def open(self, key: str, segment: int, sealed: bytes | memoryview) -> bytes:
        """Inverse of :meth:`seal`.

        Raises
        ------
        DamagedChunkError
            If it was altered or moved, or was sealed with another key.
        """
        from cryptography.exceptions import InvalidTag

        view = memoryview(sealed)
        if view.nbytes < OVERHEAD:
            raise DamagedChunkError(key, f"truncated: segment {segment} has {view.nbytes} bytes")
        try:
            return self._cipher.decrypt(bytes(view[:_NONCE_BYTES]), view[_NONCE_BYTES:], self._context(key, segment))
        except InvalidTag:
            raise DamagedChunkError(key, f"sealed: segment {segment} was altered, or sealed with another key") from None

    def _context(self, key: str, segment: int) -> bytes:
        # Lengths in front: no two different contexts have the same bytes.
        scope, name = self._scope.encode(), key.encode()
        sizes = b"".join(len(part).to_bytes(4, "little") for part in (scope, name))
        return b"blendkv seal 1" + sizes + scope + name + segment.to_bytes(4, "little")
