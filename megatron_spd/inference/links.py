"""Who sends what to whom while decoding. One edge leads back, all others lead forward:

    driver --wave--> stage 0 --wave--> stage 1 --> ... --> stage n-1
      ^                 |taps             |taps              | tokens, taps
      +-----------------+-----------------+------------------+

The driver's rank may run a stage too: what it would send to itself stays in a queue, and it does
its stage's part of each cycle itself. Receives are posted before their message exists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_spd.comm import Channel, Pending
from megatron_spd.errors import CommError
from megatron_spd.inference.stage_worker import StageCompute, WaveResult
from megatron_spd.stage_plan import StagePlan
from megatron_spd.wave import WaveFormat, WaveHeader

_WAVE, _OVERFLOW, _TAPS, _TOKENS = 1, 2, 3, 4


class WaveIn:
    """Waves from the rank before. Two receives are posted whenever one is waited for.

    So the next wave's is there before its message, and none is posted between a wave's arrival
    and its work.
    """

    def __init__(self, peer: int, wire: WaveFormat) -> None:
        self._waves, self._overflow = Channel(peer, _WAVE), Channel(peer, _OVERFLOW)
        self._wire = wire
        self.message = torch.empty(0, dtype=torch.uint8)
        """The newest wave's bytes."""
        self._next = self._waves.post_receive(wire.message_bytes)

    def receive(self, *, with_hidden: bool) -> tuple[WaveHeader, Tensor | None]:
        """The next wave, and its hidden states unless it comes from the driver."""
        following = self._waves.post_receive(self._wire.message_bytes)
        self.message = self._next.wait()
        self._next = following
        header = self._wire.unpack(self.message)
        if header.is_stop:
            following.wait()  # the stop comes twice, so that no receive stays posted
            return header, None
        if not with_hidden:
            return header, None
        if self._wire.fits_inline(header):
            return header, self._wire.inline_hidden(self.message, header)
        shape = (header.num_nodes, self._wire.hidden_size)
        return header, self._overflow.post_receive(shape, self._wire.dtype).wait()


class WaveOut:
    """Waves to the rank behind."""

    def __init__(self, peer: int, wire: WaveFormat) -> None:
        self._waves, self._overflow = Channel(peer, _WAVE), Channel(peer, _OVERFLOW)
        self._wire = wire

    def send(self, header: WaveHeader, hidden: Tensor | None) -> None:
        """Send one wave; returns at once."""
        self._send(self._wire.pack(header, None), header, hidden)

    def relay(self, message: Tensor, header: WaveHeader, hidden: Tensor) -> None:
        """Send a wave that came, with what this stage made of it; `message` is used up.

        A header is the same on every hop, so its bytes travel on as they came.
        """
        self._send(message, header, hidden)

    def _send(self, message: Tensor, header: WaveHeader, hidden: Tensor | None) -> None:
        inline = self._wire.fits_inline(header)
        if hidden is not None and inline:
            self._wire.put_hidden(message, hidden)
        self._waves.send(message)
        if hidden is not None and not inline:
            self._overflow.send(hidden)

    def stop(self) -> None:
        """Send the stop to both of the receives that the rank behind has posted."""
        for _ in range(2):
            self._waves.send(self._wire.pack(WaveHeader.stop(), None))

    def flush(self) -> None:
        """Wait until everything sent was taken."""
        self._waves.flush()
        self._overflow.flush()


class AnswersOut:
    """Taps and chosen tokens to the driver."""

    def __init__(self, driver_rank: int) -> None:
        self._taps, self._tokens = Channel(driver_rank, _TAPS), Channel(driver_rank, _TOKENS)

    def send(self, result: WaveResult) -> None:
        """The tokens first: the next wave waits for them, the draft behind it for the taps."""
        if result.tokens is not None:
            self._tokens.send(result.tokens)
        if len(result.taps):
            self._taps.send(result.taps)

    def flush(self) -> None:
        """Wait until everything sent was taken."""
        self._tokens.flush()
        self._taps.flush()


def run_stage(plan: StagePlan, stage: int, wire: WaveFormat, compute: StageCompute) -> None:
    """The loop of a rank that runs a stage and nothing else, until the stop header."""
    is_first, is_last = stage == 0, stage == plan.num_stages - 1
    above = plan.module_rank if is_first else plan.stage_ranks[stage - 1]
    waves = WaveIn(above, wire)
    onward = None if is_last else WaveOut(plan.stage_ranks[stage + 1], wire)
    answers = AnswersOut(plan.module_rank)
    while True:
        header, hidden = waves.receive(with_hidden=not is_first)
        if header.is_stop:
            break
        result = compute.step(header, hidden)
        if onward is not None:
            onward.relay(waves.message, header, result.hidden)
        answers.send(result)
    if onward is not None:
        onward.stop()
        onward.flush()
    answers.flush()


