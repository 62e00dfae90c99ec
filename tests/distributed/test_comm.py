"""Messages between ranks, and how the loss of one is told."""

import os
import time
from dataclasses import dataclass

import pytest
import torch

from megatron_spd import comm
from megatron_spd.comm import Channel, RankNames
from megatron_spd.errors import CommError
from megatron_spd.testing import run_ranks

FEW_SECONDS = 8.0


@dataclass
class FakeRoles:
    stage: int | None


class FakePlan:
    """Two stages and the module on a rank of its own."""

    world_size = 3
    module_rank = 2

    def roles_of(self, rank: int) -> FakeRoles:
        return FakeRoles(stage=rank if rank < 2 else None)


def round_trips(rank: int, count: int) -> list[list[int]]:
    """Rank 0 sends ``count`` messages round the ring, all receives posted beforehand."""
    size = comm.current_world().size
    after, before = (rank + 1) % size, (rank - 1) % size
    forward, backward = Channel(after, 1), Channel(before, 1)
    pending = [backward.post_receive(16) for _ in range(count)]
    if rank == 0:
        for index in range(count):
            forward.send(torch.full((16,), index, dtype=torch.uint8))
    seen = []
    for receive in pending:
        message = receive.wait(FEW_SECONDS)
        assert receive.wait() is message
        seen.append(sorted(set(message.tolist())))
        if rank != 0:
            forward.send(message + 50)
    forward.flush(FEW_SECONDS)
    return seen


def test_messages_go_round_in_order() -> None:
    first, second, third = run_ranks(round_trips, 3, (100,), timeout_s=60)
    assert second == [[index] for index in range(100)]
    assert third == [[index + 50] for index in range(100)]
    assert first == [[index + 100] for index in range(100)]


def tags_and_types(rank: int) -> list[float]:
    """Two tags between the same ranks, received in the other order; more sends than are kept."""
    peer = 1 - rank
    low, high = Channel(peer, 1, max_unsent=2), Channel(peer, 2, max_unsent=2)
    if rank == 0:
        for index in range(5):
            low.send(torch.full((2, 3), float(index)))
        high.send(torch.full((4,), 9.0, dtype=torch.bfloat16).float())
        low.flush(FEW_SECONDS)
        high.flush(FEW_SECONDS)
        return []
    late = high.post_receive((4,), torch.float32)
    posted = [low.post_receive((2, 3), torch.float32) for _ in range(5)]
    return [late.wait(FEW_SECONDS)[0].item(), *(p.wait(FEW_SECONDS)[0, 0].item() for p in posted)]


def test_tags_keep_messages_apart() -> None:
    assert run_ranks(tags_and_types, 2, timeout_s=60)[1] == [9.0, 0.0, 1.0, 2.0, 3.0, 4.0]


def lose_a_peer(rank: int) -> tuple[str, float]:
    """Rank 1 (stage 1) dies; rank 0 waits for it with a receive posted, rank 2 for rank 0."""
    comm.name_stages(FakePlan())  # type: ignore[arg-type]
    comm.barrier()
    if rank == 1:
        time.sleep(0.5)
        os._exit(7)
    peer = 1 if rank == 0 else 0
    pending = Channel(peer, 3).post_receive(8)
    start = time.monotonic()
    try:
        pending.wait(30.0)
    except CommError as error:
        return str(error), time.monotonic() - start
    raise AssertionError("the receive ended without an error")


def test_the_death_of_a_peer_is_told_by_name_within_seconds() -> None:
    first, nothing, third = run_ranks(lose_a_peer, 3, timeout_s=60, may_die=[1])
    assert nothing is None
    assert first[0].startswith("rank 1 (stage 1, host ")
    assert "Connection closed by peer" in first[0]
    assert first[0].isascii()
    assert "(noticed by rank 0 (stage 0, host " in first[0]
    assert first[1] < FEW_SECONDS
    # rank 2 noticed only that rank 0 was gone
    assert third[0].startswith(f"{first[0]}; then rank 0 (stage 0, host ")
    assert third[1] < FEW_SECONDS


def send_to_the_dead(rank: int) -> str:
    """Rank 1 dies with messages for it under way."""
    comm.barrier()
    if rank == 1:
        os._exit(0)
    channel = Channel(1, 0)
    try:
        for _ in range(3):
            channel.send(torch.zeros(1 << 20))
        channel.flush(FEW_SECONDS)
    except CommError as error:
        return str(error)
    raise AssertionError("every message was taken")


def test_a_send_to_a_dead_peer_names_it() -> None:
    assert "rank 1 (host" in run_ranks(send_to_the_dead, 2, timeout_s=60, may_die=[1])[0]


