"""What a caller of the API says before it is passed on is passed on, too."""

from __future__ import annotations

import asyncio
import socket

from valved.rpc.front import EARLY_BYTES, Crowd, Front, Places

PLACES = Places(per_user=8, others=64, own=64)


class Reads:
    """A transport as before Python 3.11.3: paused as it was made, it reads all the same."""

    def __init__(self, peer):
        self.peer, self.is_aborted, self.is_read = peer, False, False

    def get_extra_info(self, name):
        return self.peer

    def pause_reading(self):
        pass

    def resume_reading(self):
        self.is_read = True

    def is_closing(self):
        return self.is_aborted

    def abort(self):
        self.is_aborted = True

    close = abort


def early(tmp_path, *pieces):
    async def run():
        seen, path = [], tmp_path / "behind"

        async def echo(reader, writer):
            seen.append(await reader.read(EARLY_BYTES))
            writer.close()

        behind = await asyncio.start_unix_server(echo, path)
        front = Front(tmp_path / "front", path, Crowd("connections", PLACES))
        await front.start(0o600, -1)
        outer = front._server._protocol_factory()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            transport = Reads(ours)
            outer.connection_made(transport)
            for piece in pieces:
                outer.data_received(piece)
            await outer._joining
            while not (seen or transport.is_aborted):
                await asyncio.sleep(0)
        await front.stop_listening()
        await front.close()
        behind.close()
        return b"".join(seen), transport

    return asyncio.run(run())


def test_what_comes_before_a_caller_is_passed_on_is_never_lost(tmp_path):
    seen, transport = early(tmp_path, b"PRI * HTTP/2.0", b"\r\n")

    assert seen == b"PRI * HTTP/2.0\r\n"
    assert transport.is_read


def test_a_caller_never_fills_memory_before_it_is_passed_on(tmp_path):
    seen, transport = early(tmp_path, b"x" * EARLY_BYTES, b"x")

    assert transport.is_aborted
    assert not seen
