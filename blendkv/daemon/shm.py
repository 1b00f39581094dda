"""Memory that is handed to another process. Linux only.

A `Parcel` is sealed, so that its content cannot change under the reader. A `Buffer` stays with both sides and is
written again and again: only its size is sealed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref

from blendkv.errors import StoreError

_SIZED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_SHRINK") else 6
_SEALED = _SIZED | getattr(fcntl, "F_SEAL_WRITE", 8)


def new_memory(name: str, size: int) -> int:
    """A descriptor of ``size`` bytes of shared memory whose size cannot change.

    Raises
    ------
    StoreError
        If the system has none.
    """
    if not hasattr(os, "memfd_create"):
        raise StoreError("this system has no memfd; the daemon needs Linux: open the store without it")
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise StoreError(f"no shared memory: {error.strerror}; raise the limit of open files") from error
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZED)
    except OSError as error:
        os.close(fd)
        raise StoreError(f"no shared memory of {size} bytes: {error.strerror}") from error
    return fd


class Parcel:
    """Memory on its way to another process. `create`, fill `writable`, `seal`, and send ``fd``; or `received`.

    The descriptor is closed with the object; views stay valid.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self._closer = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, size: int) -> Parcel:
        """Memory of ``size`` bytes, 1 or more; `StoreError` if there is none."""
        return cls(new_memory("blendkv-parcel", size), size)

    @classmethod
    def received(cls, fd: int) -> Parcel:
        """Take over a descriptor from another process; closes it if it is refused.

        Raises
        ------
        StoreError
            If it is not sealed memory: its content or its size could change under the reader.
        """
        parcel = cls(fd, 0)
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            parcel.size = os.fstat(fd).st_size
        except OSError as error:
            raise StoreError(f"the descriptor is not shared memory ({error.strerror})") from error
        if seals & _SEALED != _SEALED or not parcel.size:
            raise StoreError("the shared memory is not sealed, or empty; seal it before it is handed over")
        return parcel

    def writable(self) -> memoryview:
        """Map it to be filled, before it is sealed; release the view."""
        return memoryview(mmap.mmap(self.fd, self.size))

    def view(self) -> memoryview:
        """Map it to be read."""
        return memoryview(mmap.mmap(self.fd, self.size, access=mmap.ACCESS_COPY))

    def seal(self) -> None:
        """Make the content final.

        Raises
        ------
        StoreError
            If it is still mapped for writing.
        """
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALED)
        except OSError as error:
            raise StoreError(f"shared memory cannot be sealed while it is mapped for writing ({error})") from error

    def close(self) -> None:
        """Close the descriptor."""
        self._closer()


class Buffer:
    """Memory that two processes map, one to write and one to read, again and again. Its size cannot change.

    What is read from it may change at any moment: copy it first, then look at the copy.
    """

    def __init__(self, fd: int, size: int, mapped: mmap.mmap) -> None:
        self.fd = fd
        self.size = size
        self._map = memoryview(mapped)
        self._closer = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, size: int) -> Buffer:
        """Memory of ``size`` bytes, 1 or more, to write; `StoreError` if there is none."""
        fd = new_memory("blendkv-put", size)
        return cls(fd, size, mmap.mmap(fd, size))

    @classmethod
    def received(cls, fd: int, most: int) -> Buffer:
        """Take over a descriptor from another process, to read; closes it if it is refused.

        Raises
        ------
        StoreError
            If it is not memory whose size is fixed (a page that goes would end this process), or has not 1 to ``most``
            bytes.
        """
        try:
            seals, size = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size
            if seals & _SIZED != _SIZED:
                raise StoreError("the size of the shared memory can change; seal it before it is handed over")
            if not 0 < size <= most:
                raise StoreError(f"shared memory of {size} bytes; 1 to {most} are allowed")
            return cls(fd, size, mmap.mmap(fd, size, access=mmap.ACCESS_READ))
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError):
                raise StoreError(f"the descriptor is not shared memory ({error.strerror})") from error
            raise

    def view(self) -> memoryview:
        """Its bytes."""
        return self._map
