# SPDX-License-Identifier: Apache-2.0
"""Reads TensorBoard's event files as TensorBoard does: a start drops the points from its step on, of all files of a folder.
(tests/peers/metrics_check.py reads them with TensorBoard itself.)"""
import struct


def fields(message):
    """(number, value) of a protobuf message: bytes of what has a length, else the integer of its bits."""
    at = 0

    def varint():
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 2: None, 5: 4}[kind]
        size = varint() if size is None else size
        piece = message[at:at + size]
        at += size
        yield key >> 3, piece if kind == 2 else int.from_bytes(piece, "little")


def messages(path):
    data, at = path.read_bytes(), 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        yield dict(fields(data[at + 12:at + 12 + size]))
        at += size + 16


def scalars(folder):
    """{tag: {step: value}} of the files of a folder."""
    found = {}
    files = [path for path in folder.iterdir() if "tfevents" in path.name]
    for path in sorted(files, key=lambda path: next(messages(path))[1]):  # by the time of the first event
        for event in messages(path):
            step = event.get(2, 0)
            if 7 in event:
                for points in found.values():
                    for later in [other for other in points if other >= step]:
                        del points[later]
            for _, value in fields(event.get(5, b"")):
                entry = dict(fields(value))
                if 2 in entry:
                    tag = entry[1].decode()
                    points = found.setdefault(tag, {})
                    if step in points:
                        raise AssertionError(f"{path}: {tag} of step {step} is there twice")
                    points[step] = struct.unpack("<f", entry[2].to_bytes(4, "little"))[0]
    return found
