# SPDX-License-Identifier: Apache-2.0
"""A stand-in of NCCL for the strict device: a backend of torch.distributed whose groups have two ranks.

As NCCL it has no tags, one order, a stream of its own for each group, and a wait that makes the current stream wait. A rank that is lost
is waited for until the group is aborted; then bytes that have not come are those that were there. It refuses tags, tensors of the host,
messages in another order or direction, and two ranks on a device. The first rank of a group sends, the second one receives.
"""
import os
import pickle
import socket
import struct
import threading

import torch
import torch.distributed as dist

NAME = "strict_channels"
HEADER = struct.Struct("<q")
opened = []  # the names of groups that this process has opened, in order
_streams = []  # of groups that are closed


def uuid():
    """What the device of this process is called: each has its own, or all have one."""
    return str(os.getpid()) if os.environ.get("STRICT_CHANNELS") == "own" else "one"


def register():
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, Group, devices=["strict"])


class Group:
    def __init__(self, store, rank, size, timeout):
        assert size == 2
        self._rank, self._stream = rank, None
        self._changed = threading.Condition()
        self._aborted, self._arrived, self._posted = False, {}, 0
        store.set(f"device/{rank}", uuid())
        if store.get(f"device/{1 - rank}").decode() == uuid():
            raise RuntimeError("Duplicate device detected: two ranks on a device")
        if rank == 0:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                listener.settimeout(timeout.total_seconds())
                store.set("port", str(listener.getsockname()[1]))
                self._line = listener.accept()[0]
        else:
            self._line = socket.create_connection(("127.0.0.1", int(store.get("port"))), timeout.total_seconds())
            self._line.settimeout(None)
            threading.Thread(target=self._read, daemon=True).start()
        opened.append((rank, store))

    def send(self, tensors, to, tag):
        [tensor] = tensors
        self._check(tensor, tag, self._rank == 0 and to == 1)
        with self._own_stream(tensor):
            content = torch.ops.strict_device.send(tensor)
        frame = pickle.dumps((tensor.dtype, tuple(tensor.shape), content.numpy().tobytes()))
        try:
            self._line.sendall(HEADER.pack(len(frame)) + frame)
        except OSError:
            pass  # the other rank is lost, which NCCL does not say
        return Work(self, tensor, None)

    def recv(self, tensors, source, tag):
        [tensor] = tensors
        self._check(tensor, tag, self._rank == 1 and source == 0)
        with self._own_stream(tensor):
            torch.ops.strict_device.receive(tensor)
        self._posted += 1
        return Work(self, tensor, self._posted - 1)

    def abort(self):
        with self._changed:
            self._aborted = True
            self._changed.notify_all()
        self.shutdown()

    def shutdown(self):
        self._line.close()
        if self._stream is not None:
            _streams.append(self._stream)
            self._stream = None

    # --- Inside. ---

    def _check(self, tensor, tag, right):
        if self._aborted:
            raise RuntimeError("the group was aborted")
        if tensor.device.type != "strict" or tag != 0 or not right:
            raise RuntimeError(f"a group sends tensors of the device in one direction without tags, not of {tensor.device} with tag {tag}")

    def _own_stream(self, tensor):
        if self._stream is None:
            self._stream = _streams.pop() if _streams else torch.Stream(tensor.device)
        self._stream.wait_stream(torch.accelerator.current_stream(tensor.device))
        return self._stream

    def _event(self, tensor):
        event = torch.Event(tensor.device)
        event.record(self._stream)
        return event

    def _read(self):
        with self._line.makefile("rb") as file:
            for number in range(10**9):
                header = file.read(HEADER.size)
                content = file.read(HEADER.unpack(header)[0]) if len(header) == HEADER.size else b""
                if not content:
                    return
                with self._changed:
                    self._arrived[number] = pickle.loads(content)
                    self._changed.notify_all()

    def take(self, number):
        """The message of this number, or None once the group is aborted."""
        with self._changed:
            self._changed.wait_for(lambda: self._aborted or number in self._arrived)
            return self._arrived.pop(number, None)


class Work:
    """Keeps the tensor until the wait."""

    def __init__(self, group, tensor, number):
        self._group, self._tensor, self._number, self._event = group, tensor, number, group._event(tensor)

    def wait(self):
        tensor, self._tensor = self._tensor, None
        if tensor is None:
            return
        message = self._group.take(self._number) if self._number is not None else None
        if message is not None:
            dtype, shape, content = message
            if (dtype, shape) != (tensor.dtype, tuple(tensor.shape)):
                raise RuntimeError(f"a message of {shape} in {dtype} where {tuple(tensor.shape)} in {tensor.dtype} are received: another order")
            torch.ops.strict_device.arrive(tensor, torch.frombuffer(bytearray(content), dtype=torch.uint8))
        torch.accelerator.current_stream(tensor.device).wait_event(self._event)