def wait_in_vain(rank: int) -> str:
    """Rank 1 is alive but silent."""
    message = ""
    if rank == 0:
        try:
            Channel(1, 0).post_receive(4).wait(0.5)
        except CommError as error:
            message = str(error)
        comm.current_world().store.set("done", "")
    # not a gather: a receive that timed out has closed the connection
    comm.current_world().store.wait(["done"])
    return message


def test_a_silent_peer_is_named() -> None:
    message = run_ranks(wait_in_vain, 2, timeout_s=60)[0]
    assert message.startswith("rank 1 (host ")
    assert "imed out" in message


def compare(rank: int, fingerprints: list[str]) -> str:
    """The message of the exchange, nothing when the fingerprints agree."""
    try:
        comm.exchange_fingerprints(fingerprints[rank])
    except CommError as error:
        return str(error)
    return ""


def test_a_fingerprint_mismatch_names_the_ranks() -> None:
    for message in run_ranks(compare, 3, (["aa", "aa", "bb"],), timeout_s=60):
        assert "rank 0 (host" in message
        assert "has aa, rank 2 (host" in message
        assert "rank 1" not in message


def absent(rank: int) -> str:
    """Fingerprints agree once; then rank 1 stays away."""
    comm.exchange_fingerprints("aa")
    if rank == 1:
        time.sleep(2.0)
        return ""
    try:
        comm.exchange_fingerprints("aa", timeout_s=0.5)
    except CommError as error:
        return str(error)
    return "no error"


def test_a_rank_that_does_not_answer_is_named() -> None:
    message = run_ranks(absent, 2, timeout_s=60)[0]
    assert message.startswith("rank 1 (host ")
    assert "within 0.5 s" in message


def total(rank: int) -> float:
    """One plus two."""
    own = torch.tensor([rank + 1.0])
    summed = comm.sum_over_ranks(own)
    assert own.item() == rank + 1.0
    return summed.item()


def test_sums() -> None:
    assert run_ranks(total, 2, timeout_s=60) == [3.0, 3.0]


def fail_on_one(rank: int) -> None:
    """Rank 1 raises; rank 0 notices only that it is gone."""
    if rank == 1:
        raise ValueError("the reason")
    Channel(1, 0).post_receive(4).wait()


def test_the_failing_ranks_traceback_is_the_message() -> None:
    with pytest.raises(AssertionError, match="the reason") as caught:
        run_ranks(fail_on_one, 2, timeout_s=60)
    assert str(caught.value).startswith("rank 1:\nTraceback")
    assert "fail_on_one" in str(caught.value)


def fail_by_name(rank: int) -> str:
    """Rank 1 fails in a reported block; what rank 0, which waits for it, says."""
    comm.name_stages(FakePlan())  # type: ignore[arg-type]
    if rank == 1:
        try:
            with comm.reporting_failures():
                raise ValueError("the reason")
        except ValueError:
            os._exit(1)
    try:
        Channel(1, 0).post_receive(4).wait(FEW_SECONDS)
    except CommError as error:
        return str(error)
    return "no error"


def test_a_peer_that_failed_is_named_with_its_reason() -> None:
    for message in (run_ranks(fail_by_name, 3, timeout_s=60, may_die=[1]))[::2]:
        assert message.startswith("rank 1 (stage 1, host ")
        assert "failed: ValueError: the reason; then rank 1 (stage 1" in message


def sleep_on(rank: int, folder: str) -> None:
    """Write down the process and never end."""
    with open(f"{folder}/{rank}", "w") as file:
        file.write(str(os.getpid()))
    while rank >= 0:
        time.sleep(0.1)


def test_ranks_that_hang_are_ended_and_shown(tmp_path: object) -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match="did not end within 4 s") as caught:
        run_ranks(sleep_on, 2, (str(tmp_path),), timeout_s=4)
    assert time.monotonic() - start < FEW_SECONDS
    assert "sleep_on" in str(caught.value)
    for rank in range(2):
        with open(f"{tmp_path}/{rank}") as file, pytest.raises(ProcessLookupError):
            os.kill(int(file.read()), 0)


def test_names_say_what_is_known() -> None:
    assert RankNames().of(3) == "rank 3"
    names = RankNames(hosts=("a", "b"), stages={0: 0, 1: 1}, module_rank=1)
    assert names.of(0) == "rank 0 (stage 0, host a)"
    assert names.of(1) == "rank 1 (stage 1, module, host b)"


def local_world(rank: int) -> tuple[int, int]:
    """A world of one, twice the same, left and entered again."""
    for _ in range(2):
        world = comm.init_local()
        assert comm.init_local() is world
        comm.exchange_fingerprints("aa")
        comm.barrier()
        with pytest.raises(CommError, match="cannot open a channel"):
            Channel(0, 0)
        comm.shutdown()
    with pytest.raises(CommError, match="init_local"):
        comm.current_world()
    return rank, world.size


def test_a_world_of_one() -> None:
    assert run_ranks(local_world, 1, timeout_s=60, init=False) == [(0, 1)]
