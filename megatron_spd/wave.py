"""What travels: a wave's header in one int64 tensor of a fixed size, and the hidden states inline.

A receiver must know a message's size before it comes, so that it can wait with the receive
posted. A header therefore has room for the largest wave, and the message of every hop has the
same size: the header, then the hidden states of up to `inline_nodes` nodes. Only a larger wave (a
chunk of a prompt) is followed by a second message, whose size its header gives.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_spd.errors import CommError
from megatron_spd.sampling import SamplingParams
from megatron_spd.schedule.machine import Wave

WIRE_VERSION = 1
_PREFIX = 8
_NODE_FIELDS = 5
_SAMPLING_FIELDS = 5
_WAVE, _STOP = 1, 2


@dataclass(frozen=True, kw_only=True)
class WaveHeader:
    """Everything a stage must know of a wave besides the hidden states. N nodes."""

    number: int
    """The wave's number; -1 says that no more waves come."""
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    rows: tuple[int, ...]
    requests: tuple[int, ...]
    judged: tuple[bool, ...]
    """Whether the target must choose behind the node."""
    ancestors: tuple[tuple[int, ...], ...]
    """Rows of each node's uncommitted ancestors."""
    commits: tuple[tuple[int, int], ...]
    """(row, request) pairs that belong to their text from this wave on."""
    sampling: tuple[tuple[int, SamplingParams], ...]
    """The sampling fields of each request in the wave."""

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)

    @property
    def is_stop(self) -> bool:
        return self.number < 0

    @classmethod
    def stop(cls) -> WaveHeader:
        """The header after which a stage ends."""
        return cls(
            number=-1,
            tokens=(),
            positions=(),
            rows=(),
            requests=(),
            judged=(),
            ancestors=(),
            commits=(),
            sampling=(),
        )

    @classmethod
    def of(cls, wave: Wave, sampling: dict[int, SamplingParams]) -> WaveHeader:
        """The header of a wave of the machine; every node has its row."""
        nodes = wave.nodes
        requests = tuple(node.request for node in nodes)
        return cls(
            number=wave.number,
            tokens=tuple(node.token for node in nodes),
            positions=tuple(node.position for node in nodes),
            rows=tuple(-1 if node.row is None else node.row for node in nodes),
            requests=requests,
            judged=tuple(node.judged for node in nodes),
            ancestors=tuple(node.ancestor_rows() for node in nodes),
            commits=wave.commits,
            sampling=tuple((request, sampling[request]) for request in dict.fromkeys(requests)),
        )