@dataclass(kw_only=True)
class _Expected:
    """Posted receives from one remote stage, by wave number."""

    taps: Channel
    tokens: Channel
    posted_taps: dict[int, Pending]
    posted_tokens: dict[int, Pending]


class DriverLinks:
    """The driver's ends of all edges, and its own stage if it has one.

    Args:
        plan: the plan; this process runs on its module rank.
        wire: the format of a hop.
        local: what computes the stage of this rank, when the module lives beside one.
    """

    def __init__(self, plan: StagePlan, wire: WaveFormat, local: StageCompute | None) -> None:
        self._plan, self._wire, self._local = plan, wire, local
        self._stage = plan.roles_of(plan.module_rank).stage
        if (self._stage is None) != (local is None):
            raise CommError(f"the plan gives this rank stage {self._stage}, compute is {local}")
        last = plan.num_stages - 1
        first_rank = plan.stage_ranks[0]
        self._out = None if self._stage == 0 else WaveOut(first_rank, wire)
        self._local_in: WaveIn | None = None
        self._local_out: WaveOut | None = None
        if self._stage is not None and self._stage > 0:
            self._local_in = WaveIn(plan.stage_ranks[self._stage - 1], wire)
        if self._stage is not None and self._stage < last:
            self._local_out = WaveOut(plan.stage_ranks[self._stage + 1], wire)
        self._remote = {
            stage: _Expected(
                taps=Channel(rank, _TAPS),
                tokens=Channel(rank, _TOKENS),
                posted_taps={},
                posted_tokens={},
            )
            for stage, rank in enumerate(plan.stage_ranks)
            if stage != self._stage
        }
        self._headers: dict[int, WaveHeader] = {}
        self._results: dict[int, WaveResult] = {}

    def emit(self, header: WaveHeader) -> None:
        """Send a wave into stage 0 and post the receives of all its answers."""
        self._headers[header.number] = header
        if self._out is not None:
            self._out.send(header, None)
        nodes, hidden = header.num_nodes, self._wire.hidden_size
        for stage, expected in self._remote.items():
            if stage == self._plan.num_stages - 1:
                pending = expected.tokens.post_receive((nodes,), torch.int64)
                expected.posted_tokens[header.number] = pending
            taps = len(self._plan.taps_of(stage))
            if taps:
                posted = expected.taps.post_receive((taps, nodes, hidden), self._wire.dtype)
                expected.posted_taps[header.number] = posted

    def step_local(self, cycle: int) -> None:
        """This rank's stage forwards the wave it gets in this cycle, if there is one."""
        if self._local is None or self._stage is None:
            return
        header = self._headers.get(cycle - self._stage)
        if header is None:
            return
        hidden = None
        if self._local_in is not None:
            header, hidden = self._local_in.receive(with_hidden=True)
        result = self._local.step(header, hidden)
        if self._local_out is not None:
            self._local_out.send(header, result.hidden)
        self._results[header.number] = result

    def tokens(self, number: int) -> list[int]:
        """The target's choices for a wave that has left the last stage; waits for them."""
        remote = self._remote.get(self._plan.num_stages - 1)
        if remote is not None:
            found: list[int] = remote.posted_tokens.pop(number).wait().tolist()
            return found
        tokens = self._results[number].tokens
        if tokens is None:
            raise CommError("the last stage chose no tokens")
        return tokens.tolist()

    def taps(self, number: int, stage: int) -> Tensor | None:
        """Taps [T, N, H] of a wave from a stage; None when the stage has none to give."""
        if not self._plan.taps_of(stage):
            return None
        remote = self._remote.get(stage)
        if remote is not None:
            return remote.posted_taps.pop(number).wait()
        return self._results[number].taps

    def forget(self, number: int) -> None:
        """A wave has left the pipeline and all its answers were read."""
        self._headers.pop(number, None)
        self._results.pop(number, None)

    def stop(self) -> None:
        """End every stage; the pipeline must be empty."""
        if self._out is not None:
            self._out.stop()
        if self._local_in is not None:
            self._local_in.receive(with_hidden=True)
        if self._local_out is not None:
            self._local_out.stop()
        for out in (self._out, self._local_out):
            if out is not None:
                out.flush()
