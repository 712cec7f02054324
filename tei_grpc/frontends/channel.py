"""One end of the socket pair between a front-end and the process with the model."""

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tei_grpc.frontends.messages import Message, decode, encode

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 18


@dataclass(slots=True)
class _Chunk:
    """Bytes to send; `file` is the content of a file that goes with the first of them."""

    data: bytearray
    file: memoryview | None = None


class Channel:
    """Sends and receives messages on the event loop, in order; what is sent in one turn of the loop goes out at once.

    What does not fit a slot goes along as a file in memory: it is gone when neither side holds it, however it ended.
    """

    def __init__(self, end: socket.socket, receive: Callable[[Message], None], on_end: Callable[[], None]) -> None:
        """Hand every message to `receive`; call `on_end` once, when the other side is gone."""
        self._socket = end
        self._receive = receive
        self._on_end = on_end
        self._is_open = True
        self._is_full = False  # the other side has to read before more can be sent
        self._incoming = bytearray()
        self._files: deque[int] = deque()
        self._chunks: deque[_Chunk] = deque()
        self._loop = asyncio.get_running_loop()
        end.setblocking(False)
        self._loop.add_reader(end, self._read)

    def send(self, message: Message, file: memoryview | None = None) -> None:
        """Send a message, soon; into the void once the other side is gone."""
        if not self._is_open:
            return
        if not self._chunks:
            self._loop.call_soon(self._write)
        if file is not None or not self._chunks or self._chunks[-1].file is not None:
            self._chunks.append(_Chunk(bytearray(), file))
        self._chunks[-1].data += encode(message)

    def read_file(self, target: memoryview) -> None:
        """Fill `target` from the file that came with the message that is being received."""
        file = self._files.popleft()
        try:
            left = target.cast("B")
            while left and (size := os.readv(file, [left])):
                left = left[size:]
        finally:
            os.close(file)

    def close(self) -> None:
        """Send what is left, as far as it goes without waiting, and close this end."""
        if self._is_open:
            self._write()
        if self._is_open:  # to write may have failed
            self._close()

    def _write(self) -> None:
        while self._is_open and self._chunks:
            chunk = self._chunks[0]
            try:
                sent = self._send(chunk)
            except BlockingIOError:
                self._is_full = True
                self._loop.add_writer(self._socket, self._write)
                return
            except ConnectionError:  # `_read` will see the end, too, after what is still to be read
                self._chunks.clear()
                break
            except OSError as error:  # no memory, or no file descriptor, for a file
                self._give_up(error)
                return
            chunk.file = None
            del chunk.data[:sent]
            if not chunk.data:
                self._chunks.popleft()
        if self._is_open and self._is_full:
            self._is_full = False
            self._loop.remove_writer(self._socket)

    def _send(self, chunk: _Chunk) -> int:
        if chunk.file is None:
            return self._socket.send(chunk.data)
        file = os.memfd_create("tei-arrays", os.MFD_CLOEXEC)
        try:
            left = chunk.file.cast("B")
            while left:
                left = left[os.write(file, left) :]
            os.lseek(file, 0, os.SEEK_SET)
            return socket.send_fds(self._socket, [chunk.data], [file])
        finally:
            os.close(file)

    def _read(self) -> None:
        try:
            data, files, flags, _ = socket.recv_fds(self._socket, READ_BYTES, 1)
        except BlockingIOError:
            return
        except ConnectionError:
            data, files, flags = b"", [], 0
        self._files.extend(files)
        if flags & socket.MSG_CTRUNC:
            self._give_up(OSError("no file descriptor is left"))
            return
        if not data:
            self._close()
            self._on_end()
            return
        self._incoming += data
        for message in decode(self._incoming):
            self._receive(message)

    def _give_up(self, error: OSError) -> None:
        """End it: what would be missing is an answer, for which a call would wait for ever."""
        logger.error("Front-end and model lose each other: %s", error)
        self._close()
        self._on_end()

    def _close(self) -> None:
        self._is_open = False
        self._chunks.clear()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        while self._files:
            os.close(self._files.popleft())
