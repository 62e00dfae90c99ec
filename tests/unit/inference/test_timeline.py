"""The fates that a timeline tells, on the run that schedule/machine.py draws."""

from megatron_spd.inference.timeline import Timeline
from megatron_spd.schedule.machine import Machine


def run(num_stages: int, wrong: set[int], last: int) -> tuple[Timeline, Machine]:
    """A prompt of 2 tokens and a text up to position `last`; drafts at `wrong` are wrong."""
    machine, timeline = Machine(num_stages, num_rows=64), Timeline(num_stages)
    machine.admit(0, [100, 101], limit=last + 1)
    while True:
        wave = machine.wave_due()
        if wave is not None:
            commits = machine.answer([node.position + 1 for node in wave.nodes])
            timeline.commit(commits)
            if commits and commits[-1].position == last:
                machine.finish(0)
                return timeline, machine
        wave = machine.emit()
        if wave is not None:
            timeline.record(wave)
        if not machine.requests[0].prefilling:
            newest = machine.path(0)[-1]
            position = newest.position + 1
            machine.propose(newest, position + 1000 * (position in wrong))


def test_each_node_has_its_fate() -> None:
    timeline, _ = run(3, wrong={5}, last=8)
    found = [
        (node["position"], node["fate"])
        for wave in timeline.to_dict()["waves"]
        for node in wave["nodes"]
    ]
    assert found == [
        (0, "prompt"),
        (1, "prompt"),
        (2, "prompt"),
        (3, "accepted"),
        (4, "accepted"),
        (5, "rejected"),
        (6, "flushed"),
        (5, "corrected"),
        (6, "accepted"),
        (7, "accepted"),
        (8, "accepted"),
    ]
    assert timeline.flags == [True, True, False, True, True, True]


def test_a_rejection_of_the_last_token_is_not_taken_for_a_flush() -> None:
    timeline, _ = run(3, wrong={6}, last=6)
    fates = {node.position: timeline.fate(node) for wave in timeline.waves for node in wave.nodes}
    assert fates[6] == "rejected"
    assert timeline.flags == [True, True, True, False]


def test_cycles_count_from_the_first_wave() -> None:
    timeline, _ = run(2, wrong=set(), last=5)
    assert timeline.to_dict()["num_stages"] == 2
    assert [wave["cycle"] for wave in timeline.to_dict()["waves"]] == [0, 2, 3, 4, 5]