@dataclass(frozen=True, kw_only=True)
class WaveFormat:
    """The sizes both ends of a hop agree on.

    Args:
        fingerprint: the plan's, checked on receipt.
        max_nodes: nodes of the largest wave.
        inline_nodes: nodes whose hidden states fit in the one message of a hop.
        max_ancestors: uncommitted ancestors a node may have.
        hidden_size: H.
        dtype: of the hidden states.
    """

    fingerprint: str
    max_nodes: int
    inline_nodes: int
    max_ancestors: int
    hidden_size: int
    dtype: torch.dtype

    @property
    def _max_commits(self) -> int:
        return 2 * self.max_nodes + self.max_ancestors + 1

    @property
    def header_words(self) -> int:
        """Length of the header in int64."""
        nodes = self.max_nodes * (_NODE_FIELDS + self.max_ancestors + _SAMPLING_FIELDS)
        return _PREFIX + nodes + 2 * self._max_commits

    @property
    def message_bytes(self) -> int:
        """Size of a hop's message: header and inline hidden states."""
        inline = self.inline_nodes * self.hidden_size * self.dtype.itemsize
        return 8 * self.header_words + inline

    def pack(self, header: WaveHeader, hidden: Tensor | None) -> Tensor:
        """One uint8 message. `hidden` [N, H] rides inline when it fits.

        Raises:
            CommError: the wave is larger than the format.
        """
        words = self._words(header)
        raw = bytearray(self.message_bytes)
        struct.pack_into(f"<{len(words)}q", raw, 0, *words)
        message = torch.frombuffer(raw, dtype=torch.uint8)
        if hidden is not None and self.fits_inline(header):
            self.put_hidden(message, hidden)
        return message

    def put_hidden(self, message: Tensor, hidden: Tensor) -> None:
        """Write hidden states [N, H] into a message, over those it may hold."""
        self._inline(message, len(hidden)).copy_(hidden.detach())

    def fits_inline(self, header: WaveHeader) -> bool:
        """Whether the hidden states need no message of their own."""
        return header.num_nodes <= self.inline_nodes

    def unpack(self, message: Tensor) -> WaveHeader:
        """The header of a message.

        Raises:
            CommError: another wire version or another plan.
        """
        raw = message.numpy().data
        prefix = struct.unpack_from(f"<{_PREFIX}q", raw)
        version, fingerprint, kind, number, nodes, commits, requests, width = prefix
        if version != WIRE_VERSION or fingerprint != _signed(self.fingerprint):
            raise CommError(
                f"expected wire version {WIRE_VERSION} and plan {self.fingerprint}, got version "
                f"{version} and plan {fingerprint & (2**64 - 1):016x}; start every rank alike"
            )
        if kind == _STOP:
            return WaveHeader.stop()
        size = nodes * (_NODE_FIELDS + width) + 2 * commits + _SAMPLING_FIELDS * requests
        reader = _Reader(struct.unpack_from(f"<{size}q", raw, 8 * _PREFIX))
        tokens, positions, rows, owners, judged = (reader.take(nodes) for _ in range(_NODE_FIELDS))
        ancestors = [tuple(r for r in reader.take(width) if r >= 0) for _ in range(nodes)]
        pairs = [(row, request) for row, request in (reader.take(2) for _ in range(commits))]
        return WaveHeader(
            number=number,
            tokens=tokens,
            positions=positions,
            rows=rows,
            requests=owners,
            judged=tuple(bool(flag) for flag in judged),
            ancestors=tuple(ancestors),
            commits=tuple(pairs),
            sampling=tuple(_sampling_from(reader.take(_SAMPLING_FIELDS)) for _ in range(requests)),
        )

    def inline_hidden(self, message: Tensor, header: WaveHeader) -> Tensor:
        """The hidden states [N, H] that rode in a message."""
        return self._inline(message, header.num_nodes).clone()

    def _inline(self, message: Tensor, nodes: int) -> Tensor:
        start = 8 * self.header_words
        size = nodes * self.hidden_size * self.dtype.itemsize
        return message[start : start + size].view(self.dtype).view(nodes, self.hidden_size)

    def _words(self, header: WaveHeader) -> list[int]:
        width = max((len(rows) for rows in header.ancestors), default=0)
        sizes = (header.num_nodes, self.max_nodes), (len(header.commits), self._max_commits)
        if any(size > room for size, room in sizes) or width > self.max_ancestors:
            raise CommError(
                f"wave {header.number} has {header.num_nodes} nodes, {len(header.commits)} commits "
                f"and {width} ancestors a node, the format has room for {self.max_nodes}, "
                f"{self._max_commits} and {self.max_ancestors}"
            )
        kind = _STOP if header.is_stop else _WAVE
        words = [WIRE_VERSION, _signed(self.fingerprint), kind, header.number, header.num_nodes]
        words += [len(header.commits), len(header.sampling), width]
        words += [*header.tokens, *header.positions, *header.rows, *header.requests]
        words += [int(flag) for flag in header.judged]
        for rows in header.ancestors:
            words += [*rows, *[-1] * (width - len(rows))]
        for pair in header.commits:
            words += pair
        for request, params in header.sampling:
            words += _sampling_words(request, params)
        return words


class _Reader:
    """Takes runs of words, one after the other."""

    def __init__(self, words: tuple[int, ...]) -> None:
        self._words, self._at = words, 0

    def take(self, count: int) -> tuple[int, ...]:
        self._at += count
        return self._words[self._at - count : self._at]


def _signed(fingerprint: str) -> int:
    value = int(fingerprint, 16)
    return value - 2**64 if value >= 2**63 else value


def _sampling_words(request: int, params: SamplingParams) -> list[int]:
    floats = (params.temperature, params.top_p)
    bits = [struct.unpack("<q", struct.pack("<d", value))[0] for value in floats]
    seed = struct.unpack("<q", struct.pack("<Q", params.seed))[0]
    return [request, bits[0], params.top_k, bits[1], seed]


def _sampling_from(words: tuple[int, ...]) -> tuple[int, SamplingParams]:
    request, temperature, top_k, top_p, seed = words
    floats = [struct.unpack("<d", struct.pack("<q", bits))[0] for bits in (temperature, top_p)]
    params = SamplingParams(
        temperature=floats[0], top_k=top_k, top_p=floats[1], seed=seed & (2**64 - 1)
    )
    return request, params
