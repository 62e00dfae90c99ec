import dataclasses

import pytest
import torch

from megatron_spd.errors import CommError
from megatron_spd.sampling import SamplingParams
from megatron_spd.schedule.machine import Machine
from megatron_spd.wave import WaveFormat, WaveHeader

FORMAT = WaveFormat(
    fingerprint="fedcba9876543210",
    max_nodes=8,
    inline_nodes=2,
    max_ancestors=3,
    hidden_size=4,
    dtype=torch.bfloat16,
)
SAMPLING = {0: SamplingParams(temperature=0.7, top_p=0.9, top_k=5, seed=2**64 - 1)}


def headers_of_a_run() -> list[WaveHeader]:
    machine = Machine(4, 32, chunk_tokens=4)
    machine.admit(0, [5, 6, 7, 8, 9], limit=20)
    found = []
    for _ in range(16):
        due = machine.wave_due()
        if due is not None:
            machine.answer([node.position + 1 for node in due.nodes])
        wave = machine.emit()
        if wave is not None:
            found.append(WaveHeader.of(wave, SAMPLING))
        if machine.requests[0].first_wave is not None:
            newest = machine.path(0)[-1]
            machine.propose(newest, newest.position + 1 + (newest.position == 8))
    return found


def test_headers_round_trip() -> None:
    headers = headers_of_a_run()
    assert any(len(rows) == 2 for header in headers for rows in header.ancestors)
    assert any(header.commits for header in headers)
    for header in headers:
        message = FORMAT.pack(header, None)
        assert message.numel() == FORMAT.message_bytes
        assert FORMAT.unpack(message) == header
    assert FORMAT.unpack(FORMAT.pack(WaveHeader.stop(), None)).is_stop


def test_only_the_last_prompt_token_is_judged() -> None:
    first, second = headers_of_a_run()[:2]
    assert first.judged == (False,) * 4
    assert second.judged == (True,)


def test_hidden_states_ride_inline() -> None:
    header = next(h for h in headers_of_a_run() if h.num_nodes == 1)
    hidden = torch.randn(1, 4).bfloat16()
    message = FORMAT.pack(header, hidden)
    assert torch.equal(FORMAT.inline_hidden(message, header), hidden)


def test_another_plan_is_refused_with_both_values() -> None:
    other = dataclasses.replace(FORMAT, fingerprint="00000000000000aa")
    message = other.pack(WaveHeader.stop(), None)
    with pytest.raises(CommError, match="plan fedcba9876543210.*plan 00000000000000aa"):
        FORMAT.unpack(message)


def test_a_wave_larger_than_the_format_is_refused() -> None:
    small = dataclasses.replace(FORMAT, max_nodes=1, max_ancestors=0)
    with pytest.raises(CommError, match="4 nodes"):
        small.pack(headers_of_a_run()[0], None)


def test_a_message_takes_the_next_stages_hidden_states() -> None:
    header = next(h for h in headers_of_a_run() if h.num_nodes == 1)
    message = FORMAT.pack(header, torch.randn(1, 4).bfloat16())
    received = FORMAT.inline_hidden(message, header)
    kept, hidden = received.clone(), torch.randn(1, 4).bfloat16()
    FORMAT.put_hidden(message, hidden)
    assert torch.equal(FORMAT.inline_hidden(message, header), hidden)
    assert torch.equal(received, kept)
    assert FORMAT.unpack(message) == header
